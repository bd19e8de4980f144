"""What a ladder trains: each candidate at each size, its learning rate and its budget, as pure functions of the runs.

`rules` states how in sentences, which stand beside the ladder's verdicts.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blocks.families import InfeasibleArchitecture, Role
from blocks.model import ModelConfig
from blocks.registry import decode
from runners.candidate import Resolved, check_budget, pick_device, resolve
from runners.ladder_members import Member
from runners.long_plan import NO_LIMIT_SECONDS
from search_space.canon import seed_from
from search_space.errors import UserError
from search_space.experiment import Experiment
from search_space.records import Budget, Seeds
from search_space.settings import FinalSpec, FreeSize, Limits, PrunerSpec, SizeTarget

if TYPE_CHECKING:
    from runners.tasks.data import TaskShape

DEPTHS = ("given", "scaled")
SWEEPS = (0, 3, 5)
"""Learning rates that may be tried at the smallest size, the transferred one in their middle."""
STEP = 2.0
"""Factor between two of them."""
READINGS = 8
"""Validation readings of a training."""
REPEATS = 4.0
"""Passes over the data up to which repeated tokens are nearly as good as new ones (Muennighoff et al. 2023)."""
_HEADS = (".heads", ".kv_heads")
_MOST_TRIES = 8


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user wants to know."""

    runs: tuple[str, ...]
    sizes: tuple[int, ...]
    """Parameters, increasing."""
    target: int
    seeds: int = 3
    tokens_per_param: float = 20.0
    name: str = ""
    """Of the ladder; empty: the first run's search with '-ladder' behind it."""
    sweep: int = 3
    depth: str = "given"
    batch_tokens: int = 0
    """0: those of the first run."""
    device: str = "auto"
    sure: float = 0.9

    def __post_init__(self) -> None:
        if len(self.runs) < 2 or len(set(self.runs)) < len(self.runs):
            raise UserError(f"assay ladder {' '.join(self.runs)}: takes two or more different runs; name another")
        if len(self.sizes) < 3 or list(self.sizes) != sorted(set(self.sizes)):
            raise UserError(
                f"--sizes {','.join(map(str, self.sizes))}: takes at least three growing sizes, since two bear any "
                f"curve; write for example 1M,3M,10M"
            )
        if self.target <= self.sizes[-1]:
            raise UserError(
                f"--target {self.target:,}: must lie beyond the largest of --sizes ({self.sizes[-1]:,}); what is "
                f"trained is judged by assay finals"
            )
        if self.seeds < 2:
            raise UserError(f"--seeds {self.seeds}: one seed tells nothing of how far seeds vary; write at least 2")
        if self.depth not in DEPTHS or self.sweep not in SWEEPS:
            raise UserError(
                f"--depth {self.depth} --sweep {self.sweep}: takes a depth of {' or '.join(DEPTHS)} and a sweep of "
                f"{', '.join(map(str, SWEEPS))} rates; correct it"
            )
        if not 0.5 < self.sure < 1:
            raise UserError(f"--sure {self.sure:g}: takes a probability above 0.5 and below 1; write 0.9")
        if not 0 < self.tokens_per_param < math.inf:
            raise UserError(f"--tokens-per-param {self.tokens_per_param:g}: takes a number above 0; write 20")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One training that the ladder needs."""

    label: str
    rung: int
    replica: int
    """Of the seeds; -1 in the sweep."""
    place: int
    """In the sweep, how many steps the rate lies above the transferred one; 0 else."""

    @property
    def is_swept(self) -> bool:
        """True for a learning rate that is tried."""
        return self.replica < 0


def at_size(member: Member, size: int, asked: Asked, shape: "TaskShape", place: int = 0) -> Resolved:
    """The candidate at a size: layers by the rule of depth, heads with the width, the rate by the rule of rates."""
    experiment = dataclasses.replace(member.experiment, size=SizeTarget(measure="params", value=size), limits=Limits())
    layers = layers_at(member, size, asked.depth)
    point = {**member.point, "model.layers": layers}
    counts = {path: int(value) for path, value in point.items() if path.endswith(_HEADS)}
    ratio = math.sqrt(size / member.params * int(member.point["model.layers"]) / layers)
    tried: list[dict[str, int]] = []
    try:
        for _ in range(_MOST_TRIES):
            heads = {path: heads_at(count, ratio) for path, count in counts.items()}
            resolved = resolve({**point, **heads}, experiment, shape)
            width = resolved.candidate.model.d_model
            if heads in tried:
                break
            tried.append(heads)
            ratio = width / member.width
    except InfeasibleArchitecture as error:
        raise UserError(
            f"assay ladder: {member.label} ({member.run}) cannot be built with {size:,} parameters: {error}"
        ) from error
    factor = 1.0 if keeps_rate(resolved.candidate.model) else member.width / width
    rate = float(member.point[member.rate_path]) * factor * STEP**place
    flat = {**resolved.flat, member.rate_path: rate}
    optimizer = dataclasses.replace(resolved.candidate.optimizer, learning_rate=rate)  # type: ignore[type-var]
    return dataclasses.replace(
        resolved, flat=flat, candidate=dataclasses.replace(resolved.candidate, optimizer=optimizer)
    )


def layers_at(member: Member, size: int, depth: str) -> int:
    """Layers at a size: those of the run, or in proportion to the cube root of the size."""
    layers = int(member.point["model.layers"])
    return layers if depth == "given" else max(1, round(layers * (size / member.params) ** (1 / 3)))


def heads_at(heads: int, ratio: float) -> int:
    """Heads for a model so much wider: a multiple of those given, or a divisor of them where it is narrower."""
    if ratio >= 1:
        return heads * max(1, round(ratio))
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    return min(divisors, key=lambda count: abs(math.log(count / (heads * ratio))))


def keeps_rate(config: ModelConfig) -> bool:
    """True when the init rule itself slows wider layers down, so that one learning rate fits all widths."""
    narrow, wide = (config.init.learning_rate_factor(Role.FFN_IN, fan, fan, config.layers) for fan in (64, 128))
    return narrow != wide


def budget_at(base: Budget, size: int, asked: Asked, train_len: int) -> Budget:
    """What a training at a size may spend: tokens in proportion to parameters, in whole batches of one size."""
    batch = asked.batch_tokens or base.batch_tokens
    tokens = max(round(asked.tokens_per_param * size / batch), 1) * batch
    micro = base.micro_batch_tokens if batch % base.micro_batch_tokens == 0 else batch
    budget = Budget(
        tokens=tokens,
        batch_tokens=batch,
        micro_batch_tokens=batch if base.micro_batch_tokens == base.batch_tokens else micro,
        eval_tokens=base.eval_tokens,
        eval_every=max(tokens // batch // READINGS, 1) * batch,
        max_seconds=NO_LIMIT_SECONDS,
    )
    check_budget(budget, train_len)
    return budget


def seeds_at(experiment: Experiment, part: Part) -> Seeds:
    """The same for every candidate at a size and replica; others in the sweep."""
    stream = "ladder sweep" if part.is_swept else "ladder"
    init, data, dropout = (
        seed_from(experiment.search.seed, stream, what, part.rung, part.replica) for what in ("init", "data", "dropout")
    )
    return Seeds(init=init, data=data, dropout=dropout)


def parts(labels: Sequence[str], asked: Asked) -> list[Part]:
    """Every training: the sweep at the smallest size, then size by size, replica by replica, candidates in turn."""
    half = asked.sweep // 2
    swept = [
        Part(label=label, rung=asked.sizes[0], replica=-1, place=place)
        for place in (range(-half, half + 1) if asked.sweep else ())
        for label in labels
    ]
    climbed = [
        Part(label=label, rung=size, replica=replica, place=0)
        for size in asked.sizes
        for replica in range(asked.seeds)
        for label in labels
    ]
    return swept + climbed


def tuned(losses: Mapping[int, float], sweep: int) -> tuple[int, str]:
    """The place of the best rate of an ended sweep, and why it is not known to be the best; empty when it is."""
    if not sweep:
        return 0, ""
    finite = {place: loss for place, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        return 0, "no learning rate of the sweep ended well; it kept the transferred one"
    best = min(finite, key=lambda place: (finite[place], abs(place)))
    half = sweep // 2
    edge = abs(best) == half
    return best, f"its best learning rate lies at an edge of the sweep (x {STEP**best:g})" if edge else ""


def ladder_experiment(found: Sequence[Member], asked: Asked, name: str) -> Experiment:
    """The experiment that the ladder's runs belong to: task and engine of the first run, nothing searched."""
    first = found[0].experiment
    listed = ", ".join(f"{one.label} ({one.run})" for one in found)
    sizes = ", ".join(f"{size:,}" for size in asked.sizes)
    return dataclasses.replace(
        first,
        name=name,
        description=f"Ladder: {listed} at {sizes} parameters, to judge them at {asked.target:,}.",
        size=FreeSize(),
        limits=Limits(),
        objectives=("loss",),
        baseline={},
        final=FinalSpec(),
        search=dataclasses.replace(
            first.search,
            trials=len(parts([one.label for one in found], asked)),
            pruner=PrunerSpec(),
            warm_start=(),
            diagnostics=False,
        ),
        engine=dataclasses.replace(first.engine, device=asked.device),
        blocks=tuple(dict.fromkeys(module for one in found for module in one.experiment.blocks)),
        max_hours=math.inf,
        max_tokens=math.inf,
    )


def rules(found: Sequence[Member], asked: Asked, batch: int) -> list[str]:
    """How everything was chosen, in sentences."""
    kept = [one.label for one in found if keeps_rate(_model_of(one))]
    moved = [one.label for one in found if one.label not in kept]
    said = [
        "Size: d_model and d_ff are solved for the parameters within 1 %; heads grow with d_model at the same width "
        "each; all else is the run's own.",
        "Depth: the layers of the run."
        if asked.depth == "given"
        else "Depth: layers grow with the cube root of the parameters.",
        f"Budget: {asked.tokens_per_param:g} x parameters training tokens in batches of {batch:,}; the schedule is "
        f"stretched over them.",
    ]
    if kept:
        said.append(f"Learning rate of {', '.join(kept)}: one for all widths, as its init rule provides (mup).")
    if moved:
        said.append(
            f"Learning rate of {', '.join(moved)}: in inverse proportion to d_model (Yang et al. 2022, "
            "arXiv:2203.03466, table 3, hidden layers under Adam)."
        )
    if asked.sweep:
        said.append(
            f"Sweep: at the smallest size each candidate tries {asked.sweep} rates, a factor of {STEP:g} apart; the "
            "best one is carried upwards. The sweep enters no fit."
        )
    said.append(
        f"Seeds: {asked.seeds} at each size; at one size and seed all candidates see the same data in the same order."
    )
    return said


def _model_of(member: Member) -> ModelConfig:
    config: ModelConfig = decode(ModelConfig, member.spec.candidate["model"])
    return config


def identity(found: Sequence[Member], asked: Asked, experiment: Experiment) -> dict[str, Any]:
    """What may not change under one name; further sizes above, more seeds and another target may."""
    decides = dict(experiment.engine.decides())
    if experiment.engine.kind == "local":
        decides["device"] = pick_device(experiment.engine.device)
    return {
        "runs": {one.label: one.run_id for one in found},
        "smallest": asked.sizes[0],
        "tokens_per_param": asked.tokens_per_param,
        "sweep": asked.sweep,
        "depth": asked.depth,
        "batch_tokens": asked.batch_tokens,
        "engine": decides,
    }
