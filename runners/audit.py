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
from search_space.records import TrialResult


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What the audit found of one trial."""

    number: int
    holds: bool | None
    """True when the trial is the one that follows from its record, False when it is not, None: it was not audited."""
    why: str = ""
    """What differs, or why a drawn trial could not be audited; empty when there is nothing to say."""
    drawn: bool = True
    """False for a baseline and for trials of earlier generations: no sampler drew them, so nothing is to be proved."""


def audit(study: Study) -> Iterator[Audited]:
    """Every trial of a bound study in turn; nothing is written."""
    proposer = study.fresh_proposer()
    entries = study.trials()
    try:
        for entry in entries:
            if entry.marks["drawn"] and entry.generation == study.generation:
                holds, why = _audited(study, proposer, entries, entry)
                yield Audited(number=entry.number, holds=holds, why=why)
            else:
                yield Audited(number=entry.number, holds=None, drawn=False)
            proposer.know(entry)
    finally:
        proposer.guard.close()


def _audited(study: Study, proposer: Proposer, entries: Sequence[Entry], entry: Entry) -> tuple[bool | None, str]:
    history = entry.marks["history"]
    finished, running = from_ranges(history["finished"]), from_ranges(history["running"])
    later = [number for number in (*finished, *running) if number >= entry.number]
    if later:
        return False, f"claims to have seen trial {later[0]}, which came later"
    unknown = [
        number for number in finished if any(each.asked and not each.proposed for each in attempts_of(entries[number]))
    ]
    if unknown:
        return None, f"not audited: trial {unknown[0]} was run again, and which of its ends was seen is not on record"
    told = [_told(study, _as_seen(entries[number], entry.number)) for number in finished]
    told += [_told(study, dataclasses.replace(entries[number], result=None)) for number in running]
    seen = sorted((each for each in told if each is not None), key=lambda each: each.number)
    found, marks = proposer.find(entry.number, seen)
    if found is None:
        return False, f"no point is found again: {proposer.ended}"
    point = dict(found[0].flat)
    if canonical_json(point) != canonical_json(dict(entry.point)):
        paths = sorted(path for path in point.keys() | entry.point.keys() if point.get(path) != entry.point.get(path))
        shown = "; ".join(f"{path}: stored {entry.point.get(path)!r}, now {point.get(path)!r}" for path in paths[:3])
        return False, f"another point follows from its record: {shown}"
    if marks["redraws"] != entry.marks["redraws"]:
        return False, f"another count of redraws: stored {entry.marks['redraws']}, now {marks['redraws']}"
    return True, ""


def _as_seen(entry: Entry, number: int) -> Entry:
    """An ended trial as the proposal of trial `number` saw it: with the end it had before it was run again."""
    earlier = [each for each in attempts_of(entry) if each.asked and number < each.proposed]
    if not earlier:
        return entry
    # Only ends that tell a sampler nothing but that the trial broke are ever run again.
    first = earlier[0]
    return dataclasses.replace(
        entry, result=TrialResult(status=first.status, reason=first.reason, tokens=first.reached)
    )


def _told(study: Study, entry: Entry) -> Told | None:
    return told_of(entry, study.experiment, study.generation)
