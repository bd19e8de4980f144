"""Warm start: trials of earlier searches in the space of this one, for the eyes of the sampler alone.

What is taken over is noted in the study at its beginning, so that a driver that goes on with it sees the same, whatever
became of the earlier search. These trials have numbers below 0 and are no trials of this search.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.storages import RDBStorage

from blocks.registry import variants
from runners.candidate import Candidate
from runners.generations import IDENTITY, latest_whole
from runners.history import MOST_SEEN, Fate, Told, select
from runners.ledger import SQLITE, Entry, Ledger, open_storage
from runners.telling import as_told, directions
from search_space import domains
from search_space.domains import Domain, Scalar
from search_space.errors import UserError
from search_space.space import Space, walk

if TYPE_CHECKING:
    from search_space.experiment import Experiment

MOST_TAKEN = 100
"""Trials taken over from all earlier searches together: the best and the latest of each."""
FINGERPRINT = "assay.fingerprint"
"""The note that says which data a search trains on."""
_NOTE = "assay.warm"
_BY_VALUE = ("budget", "size")
"""Parts in which two experiments on the same data must agree for their losses to compare."""


class Earlier:
    """What a search was told of earlier ones."""

    def __init__(self, noted: Mapping[str, Sequence[Mapping[str, Any]]], space: Space) -> None:
        neutral = neutral_values(Candidate) if noted else {}
        taken = [kept for trials in noted.values() for kept in trials]
        numbered = zip(range(-len(taken), 0), taken, strict=True)
        mapped_ = ((number, kept, mapped(space, kept["point"], neutral)) for number, kept in numbered)
        found = [
            (_told(number, kept, point), bool(kept["same"])) for number, kept, point in mapped_ if point is not None
        ]
        self._by_value = [told for told, same in found if same]
        self._by_rank = [told for told, same in found if not same]

    def before(self, own: Sequence[Told], *, always: bool = False) -> list[Told]:
        """The earlier trials as a proposal sees them beside its own; none once there are enough of its own."""
        if len(own) >= MOST_SEEN and not always:
            return []
        ranked = ranked_like([told for told in own if told.fate is Fate.OK], self._by_rank)
        return sorted([*self._by_value, *ranked], key=lambda told: told.number)


def take_over(ledger: Ledger, storage: RDBStorage, experiment: "Experiment", fingerprint: str) -> Earlier:
    """The trials of the searches that `search.warm_start` names, noted in the study when they are first asked for."""
    names = experiment.search.warm_start
    noted = dict(ledger.noted(_NOTE, {}))
    for name in names:
        if name not in noted:
            noted[name] = _trials(name, storage, experiment, fingerprint)
            ledger.note(_NOTE, noted)
    return Earlier({name: noted[name] for name in names}, experiment.space)


def ranked_like(own: Sequence[Told], earlier: Sequence[Told]) -> list[Told]:
    """The earlier trials as finished ones, with values of this search at the same ranks; broken ones rank last.

    While this search has no values, the ranks themselves, from 0 to 1, stand for them.
    """
    if not earlier:
        return []
    finished = [told for told in earlier if told.fate is Fate.OK]
    pruned = [told for told in earlier if told.fate is Fate.PRUNED]
    broken = [told for told in earlier if told.fate is Fate.BROKEN]
    behind = [*sorted(pruned, key=lambda told: (-told.last_tokens, told.last_loss)), *broken]
    width = len((finished or own)[0].values) if finished or own else 1
    columns: list[dict[int, float]] = []
    for objective in range(width):
        order = [*sorted(finished, key=lambda told: (told.values[objective], told.number)), *behind]
        shares = (np.arange(len(order)) + 0.5) / len(order)
        scale = np.quantile([told.values[objective] for told in own], shares) if own else shares
        columns.append({told.number: float(value) for told, value in zip(order, scale, strict=True)})
    return [
        dataclasses.replace(told, fate=Fate.OK, values=tuple(column[told.number] for column in columns))
        for told in earlier
    ]


def mapped(space: Space, point: Mapping[str, Scalar], neutral: Mapping[str, Scalar]) -> dict[str, Scalar] | None:
    """The point of an earlier search in this space, path by path; None when it has no place in it.

    A path that it lacks takes its neutral value, at which the model is what it was before the path was known; without
    one, or where a value lies outside this space, the point has no place.
    """
    known = {**neutral, **point}

    def ask(path: str, domain: Domain) -> Scalar:
        if path not in known or not domains.contains(domain, known[path]):
            raise LookupError(path)
        return known[path]

    try:
        whole = walk(space, ask)
    except LookupError:
        return None
    agrees = all(path in known and domains.same(known[path], value) for path, value in whole.items())
    return whole if agrees and point.keys() <= whole.keys() else None


def neutral_values(config: type, prefix: str = "") -> dict[str, Scalar]:
    """The neutral value at every path that declares one, variants that are not taken included."""
    found: dict[str, Scalar] = {}
    for declared in dataclasses.fields(config):
        marks, path = declared.metadata, f"{prefix}{declared.name}"
        if "family" in marks:
            if "neutral" in marks:
                found[f"{path}.kind"] = marks["neutral"]
            for kind, variant in variants(marks["family"]).items():
                found.update(neutral_values(variant, f"{path}.{kind}."))
        elif "nested" in marks:
            found.update(neutral_values(marks["nested"], f"{path}."))
        elif "neutral" in marks:
            found[path] = marks["neutral"]
    return found


def _trials(name: str, storage: RDBStorage, experiment: "Experiment", fingerprint: str) -> list[dict[str, Any]]:
    """The trials of an earlier search worth taking over, by number, as plain data."""
    source = _source(name, storage)
    study = latest_whole(source, name)
    assert study, f"search {name!r} was found before"
    ledger = Ledger(source, study, directions(experiment.objectives))
    identity, mine = ledger.noted(IDENTITY, {}), experiment.identity()
    same = ledger.noted(FINGERPRINT, "") == fingerprint and all(
        _plain(identity.get(part)) == _plain(mine[part]) for part in _BY_VALUE
    )
    told = [(entry, as_told(entry, entry.point, experiment.objectives, 0)) for entry in ledger.entries()]
    most = max(1, MOST_TAKEN // len(experiment.search.warm_start))
    chosen = {each.number for each in select([each for _, each in told if each.fate is not Fate.RUNNING], most=most)}
    if source is not storage:
        source.engine.dispose()
    return [_noted(name, entry, each, same) for entry, each in told if entry.number in chosen]


def _plain(part: Any) -> Any:
    return {key: float(value) for key, value in part.items()} if isinstance(part, Mapping) else part


def _noted(name: str, entry: Entry, told: Told, same: bool) -> dict[str, Any]:
    return {
        "from": f"{name}/{entry.number}",
        "point": dict(entry.point),
        "fate": told.fate.value,
        "values": list(told.values),
        "last_tokens": told.last_tokens,
        "last_loss": told.last_loss,
        "same": same,
    }


def _told(number: int, kept: Mapping[str, Any], point: Mapping[str, Scalar]) -> Told:
    return Told(
        number=number,
        point=point,
        fate=Fate(kept["fate"]),
        drawn=False,
        values=tuple(kept["values"]),
        last_tokens=kept["last_tokens"],
        last_loss=kept["last_loss"],
    )


def _source(name: str, storage: RDBStorage) -> RDBStorage:
    """The storage that holds the study of a search: this one, or a SQLite file beside it."""
    if latest_whole(storage, name):
        return storage
    known = {study.study_name.rpartition("/")[0] for study in storage.get_all_studies()}
    if storage.url.startswith(SQLITE):
        folder = Path(storage.url.removeprefix(SQLITE)).parent
        beside = folder / f"{name}.db"
        known |= {file.stem for file in folder.glob("*.db")}
        if beside.is_file():
            other = open_storage(f"{SQLITE}{beside}")
            if latest_whole(other, name):
                return other
            other.engine.dispose()
    raise UserError(_unknown(name, known))


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return (
        f"search.warm_start: no study of a search {name!r} lies where this one's does; {hint}"
        "name a search that `assay runs` lists, or give --study the storage that holds both"
    )
