"""Domains: the set of values one field may take, and the helpers that declare them on config dataclasses."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Scalar = str | int | float | bool

LIVE = ("value", "rest")
"""What a factor multiplies when a setting is changed in mid-training: the value, or its distance to 1."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Unordered options; a Choice of one option is a fixed value."""

    options: tuple[Scalar, ...]
    default: Scalar
    opt_in: bool = False
    help: str = ""

    def __post_init__(self) -> None:
        assert self.options, "a Choice has at least one option"
        assert any(same(self.default, option) for option in self.options), f"{self.default!r} not in {self.options!r}"


@dataclass(frozen=True, kw_only=True)
class IntRange:
    """Integers low, low + step, ... up to and including high."""

    low: int
    high: int
    default: int
    step: int = 1
    log: bool = False
    opt_in: bool = False
    help: str = ""

    def __post_init__(self) -> None:
        assert self.low <= self.default <= self.high, f"{self.default} outside {self.low}..{self.high}"
        assert (self.high - self.low) % self.step == 0, "high is reached by whole steps from low"
        assert not self.log or (self.step == 1 and self.low >= 1), "a log range starts at 1 or above and has step 1"


@dataclass(frozen=True, kw_only=True)
class FloatRange:
    """Reals in the closed interval [low, high], uniform or log-uniform."""

    low: float
    high: float
    default: float
    log: bool = False
    opt_in: bool = False
    help: str = ""
    live: str = ""
    """How the value may be changed while a trial trains, one of LIVE; empty: not at all."""

    def __post_init__(self) -> None:
        assert self.low <= self.default <= self.high, f"{self.default} outside {self.low}..{self.high}"
        assert not self.log or self.low > 0, "a log range is positive"
        assert self.live in ("", *LIVE), f"live={self.live!r} is none of {LIVE}"


Domain = Choice | IntRange | FloatRange


def same(a: Scalar, b: Scalar) -> bool:
    """True when a and b are the same value of the same kind; True is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def contains(domain: Domain, value: Scalar) -> bool:
    """True when the domain holds the value (ints count as reals; booleans never as numbers)."""
    if isinstance(domain, Choice):
        return any(same(value, option) for option in domain.options)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(domain, IntRange):
        return isinstance(value, int) and domain.low <= value <= domain.high and (value - domain.low) % domain.step == 0
    return math.isfinite(value) and domain.low <= value <= domain.high


def is_fixed(domain: Domain) -> bool:
    """True when the domain holds exactly one value, so that there is nothing to ask."""
    return size(domain) == 1


def only_value(domain: Domain) -> Scalar:
    """The value of a fixed domain."""
    assert is_fixed(domain), f"{describe(domain)} holds more than one value"
    return domain.options[0] if isinstance(domain, Choice) else domain.low


def size(domain: Domain) -> float:
    """How many values the domain holds; math.inf for a real interval."""
    if isinstance(domain, Choice):
        return len(domain.options)
    if isinstance(domain, IntRange):
        return (domain.high - domain.low) // domain.step + 1
    return 1 if domain.low == domain.high else math.inf


def values(domain: Domain) -> tuple[Scalar, ...]:
    """Every value of a finite domain, in declared order."""
    if isinstance(domain, Choice):
        return domain.options
    if isinstance(domain, IntRange):
        return tuple(range(domain.low, domain.high + 1, domain.step))
    assert is_fixed(domain), f"{describe(domain)} cannot be enumerated"
    return (domain.low,)


def draw(domain: Domain, rng: random.Random) -> Scalar:
    """One value, uniform (or log-uniform) over the domain."""
    if isinstance(domain, Choice):
        return rng.choice(domain.options)
    if isinstance(domain, IntRange):
        if domain.log:
            low, high = math.log(domain.low - 0.5), math.log(domain.high + 0.5)
            return min(max(round(math.exp(rng.uniform(low, high))), domain.low), domain.high)
        return domain.low + domain.step * rng.randrange(int(size(domain)))
    if domain.log:
        return min(max(math.exp(rng.uniform(math.log(domain.low), math.log(domain.high))), domain.low), domain.high)
    return rng.uniform(domain.low, domain.high)


def fixed(value: Scalar) -> Choice:
    """The domain that holds this value alone."""
    return Choice(options=(value,), default=value)


def describe(domain: Domain) -> str:
    """The domain in the words of an experiment file."""
    if isinstance(domain, Choice):
        options = [str(option).lower() if isinstance(option, bool) else repr(option) for option in domain.options]
        return options[0] if is_fixed(domain) else f"one of {', '.join(options)}"
    log = ", log" if domain.log else ""
    step = f", step {domain.step}" if isinstance(domain, IntRange) and domain.step != 1 else ""
    return f"{domain.low} to {domain.high}{step}{log}"


def plain(domain: Domain) -> dict[str, Any]:
    """The domain as plain data: what counts for a space's id, no default and no help."""
    if isinstance(domain, Choice):
        return {"options": list(domain.options)}
    if isinstance(domain, IntRange):
        return {"int": [domain.low, domain.high], "step": domain.step, "log": domain.log}
    return {"float": [domain.low, domain.high], "log": domain.log}


# Field helpers. `opt_in` fields stay at their default unless an experiment file opens them; `sizing` fields steer the
# size solver and are no part of an architecture's identity; a later-added field at its `neutral` value changes no id.


def choice(*options: Scalar, default: Scalar, help: str, opt_in: bool = False, **marks: Any) -> Any:
    """A dataclass field that takes one of the options."""
    domain = Choice(options=options, default=default, opt_in=opt_in, help=help)
    return field(default=default, metadata={"domain": domain, **_marks(marks)})


def int_range(
    low: int,
    high: int,
    *,
    default: int,
    help: str,
    step: int = 1,
    log: bool = False,
    opt_in: bool = False,
    **marks: Any,
) -> Any:
    """A dataclass field that takes an integer."""
    domain = IntRange(low=low, high=high, default=default, step=step, log=log, opt_in=opt_in, help=help)
    return field(default=default, metadata={"domain": domain, **_marks(marks)})


def float_range(
    low: float,
    high: float,
    *,
    default: float,
    help: str,
    log: bool = False,
    opt_in: bool = False,
    live: str = "",
    **marks: Any,
) -> Any:
    """A dataclass field that takes a real number."""
    domain = FloatRange(low=low, high=high, default=default, log=log, opt_in=opt_in, help=help, live=live)
    return field(default=default, metadata={"domain": domain, **_marks(marks)})


def family(
    abstract: type,
    *,
    default: str,
    help: str,
    opt_in: bool = False,
    factory: Callable[[], Any] | None = None,
    **marks: Any,
) -> Any:
    """A dataclass field that holds one registered variant of a family; `default` is the variant's kind.

    A field added later is neutral at a kind without fields, and its `factory` makes that variant for configs stored
    before.
    """
    metadata = {"family": abstract, "default": default, "opt_in": opt_in, "help": help, **_marks(marks)}
    return field(metadata=metadata) if factory is None else field(default_factory=factory, metadata=metadata)


def nested(config: type, *, help: str) -> Any:
    """A dataclass field that holds another config."""
    return field(metadata={"nested": config, "help": help})


def _marks(marks: dict[str, Any]) -> dict[str, Any]:
    unknown = set(marks) - {"sizing", "neutral"}
    assert not unknown, f"unknown field marks {sorted(unknown)}"
    return marks
