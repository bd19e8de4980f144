"""A small space with every kind of node, tasks, and a short file, for tests of the language itself."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from search_space.domains import choice, family, float_range, int_range, nested
from search_space.experiment import Experiment, ExperimentError, read
from search_space.space import Space, derive


class AbstractMixer: ...


class AbstractPattern: ...


class AbstractPosition: ...


class AbstractOptimizer: ...


@dataclass(frozen=True, kw_only=True)
class Softmax(AbstractMixer):
    """Softmax attention."""

    heads: int = choice(1, 2, 4, default=2, help="heads")
    dropout: float = float_range(0.0, 0.5, default=0.0, opt_in=True, help="dropout")


@dataclass(frozen=True, kw_only=True)
class Linear(AbstractMixer):
    """Linear attention."""

    feature_map: str = choice("elu", "relu", default="elu", help="feature map")


@dataclass(frozen=True, kw_only=True)
class Uniform(AbstractPattern):
    """One mixer everywhere."""


@dataclass(frozen=True, kw_only=True)
class EveryNth(AbstractPattern):
    """Another mixer in every n-th layer."""

    every: int = int_range(2, 8, default=4, help="period")
    mixer: AbstractMixer = family(AbstractMixer, default="softmax", help="other mixer")


@dataclass(frozen=True, kw_only=True)
class NoPosition(AbstractPosition):
    """No positions."""


@dataclass(frozen=True, kw_only=True)
class Rotary(AbstractPosition):
    """Rotary positions."""

    base: float = choice(1000.0, 10000.0, default=10000.0, help="base")


@dataclass(frozen=True, kw_only=True)
class AdamW(AbstractOptimizer):
    """AdamW."""

    learning_rate: float = float_range(1e-5, 1e-1, default=3e-3, log=True, help="rate")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model."""

    vocab_size: int
    d_model: int = int_range(16, 4096, step=16, default=128, help="width")
    layers: int = int_range(1, 64, default=4, help="layers")
    tied: bool = choice(True, False, default=True, help="tied")
    mixer: AbstractMixer = family(AbstractMixer, default="softmax", help="mixer")
    pattern: AbstractPattern = family(AbstractPattern, default="uniform", help="pattern", opt_in=True)
    position: AbstractPosition = family(AbstractPosition, default="rotary", help="position")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate."""

    model: Model = nested(Model, help="model")
    optimizer: AbstractOptimizer = family(AbstractOptimizer, default="adamw", help="optimizer")


FAMILIES: Mapping[type, dict[str, type]] = {
    AbstractMixer: {"linear": Linear, "softmax": Softmax},
    AbstractPattern: {"every_nth": EveryNth, "uniform": Uniform},
    AbstractPosition: {"none": NoPosition, "rotary": Rotary},
    AbstractOptimizer: {"adamw": AdamW},
}


def toy_space(blocks: tuple[str, ...] = ()) -> Space:
    """The full space; modules are imported as the real one does."""
    for module in blocks:
        __import__(module)
    return derive(Candidate, lambda abstract: FAMILIES[abstract])


@dataclass(frozen=True, kw_only=True)
class Copying:
    """A task with a field of every type."""

    seq_len: int = 64
    eval_lengths: tuple[int, ...] = ()
    noise: float = 0.0
    shuffled: bool = True
    name: str = "copy"
    order: Literal["forward", "backward"] = "forward"

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ValueError(f"task.copying.seq_len: takes 2 or more; got {self.seq_len}")
        if self.noise > 1:
            raise ValueError(f"noise must be at most 1; got {self.noise}")


@dataclass(frozen=True, kw_only=True)
class Files:
    """A task with a field that must be given."""

    paths: tuple[str, ...] = dataclasses.field()
    seq_len: int = 64


TASKS: Mapping[str, type] = {"copying": Copying, "files": Files}

SMALL = "name: small\ntask: copying\nbudget: {tokens: 8192}\n"


def load(text: str, *overrides: str, **more: Any) -> Experiment:
    """The experiment of a text in the toy space."""
    return read(text, full_space=toy_space, tasks=TASKS, overrides=overrides, **more)


def faults(text: str, *overrides: str) -> list[str]:
    """The lines of the error that a text ends in."""
    with pytest.raises(ExperimentError) as caught:
        load(text, *overrides)
    return str(caught.value).split("\n")
