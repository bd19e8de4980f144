"""Proves of a finished search that every proposal followed from what had been told when it was made.

Each stored trial names the trials its sampler saw. The same sampler, shown the same, must find the same point again.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runners.attempts import attempts_of
from runners.history import Told, from_ranges
from runners.ledger import Entry
from runners.proposing import Proposer
from runners.study import Study
from runners.telling import told_of
from search_space.canon import canonical_json


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What the audit found of one trial."""

    number: int
    holds: bool
    """True when the trial is the one that follows from its record, or no sampler drew it."""
    why: str = ""
    """What differs, or why the trial could not be audited; empty when all is well."""
    drawn: bool = True
    """False for a baseline and for trials of earlier generations: nothing is to be proved of them."""


def audit(study: Study) -> Iterator[Audited]:
    """Every trial of a bound study in turn; nothing is written."""
    proposer = study.fresh_proposer()
    entries = study.trials()
    try:
        for entry in entries:
            if entry.marks["drawn"] and entry.generation == study.generation:
                yield _audited(study, proposer, entries, entry)
            else:
                yield Audited(number=entry.number, holds=True, drawn=False)
            proposer.know(entry)
    finally:
        proposer.guard.close()


def _audited(study: Study, proposer: Proposer, entries: Sequence[Entry], entry: Entry) -> Audited:
    history = entry.marks["history"]
    finished, running = from_ranges(history["finished"]), from_ranges(history["running"])
    changed = [number for number in finished if any(each.asked for each in attempts_of(entries[number]))]
    if changed:
        return Audited(
            number=entry.number,
            holds=True,
            why=f"not audited: it saw the first end of trial {changed[0]}, which was run again on request",
        )
    later = [number for number in (*finished, *running) if number >= entry.number]
    if later:
        return Audited(number=entry.number, holds=False, why=f"claims to have seen trial {later[0]}, which came later")
    told = [_told(study, entries[number]) for number in finished]
    told += [_told(study, dataclasses.replace(entries[number], result=None)) for number in running]
    seen = sorted((each for each in told if each is not None), key=lambda each: each.number)
    found, marks = proposer.find(entry.number, seen)
    if found is None:
        return Audited(number=entry.number, holds=False, why=f"no point is found again: {proposer.ended}")
    point = dict(found[0].flat)
    if canonical_json(point) != canonical_json(dict(entry.point)):
        paths = sorted(path for path in point.keys() | entry.point.keys() if point.get(path) != entry.point.get(path))
        shown = "; ".join(f"{path}: stored {entry.point.get(path)!r}, now {point.get(path)!r}" for path in paths[:3])
        return Audited(number=entry.number, holds=False, why=f"another point follows from its record: {shown}")
    if marks["redraws"] != entry.marks["redraws"]:
        return Audited(
            number=entry.number,
            holds=False,
            why=f"another count of redraws: stored {entry.marks['redraws']}, now {marks['redraws']}",
        )
    return Audited(number=entry.number, holds=True)


def _told(study: Study, entry: Entry) -> Told | None:
    return told_of(entry, study.experiment, study.generation)
