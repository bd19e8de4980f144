"""In which order a search wrote its trials: what a reader of a large search need not read again.

A trial is marked with the batch it was last written in, and the parent names the newest batch begun. A whole batch is
stored on the parent as a table of its trials as the store holds them; one large table takes the place of the small ones
when a search ends. No clock is compared, and every driver counts batches of its own.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from search_space.records import Status, Tag

SIZE = 64
"""Ended trials that fill a batch."""
COLUMNS = ("run_id", "name", "state", "start", "end", "artifact_uri", "params", "metrics", "tags")
"""Of a table of trials: times in seconds, the last three as JSON; no artifact_uri where it is the parent's but for the
run id."""
COVERS = b"assay.covers"
"""Under which a table's metadata says which batches it holds whole."""


def batch_name(number: int, who: str) -> str:
    """What a trial is marked with; `who` is empty for the driver that leads."""
    return f"{number}.{who}" if who else str(number)


def newest_tag(who: str) -> str:
    """The parent's tag that holds a driver's newest batch."""
    return f"{Tag.BATCH}.{who}" if who else Tag.BATCH


def newest(tags: Mapping[str, str]) -> dict[str, int]:
    """The newest batch of every driver, by the parent's tags."""
    found = {tag.removeprefix(Tag.BATCH): number for tag, number in tags.items() if tag.startswith(Tag.BATCH)}
    return {who.removeprefix("."): int(number) for who, number in found.items() if number.isdecimal()}


def is_settled(state: str, tags: Mapping[str, str]) -> bool:
    """True for a run that changes no more unless it is marked anew."""
    return state not in ("RUNNING", "SCHEDULED") and tags.get(Tag.STATUS) != Status.PREEMPTED


def own_place(parent_uri: str, parent_id: str, run_id: str) -> str:
    """Where a run's artifacts lie when they lie beside its parent's."""
    return parent_uri.replace(parent_id, run_id)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The batches of which every trial is known."""

    through: Mapping[str, int] = field(default_factory=dict)
    """By driver: all batches up to this one."""
    single: frozenset[str] = frozenset()
    """Further ones by name."""

    def lacking(self, newest_batches: Mapping[str, int]) -> list[str]:
        """The batches begun that are not covered."""
        names = [
            batch_name(number, who)
            for who, last in sorted(newest_batches.items())
            for number in range(self.through.get(who, 0) + 1, last + 1)
        ]
        return [name for name in names if name not in self.single]

    def to_text(self) -> str:
        """As a table's metadata hold it."""
        return json.dumps({"through": dict(self.through), "single": sorted(self.single)})


def coverage(text: str | bytes) -> Coverage:
    """The inverse of to_text."""
    plain = json.loads(text)
    return Coverage(through=plain["through"], single=frozenset(plain["single"]))


def joined(parts: Iterable[Coverage]) -> Coverage:
    """What all of them cover together."""
    through: dict[str, int] = {}
    single: frozenset[str] = frozenset()
    for part in parts:
        single |= part.single
        for who, number in part.through.items():
            through[who] = max(number, through.get(who, 0))
    return Coverage(through=through, single=single)
