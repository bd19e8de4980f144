"""The disk quota of a search: what checkpoints and trained models may take together; the best models stay."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from optuna.study import StudyDirection

from runners.checkpoints import size_bytes
from runners.history import as_ranges, from_ranges
from runners.ledger import Entry
from runners.study import Study
from runners.telling import directions, objective_values
from search_space.records import Status

BYTES_PER_PARAMETER = 4.0
"""Models are stored in float32; what one of an earlier driver left takes is reckoned from its parameters."""
WHY_DELETED = "deleted to keep the search within engine.disk_bytes; assay export trains it again"
_DROPPED = "assay.dropped"

Values = Sequence[float]
"""The objectives of a trial, lower is better; the first decides between trials that no other beats in all."""


class Quota:
    """Which trained models of a search are kept. The best one stays whatever it takes."""

    def __init__(self, study: Study, checkpoints: Path) -> None:
        """`checkpoints` is the folder whose files share the quota."""
        self._study = study
        self._checkpoints = checkpoints
        self._dropped = set(from_ranges(study.noted(_DROPPED, "")))
        self._kept: dict[int, tuple[Values, float]] = {}
        self._total = 0.0
        for entry in study.trials():
            self.know(entry)

    def know(self, entry: Entry) -> None:
        """A trial that another driver ended: what its model takes counts too."""
        if _is_good(entry) and entry.number not in self._kept and entry.number not in self._dropped:
            self._add(entry.number, self._values(entry), BYTES_PER_PARAMETER * entry.cost["params"])

    def admit(self, entry: Entry, weights: Path | None) -> list[Entry]:
        """The trials whose models must go so that this one's may come; itself among them where it may not."""
        if weights is None or not weights.exists() or not _is_good(entry):
            return []
        with self._study.crew.turn():
            return self._admit(entry, weights)

    def _admit(self, entry: Entry, weights: Path) -> list[Entry]:
        for number in from_ranges(self._study.noted(_DROPPED, "")):
            self._dropped.add(number)
            self._remove(number)
        self._remove(entry.number)
        self._dropped.discard(entry.number)
        self._add(entry.number, self._values(entry), float(weights.stat().st_size))
        room = self._study.experiment.engine.disk_bytes - size_bytes(self._checkpoints)
        gone: list[int] = []
        while self._total > room and len(self._kept) > 1:
            gone.append(_worst({number: values for number, (values, _) in self._kept.items()}))
            self._remove(gone[-1])
        if gone:
            self._dropped.update(gone)
            self._study.note(_DROPPED, as_ranges(sorted(self._dropped)))
        return [self._study.trials()[number] for number in gone]

    def _values(self, entry: Entry) -> Values:
        objectives = self._study.experiment.objectives
        found = objective_values(objectives, entry)
        if not found:
            return [math.inf] * len(objectives)
        signs = [-1.0 if way is StudyDirection.MAXIMIZE else 1.0 for way in directions(objectives)]
        return [sign * value for sign, value in zip(signs, found, strict=True)]

    def _add(self, number: int, values: Values, size: float) -> None:
        self._kept[number] = values, size
        self._total += size

    def _remove(self, number: int) -> None:
        _, size = self._kept.pop(number, ((), 0.0))
        self._total -= size


def _is_good(entry: Entry) -> bool:
    return entry.result is not None and entry.result.status is Status.OK


def _worst(kept: Mapping[int, Values]) -> int:
    """The one to go first: of those that another beats in everything, the one with the largest first objective."""
    beaten = kept
    if len(next(iter(kept.values()))) > 1:
        beaten = {one: values for one, values in kept.items() if _is_beaten(values, kept.values())} or kept
    return max(beaten, key=lambda number: (beaten[number][:1], number))


def _is_beaten(values: Values, others: Iterable[Values]) -> bool:
    return any(
        all(theirs <= mine for theirs, mine in zip(other, values, strict=True)) and tuple(other) != tuple(values)
        for other in others
    )
