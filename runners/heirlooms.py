"""States of a population's trials that others may go on from: kept while one may, handed over when one does."""

import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from runners.checkpoints import CheckpointRefused, Found, discard, find, put
from runners.ledger import Entry
from runners.mutations import along, mutations_of, present_spec
from runners.population import Population
from search_space.errors import UserError

if TYPE_CHECKING:
    from runners.study import Study

_PLACE = "assay.states"
"""Under which a study notes what the mark in the folder says in which its states lie."""
_MARK = "states.mark"


def settle_place(study: "Study", folder: Path) -> None:
    """Have all drivers of a population find the states in one folder; UserError for one that does not see it."""
    if study.population is None:
        return
    mark = folder / _MARK
    with study.crew.turn():
        noted = study.noted(_PLACE, "")
        if noted and mark.exists() and mark.read_text() == noted:
            return
        if noted and (study.joined or study.crew.others()):
            raise UserError(
                f"search {study.experiment.name!r}: its pruner is pbt: trials go on from each other's states, and "
                f"those lie in the search's folder on the machine of the driver that runs it; {folder} is another one: "
                f"join on that machine or where that folder is shared, have Ray place trials on several machines "
                f"(--engine ray), or search with another pruner"
            )
        # The first driver, or one that goes on elsewhere: states that it lacks are trained to again.
        mark.write_text(uuid.uuid4().hex)
        study.note(_PLACE, mark.read_text())


class Heirlooms:
    """The folder of one search in which they lie."""

    def __init__(self, folder: Path, population: Population, most_trials: int) -> None:
        """The search proposes `most_trials` at most."""
        self._folder = folder
        self._population = population
        self._most_trials = most_trials

    @property
    def interval_tokens(self) -> int:
        """Training tokens between two of a trial."""
        return self._population.interval_tokens

    @property
    def most(self) -> int:
        """How many are there at once, at most, beside those that running trials have just written."""
        return self._population.most_shared

    def folder_of(self, generation: int, number: int) -> Path:
        """Where those of a trial lie, each in a folder named by its tokens."""
        return self._folder / f"shared-{generation}-{number}"

    def hand_over(self, entry: Entry, folder: Path, micro_batch_tokens: int) -> str:
        """Put the state that a trial is to go on from into its folder, unless it has got there or further.

        Where that state is not to be had, the folder stays empty: the trial then trains the whole way to it, and what
        is returned says why; it is empty otherwise.
        """
        if not entry.mutations:
            return ""
        last, spec = mutations_of(entry)[-1], present_spec(entry)
        with suppress(CheckpointRefused):
            if find(folder, spec.id, micro_batch_tokens) is not None:
                return ""
        discard(folder)
        source = self.folder_of(entry.generation, last.donor) / str(last.tokens)
        why = "it is not there"
        try:
            found = find(source, along(entry.spec, last.course[:-1]).id, micro_batch_tokens)
            if found is not None:
                _copy(found, folder, spec.id)
                return ""
        except (CheckpointRefused, OSError) as error:
            why = str(error)
        return (
            f"the state of trial {last.donor} at {last.tokens:,} tokens could not be taken over ({why}); trained to it"
        )

    def tidy(self, entries: Sequence[Entry]) -> None:
        """Delete those that no trial can go on from any more."""
        for place in self._folder.glob("shared-*"):
            generation, number = map(int, place.name.split("-")[1:])
            if number >= len(entries):
                continue  # Of a trial that another driver has just begun.
            kept = entries[number].generation == generation
            with suppress(FileNotFoundError):  # Another driver tidies too.
                for state in list(place.iterdir()):
                    if not (kept and self._is_needed(entries, number, int(state.name))):
                        discard(state)
                if not any(place.iterdir()):
                    with suppress(OSError):  # Its trial writes there just now.
                        place.rmdir()

    def _is_needed(self, entries: Sequence[Entry], number: int, tokens: int) -> bool:
        if not self._population.has_read(number, tokens):
            return entries[number].result is None
        if any(_waits_for(entry, number, tokens) for entry in entries):
            return True
        if not self._population.may_give(number, tokens):
            return False
        mates = [mate for mate in self._population.mates(number) if mate < self._most_trials]
        return any(mate >= len(entries) or _may_come(entries[mate], tokens) for mate in mates)


def _waits_for(entry: Entry, donor: int, tokens: int) -> bool:
    """True when a trial is to go on from that state and has not come to a further reading."""
    last = entry.mutations[-1] if entry.result is None and entry.mutations else None
    return last is not None and (last["donor"], last["tokens"]) == (donor, tokens) and _may_come(entry, tokens)


def _may_come(entry: Entry, tokens: int) -> bool:
    """True when a trial may yet go on from a state after so many tokens, or may have to begin there once more."""
    return entry.result is None and max(entry.readings, default=0) <= tokens


def _copy(found: Found, folder: Path, spec_id: str) -> None:
    header = {**found.header, "spec": spec_id}
    put(folder, found.tensors.stem, lambda partial: shutil.copyfile(found.tensors, partial), header)
