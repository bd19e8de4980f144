"""Mutations: the events at which a trial went on from another one's state, and the way to the weights it has now."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from runners.ledger import Entry
from runners.population import Population, with_settings
from search_space.domains import Scalar
from search_space.records import Reading, Tag, TrialSpec, to_plain


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A trial went on from another one's state, with other settings."""

    tokens: int
    """Training tokens after which it did."""
    donor: int
    """Number of the other trial."""
    loss: float
    donor_loss: float
    before: Mapping[str, Scalar]
    """Its settings up to there, by full path."""
    after: Mapping[str, Scalar]
    """Its settings from there on."""
    course: Sequence[Mapping[str, Any]]
    """{'tokens': n, 'optimizer': {...}}: the settings on the whole way to its weights, the first from 0 tokens on."""
    curve: tuple[Reading, ...]
    """What the trial itself had read up to there."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of asdict."""
        return cls(**{**plain, "curve": tuple(Reading(**reading) for reading in plain["curve"])})

    @property
    def line(self) -> str:
        """In words."""
        moved = ", ".join(f"{path} {self.before[path]:.6g} -> {value:.6g}" for path, value in self.after.items())
        return (
            f"at {self.tokens:,} tokens from the state of trial {self.donor} (loss {self.donor_loss:.4f} against "
            f"{self.loss:.4f}): {moved}"
        )


def mutations_of(entry: Entry) -> tuple[Mutation, ...]:
    """Of a stored trial, in order."""
    return tuple(Mutation.from_plain(plain) for plain in entry.mutations)


def course_before(entry: Entry, tokens: int) -> Sequence[Mapping[str, Any]]:
    """The settings on the way to a trial's weights after so many tokens, before it may have changed there."""
    earlier = [each for each in mutations_of(entry) if each.tokens < tokens]
    return earlier[-1].course if earlier else [{"tokens": 0, "optimizer": entry.spec.candidate["optimizer"]}]


def mutated(
    population: Population, entry: Entry, donor: Entry, reading: Reading, curve: Sequence[Reading]
) -> list[Mapping[str, Any]]:
    """All mutations of a trial as plain data, with that one that follows from its reading and its donor."""
    assert donor.arch_id == entry.arch_id, f"trials {donor.number} and {entry.number} have different models"
    tokens = reading.tokens
    own, theirs = course_before(entry, tokens)[-1]["optimizer"], course_before(donor, tokens)
    after = population.changed(population.settings(theirs[-1]["optimizer"]), entry.number, tokens)
    now = Mutation(
        tokens=tokens,
        donor=donor.number,
        loss=reading.loss,
        donor_loss=population.loss(donor.number, tokens),
        before=population.settings(own),
        after=after,
        course=[*theirs, {"tokens": tokens, "optimizer": with_settings(theirs[-1]["optimizer"], after)}],
        curve=tuple(curve),
    )
    return [*entry.mutations, {**asdict(now), "curve": [to_plain(each) for each in curve]}]


def along(spec: TrialSpec, course: Sequence[Mapping[str, Any]]) -> TrialSpec:
    """The spec whose training, from its start, gives the weights that were come to by a course of settings."""
    first, *later = course
    return replace(spec, candidate={**spec.candidate, "optimizer": first["optimizer"]}, changes=tuple(map(dict, later)))


def replayed(spec: TrialSpec, text: str) -> tuple[TrialSpec, int]:
    """What trains, from its start, to the weights of a trial whose mutations_json this is, and the tokens after which
    that gives the trial's own readings too; they are the way's that others went before.
    """
    kept = json.loads(text)
    return along(spec, kept["course"]), int(kept["mutations"][-1]["tokens"])


def present_spec(entry: Entry) -> TrialSpec:
    """What a stored trial trains now: its own spec, or that of the way to the state it went on from."""
    return along(entry.spec, mutations_of(entry)[-1].course) if entry.mutations else entry.spec


def own_curve(entry: Entry) -> tuple[Reading, ...]:
    """What a trial itself had read when it went on from another one's state for the last time."""
    return mutations_of(entry)[-1].curve if entry.mutations else ()


def spliced(curve: Sequence[Reading], own: Sequence[Reading]) -> tuple[Reading, ...]:
    """A curve with the trial's own readings in place of those of the trial it went on from."""
    if not own:
        return tuple(curve)
    # Before training all trials of a population are one model.
    untrained = [reading for reading in curve if reading.tokens == 0]
    return (*untrained, *own, *(reading for reading in curve if reading.tokens > own[-1].tokens))


def mutations_tag(entry: Entry) -> dict[str, str]:
    """The tag that names every mutation of a trial, a line each; none where there were none."""
    lines = [each.line for each in mutations_of(entry)]
    return {Tag.MUTATIONS: "\n".join(lines)} if lines else {}


def mutations_json(entry: Entry) -> str:
    """All mutations of a trial and the course to its weights, as JSON; empty where there were none."""
    found = mutations_of(entry)
    if not found:
        return ""
    events = [
        {name: value for name, value in asdict(each).items() if name not in ("course", "curve")} for each in found
    ]
    return json.dumps({"mutations": events, "course": list(found[-1].course)}, indent=1)
