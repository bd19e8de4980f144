"""What a single value of an experiment file may be: each parser returns the value or raises ValueError in words."""

import math
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from search_space.space import unknown

Parser = Callable[[Any], Any]


class BadItem(ValueError):
    """A fault in one entry of a list; `item` is its index."""

    def __init__(self, item: int, message: str) -> None:
        super().__init__(message)
        self.item = item


UNITS = {
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "B": 10**9,
    "T": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
MOST = 10**15
MOST_ENTRIES = 1000


def count(low: int = 1, high: int = MOST) -> Parser:
    """A whole number within bounds; 130k, 2.5M, 1B (billion) and 64KiB are understood, and 1e6."""

    def parse(value: Any) -> int:
        number = _whole(value)
        if number is None:
            raise ValueError(f"takes a whole number (such as 200, 130k, 2.5M, 1B or 64KiB); got {value!r}")
        if not low <= number <= high:
            raise ValueError(f"takes a whole number from {low}{_up_to(high)}; got {value!r}")
        return number

    return parse


def _up_to(high: int) -> str:
    return " up" if high == MOST else f" to {high}"


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in UNITS:
        return None
    number = Decimal(match[1]) * UNITS[match[2]]
    return int(number) if number == number.to_integral_value() else None


def real(low: float = 0.0, high: float = math.inf, *, above: bool = False) -> Parser:
    """A finite number within bounds; `above` leaves the lower bound itself out."""

    def parse(value: Any) -> float:
        bound = f"above {low}" if above else f"from {low}"
        rule = f"takes a number {bound}{'' if math.isinf(high) else f' to {high}'}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{rule}; got {value!r}")
        if not low <= value <= high or (above and value == low):
            raise ValueError(f"{rule}; got {value!r}")
        return float(value)

    return parse


def flag(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"takes true or false; got {value!r}")
    return value


def text(value: Any) -> str:
    """Any text."""
    if not isinstance(value, str):
        raise ValueError(f"takes text; got {value!r}, put it in quotes")
    return value


def one_of(what: str, options: Iterable[str]) -> Parser:
    """One of the named options."""
    known = tuple(options)

    def parse(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"takes one of {', '.join(known)}; got {value!r}")
        if value not in known:
            raise ValueError(f"{value!r} {unknown(what, value, known)}")
        return value

    return parse


def name(value: Any) -> str:
    """A name that may become a file name."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(
            f"takes a name of letters, digits, '.', '_' and '-' that begins with a letter or digit, "
            f"at most 64 characters; got {value!r}"
        )
    return value


def module(value: Any) -> str:
    """The dotted name of an importable module."""
    if not isinstance(value, str) or not _MODULE.fullmatch(value):
        raise ValueError(f"takes dotted names of importable modules, such as my_package.my_mixer; got {value!r}")
    return value


def many(parse: Parser, *, at_least: int = 0) -> Parser:
    """A list of what `parse` takes; a single value is a list of one."""

    def parse_all(value: Any) -> tuple[Any, ...]:
        kept: list[Any] = []
        entries = value if isinstance(value, list) else [value]
        if len(entries) > MOST_ENTRIES:
            raise ValueError(f"has {len(entries)} entries; at most {MOST_ENTRIES} are read")
        if len(entries) < at_least:
            raise ValueError(f"takes {at_least} or more entries; got {value!r}, name one or remove the key")
        for item, entry in enumerate(entries):
            try:
                parsed = parse(entry)
            except ValueError as error:
                raise BadItem(item, str(error)) from error
            if parsed in kept:
                raise BadItem(item, f"lists {entry!r} twice; keep one")
            kept.append(parsed)
        return tuple(kept)

    return parse_all
