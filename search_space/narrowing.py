"""Narrowing: the part of a derived space that an experiment file asks for."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from search_space import domains
from search_space.domains import Choice, Domain, FloatRange, IntRange, Scalar
from search_space.errors import UserError
from search_space.tree import OneOf, Space, join, unknown

MOST_OPTIONS = 1000
"""The longest list of values a file may give to one field."""


class NarrowingError(UserError):
    """A file asks for something the derived space does not hold; `path` says where, `item` which entry of a list."""

    def __init__(self, path: str, message: str, item: int | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message
        self.item = item


def narrow(node: Space, spec: Mapping[str, Any], path: str = "") -> Space:
    """The part of the space that a file asks for.

    A scalar fixes a field, a list chooses, {low, high, log, step} is a range, names under a family pick variants.
    What the file does not name keeps its declared domain, except opt-in fields, which stay at their default.
    Raises NarrowingError with the path, the rule, the value and the remedy.
    """
    if not isinstance(spec, Mapping):
        raise NarrowingError(path, f"takes a mapping with fields {', '.join(node.fields)}; got {spec!r}")
    for key in spec:
        if key not in node.fields:
            raise NarrowingError(join(path, str(key)), unknown("field", str(key), node.fields))
    fields: dict[str, Domain | OneOf | Space] = {}
    for name, child in node.fields.items():
        here = join(path, name)
        if isinstance(child, Space):
            fields[name] = narrow(child, spec.get(name, {}), here)
        elif name not in spec:
            fields[name] = _untouched(child)
        elif isinstance(child, OneOf):
            fields[name] = _narrow_family(child, spec[name], here)
        else:
            fields[name] = _narrow_domain(child, spec[name], here)
    return Space(fields=fields, help=node.help)


def _untouched(node: Domain | OneOf) -> Domain | OneOf:
    if isinstance(node, OneOf):
        kinds = [node.default] if node.opt_in else list(node.variants)
        return dataclasses.replace(node, variants={kind: narrow(node.variants[kind], {}) for kind in kinds})
    return domains.fixed(node.default) if node.opt_in else node


def _narrow_family(node: OneOf, spec: Any, path: str) -> OneOf:
    if isinstance(spec, str):
        spec = [spec]
    if isinstance(spec, list):
        picked: dict[str, Any] = {}
        for item, entry in enumerate(spec):
            for kind, narrowing in entry.items() if isinstance(entry, Mapping) else ((entry, None),):
                if not isinstance(kind, str):
                    raise NarrowingError(path, f"takes names of variants; got {kind!r}", item)
                if kind in picked:
                    raise NarrowingError(path, f"names the variant {kind!r} twice; keep one", item)
                picked[kind] = narrowing
    elif isinstance(spec, Mapping):
        picked = dict(spec)
    else:
        raise NarrowingError(path, f"takes one or more of {', '.join(node.variants)}; got {spec!r}")
    if not picked:
        raise NarrowingError(path, f"picks no variant; name one or more of {', '.join(node.variants)}")
    variants: dict[str, Space] = {}
    for kind, narrowing in picked.items():
        if kind not in node.variants:
            raise NarrowingError(join(path, str(kind)), unknown("variant", str(kind), node.variants))
        variants[kind] = narrow(node.variants[kind], {} if narrowing is None else narrowing, join(path, kind))
    default = node.default if node.default in variants else next(iter(variants))
    ordered = {kind: variants[kind] for kind in node.variants if kind in variants}
    return dataclasses.replace(node, variants=ordered, default=default)


def _narrow_domain(domain: Domain, spec: Any, path: str) -> Domain:
    if isinstance(spec, Mapping):
        return _narrow_range(domain, spec, path)
    options = spec if isinstance(spec, list) else [spec]
    if not options:
        raise NarrowingError(path, f"is an empty list; give one or more values out of: {domains.describe(domain)}")
    if len(options) > MOST_OPTIONS:
        raise NarrowingError(path, f"lists {len(options)} values, at most {MOST_OPTIONS} are searched; write a range")
    kept: list[Scalar] = []
    for item, option in enumerate(options):
        value = _as_member(domain, option)
        if value is None:
            raise NarrowingError(
                path, f"takes {domains.describe(domain)}; got {option!r}{_nearest(domain, option)}", item
            )
        if any(domains.same(value, other) for other in kept):
            raise NarrowingError(path, f"lists {option!r} twice; keep one", item)
        kept.append(value)
    default = domain.default if any(domains.same(domain.default, value) for value in kept) else kept[0]
    return Choice(options=_ordered(domain, kept), default=default, help=domain.help)


def _ordered(domain: Domain, kept: list[Scalar]) -> tuple[Scalar, ...]:
    """The options as the domain declares them, whatever order a file lists them in."""
    if isinstance(domain, Choice):
        return tuple(option for option in domain.options if any(domains.same(option, value) for value in kept))
    return tuple(sorted(kept))


def _nearest(domain: Domain, value: Any) -> str:
    """The remedy for a value outside the domain: what comes nearest to it, in words."""
    if isinstance(domain, Choice):
        near: list[Any] = [option for option in domain.options if str(option).lower() == str(value).lower()]
        if isinstance(value, str):
            near += difflib.get_close_matches(value, [o for o in domain.options if isinstance(o, str)], n=1, cutoff=0.5)
        elif isinstance(value, int | float) and math.isfinite(value):
            numbers = [o for o in domain.options if not isinstance(o, bool | str)]
            near += sorted(numbers, key=lambda option: abs(option - value))
        return f", write {domains.describe(domains.fixed(near[0]))}" if near else ", write one of these"
    if isinstance(value, bool | str) or not isinstance(value, int | float) or not math.isfinite(value):
        return ", write a number"
    bounded = min(max(value, domain.low), domain.high)
    if isinstance(domain, FloatRange):
        return f", write {bounded:g}"
    return f", write {domain.low + round((bounded - domain.low) / domain.step) * domain.step}"


def _as_member(domain: Domain, value: Any) -> Scalar | None:
    if isinstance(value, bool | str):
        return value if domains.contains(domain, value) else None
    if not isinstance(value, int | float):
        return None
    wants_real = isinstance(domain, FloatRange) or (
        isinstance(domain, Choice) and any(isinstance(option, float) for option in domain.options)
    )
    if wants_real:
        value = float(value)
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if domains.contains(domain, value) else None


def _narrow_range(domain: Domain, spec: Mapping[str, Any], path: str) -> Domain:
    allowed = ("low", "high", "log", "step")
    for key in spec:
        if key not in allowed:
            raise NarrowingError(join(path, str(key)), unknown("range key", str(key), allowed))
    if isinstance(domain, Choice):
        raise NarrowingError(path, f"takes {domains.describe(domain)}; list the options instead of a range")
    for key in ("low", "high"):
        if key not in spec:
            raise NarrowingError(path, f"is a range without {key!r}; write {{low: ..., high: ...}}")
    low, high = _as_member(domain, spec["low"]), _as_member(domain, spec["high"])
    for key, bound in (("low", low), ("high", high)):
        if bound is None:
            got = f"{spec[key]!r}{_nearest(domain, spec[key])}"
            raise NarrowingError(join(path, key), f"takes {domains.describe(domain)}; got {got}")
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    if low > high:
        raise NarrowingError(path, f"has low {low} above high {high}; swap them")
    log = spec.get("log", domain.log and "step" not in spec)
    if not isinstance(log, bool):
        raise NarrowingError(join(path, "log"), f"takes true or false; got {log!r}")
    if log and low <= 0:
        raise NarrowingError(path, f"is a log range from {low}; a log range starts above zero")
    return _stepped(domain, low, high, log, spec.get("step"), path)


def _stepped(domain: IntRange | FloatRange, low: float, high: float, log: bool, step: Any, path: str) -> Domain:
    if step is not None and (isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < math.inf):
        raise NarrowingError(join(path, "step"), f"takes a number above zero; got {step!r}")
    if step is not None and log:
        raise NarrowingError(path, "has both log and step; keep one")
    middle = min(max(domain.default, low), high)
    if isinstance(domain, IntRange):
        step = domain.step if step is None else step
        if not isinstance(step, int) or step % domain.step:
            raise NarrowingError(join(path, "step"), f"takes a multiple of {domain.step}; got {step!r}")
        if log and domain.step != 1:
            raise NarrowingError(path, f"moves in steps of {domain.step} and cannot be log; leave log out")
        top = low + (high - low) // step * step
        default = low + (min(middle, top) - low) // step * step
        return IntRange(low=int(low), high=int(top), default=int(default), step=step, log=log, help=domain.help)
    if step is None:
        return FloatRange(low=low, high=high, default=middle, log=log, help=domain.help, live=domain.live)
    if (high - low) / step >= MOST_OPTIONS:
        raise NarrowingError(
            join(path, "step"),
            f"makes more than {MOST_OPTIONS} values of {low} to {high}; got {step!r}, take a larger step",
        )
    count = int((high - low) / step + 1e-9) + 1
    options = tuple(dict.fromkeys(min(max(round(low + i * step, 12), low), high) for i in range(count)))
    return Choice(options=options, default=min(options, key=lambda value: abs(value - middle)), help=domain.help)
