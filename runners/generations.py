"""Generations of a study: Optuna refuses a changed choice set under one name, so a changed space begins a new one."""

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optuna.storages import RDBStorage

from runners.ledger import Ledger
from runners.telling import directions, live_domains, objective_values
from search_space.canon import canonical_json
from search_space.errors import UserError
from search_space.experiment import difference
from search_space.space import searched

if TYPE_CHECKING:
    from search_space.experiment import Experiment

IDENTITY, _WHOLE = "assay.identity", "assay.whole"
_DECIDES_RESULTS = ("task", "budget", "size", "objectives", "engine")
"""Parts of an experiment without which losses do not compare; so is the seed, which orders the data."""


class StudyMismatch(UserError):
    """The experiment is not the one this name was begun with."""


def generation_of(storage: RDBStorage, experiment: "Experiment", *, extend: bool) -> int:
    """The generation to go on with, made ready in the storage.

    StudyMismatch when the name was begun with another experiment, unless `extend` allows a new generation.
    """
    identity = json.loads(canonical_json(experiment.identity()))
    generation = _latest(storage, experiment.name)
    ledger = Ledger(storage, study_name(experiment.name, generation), directions(experiment.objectives))
    stored = ledger.noted(IDENTITY, identity)
    lines = difference(stored, identity)
    if not lines:
        ledger.note(IDENTITY, identity)
        return generation
    if not extend:
        raise StudyMismatch(
            _listed(f"search {experiment.name!r} was begun with another experiment; this one differs in:", lines)
            + "\nGive this one another name (--name NEW), or go on under the same name with --extend, "
            "so that old trials inform the sampler"
        )
    _check_comparable(experiment.name, stored, identity, lines)
    _begin(storage, experiment, generation + 1, ledger, identity)
    return generation + 1


def study_name(name: str, generation: int) -> str:
    """The name under which Optuna keeps a generation."""
    return f"{name}/{generation}"


def latest_generation(storage: RDBStorage, name: str) -> int:
    """The newest generation whose trials were all copied; 0 when there is none."""
    return int(latest_whole(storage, name).rpartition("/")[2] or 0)


def _latest(storage: RDBStorage, name: str) -> int:
    """The newest generation whose trials were all copied; what a kill left half made is deleted."""
    generation = latest_generation(storage, name)
    found = {study.study_name: study for study in storage.get_all_studies()}
    if (half := found.get(study_name(name, generation + 1))) is not None:
        storage.delete_study(half._study_id)
    return generation


def latest_whole(storage: RDBStorage, name: str) -> str:
    """Under which name the newest whole generation of a search is stored; empty when there is none."""
    found = {study.study_name: study for study in storage.get_all_studies()}
    whole = [study_name(name, 0)] if study_name(name, 0) in found else []
    while whole and (following := found.get(study_name(name, len(whole)))) and following.user_attrs.get(_WHOLE):
        whole.append(following.study_name)
    return whole[-1] if whole else ""


def _check_comparable(name: str, old: Mapping[str, Any], new: Mapping[str, Any], lines: list[str]) -> None:
    parts = [part for part in _DECIDES_RESULTS if old[part] != new[part]]
    if old["search"]["seed"] != new["search"]["seed"]:
        parts.append("search.seed")
    if parts:
        concerned = [line for line in lines if line.startswith(tuple(parts))]
        raise StudyMismatch(
            _listed(
                f"search {name!r} cannot be extended: old and new results would not compare, because of:", concerned
            )
            + "\nGive this experiment another name (--name NEW)"
        )


def _begin(storage: RDBStorage, experiment: "Experiment", generation: int, old: Ledger, identity: Any) -> None:
    """Copy every trial under its number into the new generation, with the new space's distributions."""
    ledger = Ledger(storage, study_name(experiment.name, generation), directions(experiment.objectives))
    found = searched(experiment.space)
    for entry in old.entries():
        values = objective_values(experiment.objectives, entry)
        copy = dataclasses.replace(entry, marks={**entry.marks, "values": values})
        ledger.add(copy, live_domains(experiment.space, found, entry.point))
    for key, value in old.notes().items():
        ledger.note(key, value)
    ledger.note(IDENTITY, identity)
    ledger.note(_WHOLE, True)


def _listed(head: str, lines: list[str], most: int = 20) -> str:
    more = [f"  ... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([head, *(f"  {line}" for line in lines[:most]), *more])
