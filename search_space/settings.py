"""The parts of an experiment beside its space: plain frozen values, checked when the file is read."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from search_space.domains import Scalar

MEASURES = ("params", "active_params", "body_params", "flops_per_token")
"""What a search can hold equal: all parameters, those without embeddings and head, or forward FLOPs per token."""
OBJECTIVES = ("loss", "params", "flops_per_token", "state_bytes_per_token", "tokens_per_second")
SAMPLERS = ("random", "tpe", "grid", "gp", "cmaes", "nsga2", "evolution")
SEVERAL_OBJECTIVES = ("random", "tpe", "nsga2", "evolution")
"""Samplers that know what to do with more than one objective."""
PRUNERS = ("none", "asha", "hyperband", "median", "pbt")
RANKS_FRONTS = ("asha", "hyperband")
"""Pruners that compare trials by all objectives."""
COPIES = ("pbt",)
"""Pruners that end no trial but have it go on from another one's state."""
POPULATIONS = {"evolution": 20}
"""Populations of samplers that take another one than nsga2 where the file gives none."""
ENGINES = ("local", "ray")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class FreeSize:
    """Sizes are searched or given like any other field."""


@dataclass(frozen=True, kw_only=True)
class SizeTarget:
    """Every candidate is solved to the same cost."""

    measure: str
    value: float


Size = SizeTarget | FreeSize


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Points beyond a limit are refused before anything trains; infinity where the file sets none."""

    max_params: float = math.inf
    max_flops_per_token: float = math.inf
    max_state_bytes: float = math.inf
    """Bytes of decoding state after a sequence of the training length."""
    max_latency_ms: float = math.inf
    """Of one forward pass over one sequence, measured on the device before training."""
    min_tokens_per_second: float = 0.0
    """Of forward and backward passes over micro-batches, measured on the device before training; 0 sets no limit."""

    def plain(self) -> dict[str, float]:
        """The limits that are set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value and math.isfinite(value)}


@dataclass(frozen=True, kw_only=True)
class PrunerSpec:
    """Which trials are ended early; rungs stand at grace_tokens x factor^k training tokens."""

    kind: str = "none"
    grace_tokens: int = 0
    """No trial is pruned before it has seen these tokens; 0 with the kind 'none'."""
    factor: int = 2
    """One trial in so many survives a rung (asha, hyperband)."""
    interval_tokens: int = 0
    """Training tokens between two comparisons of a population (pbt); 0 with any other kind."""
    quantile: float = 0.25
    """Share of a population that copies, and share that is copied (pbt)."""
    factors: tuple[float, ...] = (0.8, 1.25)
    """One of them, drawn, multiplies each setting that was copied (pbt)."""

    @property
    def first_key(self) -> str:
        """The key that says after how many tokens something is decided first."""
        return "interval_tokens" if self.kind == "pbt" else "grace_tokens"

    @property
    def first_tokens(self) -> int:
        """The value of that key; 0 where the file gives none."""
        return self.interval_tokens if self.kind == "pbt" else self.grace_tokens

    def beginning(self, tokens: int) -> "PrunerSpec":
        """The same with that value."""
        if self.kind == "pbt":
            return dataclasses.replace(self, interval_tokens=tokens)
        return dataclasses.replace(self, grace_tokens=tokens)

    def plain(self) -> dict[str, Any]:
        """As plain data; what belongs to populations only where there are any: other searches keep their identity."""
        plain = {**dataclasses.asdict(self), "factors": list(self.factors)}
        alone = ("grace_tokens", "factor") if self.kind == "pbt" else ("interval_tokens", "quantile", "factors")
        return {key: value for key, value in plain.items() if key not in alone}


def pruner_from_plain(plain: Mapping[str, Any]) -> PrunerSpec:
    """The inverse of PrunerSpec.plain."""
    return PrunerSpec(**{**plain, "factors": tuple(plain.get("factors", PrunerSpec().factors))})


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """How points are proposed."""

    sampler: str = "tpe"
    pruner: PrunerSpec = PrunerSpec()
    trials: int = 50
    seed: int = 0
    population: int = 8
    """Points per generation of nsga2; trials that live at a time for evolution; trials that copy each other (pbt)."""
    warm_start: tuple[str, ...] = ()
    """Names of earlier searches whose trials inform the sampler, never counted or shown as this search's own."""
    diagnostics: bool = False
    """Whether each trial's model is looked at on the way: attention, ranks, growth, gradients; warnings in words."""

    def plain(self) -> dict[str, Any]:
        """As plain data; what was added later only where it is asked for: other searches keep their identity."""
        plain = {**dataclasses.asdict(self), "pruner": self.pruner.plain(), "warm_start": list(self.warm_start)}
        return {key: value for key, value in plain.items() if value or key not in ("diagnostics", "warm_start")}


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Where and how trials run."""

    kind: str = "local"
    """'local': worker processes of this machine; 'ray': Ray Tune places trials, here or on a cluster."""
    jobs: int = 1
    """Trials at a time, at most."""
    cpus: float = 1.0
    gpus: float = 0.0
    """What one trial asks Ray for; shares such as 0.25 let trials share a device."""
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    deterministic: bool = True
    retries: int = 0
    """How often a trial that failed, by a crash or an error, is run again before it counts as failed."""
    checkpoint_tokens: int = 0
    """Training tokens between two checkpoints of a trial; 0: at readings, when the last is half a minute old."""
    disk_bytes: int = 20 * 2**30
    """What checkpoints and weights of the whole search may take; the best stay."""

    def decides(self) -> dict[str, object]:
        """What a trial's numbers depend on."""
        names = ("device", "dtype", "threads", "deterministic")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A paired final: the best trial for which `change` changes something, against itself with the change."""

    name: str
    change: Mapping[str, Scalar]
    """{full path: scalar}, a kind as '<family path>.kind'; empty: the same candidate under other seeds."""


MOST_FINALISTS = 5
SWEEPS = (0, 3, 5, 7)
"""Rates a learning-rate sweep may try, the own one in their middle."""


@dataclass(frozen=True, kw_only=True)
class ContestSpec:
    """How the best candidates of a search meet its baseline; all but max_seeds is fixed before their first seed."""

    top: int = 0
    """Candidates that meet the baseline; 0 for no contest."""
    delta: float = 0.0
    """Gap in nats per token below which two are equal; 0: nothing is ever called equal."""
    max_seeds: int = 10
    """Replicas of each, at most."""
    sweep: int = 5
    """Learning rates tried for each, a factor of 2 apart, before the first replica; 0: each keeps its own."""
    alpha: float = 0.05
    """Chance that any verdict of the contest is ever wrong."""
    at_length: int = 0
    """One of the task's eval_lengths, at which the losses are compared; 0: the training length."""

    @property
    def entrants(self) -> int:
        """Candidates that are tried once more for a place, where sweeps have trainings to tell them apart by."""
        return 2 * self.top if self.sweep else self.top


@dataclass(frozen=True, kw_only=True)
class FinalSpec:
    """What is trained again after the search, with paired seeds."""

    seeds: int = 3
    contrasts: tuple[Contrast, ...] = ()
    contest: ContestSpec = ContestSpec()

    def plain(self) -> dict[str, Any]:
        """As plain data; a contest only where one is asked for."""
        contrasts = {contrast.name: dict(contrast.change) for contrast in self.contrasts}
        contest = {"contest": dataclasses.asdict(self.contest)} if self.contest.top else {}
        return {"seeds": self.seeds, "contrasts": contrasts, **contest}
