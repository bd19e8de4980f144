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
    """Measures each model once for each device; figures are kept in a file, so that a later driver decides alike."""

    def __init__(self, file: Path, limits: Limits) -> None:
        self._file = file
        self._limits = limits
        self._known: dict[str, Speed] | None = None

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
        """The figures of the spec's model, measured now unless they are known."""
        if self._known is None:
            self._known = _read(self._file)
        key = _key(spec)
        if key not in self._known:
            self._known[key] = measured(spec)
            line = json.dumps({"key": key, **asdict(self._known[key])})
            # A line of its own even where a driver died in the middle of the one before.
            with self._file.open("a") as file:
                file.write(f"\n{line}\n")
                file.flush()
                os.fsync(file.fileno())
        return self._known[key]


def measured(spec: TrialSpec) -> Speed:
    """Time the model of a spec; InfeasibleArchitecture when it cannot be run at all."""
    config = rebuild(spec).model
    rows = max(1, spec.budget.micro_batch_tokens // config.train_len)
    try:
        with imposed(spec):
            model = config.build(spec.seeds.init, spec.device)
            tokens = torch.randint(config.vocab_size, (rows, config.train_len), generator=_generator(spec))
            tokens = tokens.to(spec.device)

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
            latency = _seconds(forward, spec.device)
            model.train()
            return Speed(latency_ms=1000 * latency, tokens_per_second=tokens.numel() / _seconds(both, spec.device))
    except RuntimeError as error:
        words = str(error).strip().split("\n")[0]
        raise InfeasibleArchitecture(
            f"limits: the model cannot be timed on {spec.device} ({type(error).__name__}: {words}); shrink it"
        ) from error


def _seconds(run: Callable[[], None], device: str) -> float:
    found = []
    for _ in range(1 + _REPEATS):
        begun = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return min(found[1:])


def _generator(spec: TrialSpec) -> torch.Generator:
    return torch.Generator().manual_seed(seed_from(spec.seeds.data, "stopwatch") % 2**63)


def _key(spec: TrialSpec) -> str:
    """What a figure depends on: the model, its micro-batch, and the machine."""
    gpu = torch.cuda.get_device_name() if spec.device == "cuda" else ""
    machine = (platform.node(), spec.device, gpu, spec.dtype, spec.threads, spec.deterministic)
    return digest({"model": spec.candidate["model"], "rows": spec.budget.micro_batch_tokens, "machine": list(machine)})


def _read(file: Path) -> dict[str, Speed]:
    """The figures in the file; a line that was cut off by a kill is passed over."""
    found: dict[str, Speed] = {}
    if not file.exists():
        return found
    for line in file.read_text().splitlines():
        try:
            kept = json.loads(line)
        except json.JSONDecodeError:
            continue
        key = kept.pop("key")
        found[key] = Speed(**kept)
    return found
