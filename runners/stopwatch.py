"""How fast a model is on the device it is to train on, measured before it trains and kept, to hold it to limits."""

import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from blocks.families import InfeasibleArchitecture
from runners.candidate import rebuild
from runners.conditions import imposed
from runners.evaluate import autocast
from runners.guard import Guard
from search_space.canon import digest, seed_from
from search_space.records import TrialSpec
from search_space.settings import Limits

_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The best of a few repeats after one that warms up: what else runs on the machine only ever slows a model."""

    latency_ms: float
    """One forward pass over one sequence of the training length, without gradients."""
    tokens_per_second: float
    """Forward and backward passes over micro-batches; the optimiser's step is left out."""


class Stopwatch:
    """Measures each model once for each device; what is found is kept in a file: later drivers decide alike."""

    def __init__(self, file: Path, limits: Limits, guard: Guard) -> None:
        self._file = file
        self._limits = limits
        self._guard = guard
        self._known: dict[str, Speed | str] | None = None
        """Figures, or why there are none, by what they depend on."""

    @property
    def needed(self) -> bool:
        """True when a limit depends on what is measured."""
        return math.isfinite(self._limits.max_latency_ms) or self._limits.min_tokens_per_second > 0

    def check(self, spec: TrialSpec) -> None:
        """InfeasibleArchitecture when the model is too slow."""
        if not self.needed:
            return
        speed = self.speed(spec)
        for name, value, good in (
            ("max_latency_ms", speed.latency_ms, speed.latency_ms <= self._limits.max_latency_ms),
            (
                "min_tokens_per_second",
                speed.tokens_per_second,
                speed.tokens_per_second >= self._limits.min_tokens_per_second,
            ),
        ):
            if not good:
                raise InfeasibleArchitecture(
                    f"limits.{name}={getattr(self._limits, name):g}: the model was measured at {value:.4g} on "
                    f"{spec.device} before training; loosen the limit or shrink the model"
                )

    def marks(self, spec: TrialSpec) -> dict[str, dict[str, float]]:
        """What is recorded of a trial when it is stored; nothing when no limit asks for it."""
        return {"measured": asdict(self.speed(spec))} if self.needed else {}

    def speed(self, spec: TrialSpec) -> Speed:
        """The figures of the spec's model, measured now unless they are known; InfeasibleArchitecture: it has none."""
        if self._known is None:
            self._known = _read(self._file)
        key = _key(spec)
        if key not in self._known:
            found = self._measure(spec)
            self._known[key] = found
            kept = {"refused": found} if isinstance(found, str) else asdict(found)
            # A line of its own even where a driver died in the middle of the one before.
            with self._file.open("a") as file:
                file.write(f"\n{json.dumps({'key': key, **kept})}\n")
                file.flush()
                os.fsync(file.fileno())
        speed = self._known[key]
        if isinstance(speed, str):
            raise InfeasibleArchitecture(speed)
        return speed

    def _measure(self, spec: TrialSpec) -> Speed | str:
        try:
            return Speed(**self._guard.figures(spec))
        except InfeasibleArchitecture as refusal:
            return str(refusal)


def measured(spec: TrialSpec, tick: Callable[[], None] = lambda: None) -> Speed:
    """Time the model of a spec, in a process that may die of it; `tick` is called after each step of the way."""
    config = rebuild(spec).model
    rows = max(1, spec.budget.micro_batch_tokens // config.train_len)
    with imposed(spec):
        model = config.build(spec.seeds.init, spec.device)
        tokens = torch.randint(config.vocab_size, (rows, config.train_len), generator=_generator(spec))
        tokens = tokens.to(spec.device)
        tick()

        def forward() -> None:
            with torch.no_grad(), autocast(spec.device, spec.dtype):
                model(tokens[:1])

        def both() -> None:
            with autocast(spec.device, spec.dtype):
                logits, auxiliary = model(tokens)
                loss = cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            (loss + auxiliary).backward()
            model.zero_grad(set_to_none=True)

        model.eval()
        latency = _seconds(forward, spec.device, tick)
        model.train()
        seconds = _seconds(both, spec.device, tick)
    return Speed(latency_ms=1000 * latency, tokens_per_second=tokens.numel() / seconds)


def _seconds(run: Callable[[], None], device: str, tick: Callable[[], None]) -> float:
    found = []
    for _ in range(1 + _REPEATS):
        begun = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
        tick()
    return min(found[1:])


def _generator(spec: TrialSpec) -> torch.Generator:
    return torch.Generator().manual_seed(seed_from(spec.seeds.data, "stopwatch") % 2**63)


def _key(spec: TrialSpec) -> str:
    """What a figure depends on: the model, its micro-batch, and the machine."""
    gpu = torch.cuda.get_device_name() if spec.device == "cuda" else ""
    machine = (platform.node(), spec.device, gpu, spec.dtype, spec.threads, spec.deterministic)
    return digest({"model": spec.candidate["model"], "rows": spec.budget.micro_batch_tokens, "machine": list(machine)})


def _read(file: Path) -> dict[str, Speed | str]:
    """What the file keeps; a line that was cut off by a kill is passed over."""
    found: dict[str, Speed | str] = {}
    if not file.exists():
        return found
    for line in file.read_text().splitlines():
        try:
            kept = json.loads(line)
        except json.JSONDecodeError:
            continue
        key = kept.pop("key")
        found[key] = kept["refused"] if "refused" in kept else Speed(**kept)
    return found
