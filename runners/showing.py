"""How a stored trial is shown in the tracking store: a pure function of what the study holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runners.attempts import attempts_tag
from runners.candidate import Resolved
from runners.ledger import Entry
from runners.mutations import mutations_json, mutations_tag
from runners.telling import as_resolved
from search_space.records import Stage, Tag, TrialSpec


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One trial as the tracking store is to show it."""

    number: int
    stage: Stage
    generation: int
    spec: TrialSpec
    resolved: Resolved
    name: str
    tags: Mapping[str, str]
    weights: Path | None
    started: float
    """Seconds since the epoch at which the trial was first stored; its points in time count from here."""
    anew: bool = False
    """True when the trial is trained from its start now, whatever an earlier attempt has shown."""
    taken_over: bool = False
    """True when another driver may have begun its run."""

    mutations: str = ""
    """As JSON, when it went on from another trial's state; empty where it never did."""

    @property
    def key(self) -> str:
        """Unique within a search."""
        return f"{self.generation}/{self.stage}/{self.number}"


def search_trial(entry: Entry, weights: Path, *, taken_over: bool = False) -> Shown:
    """A trial of the search stage; `weights` is the folder in which trained parameters wait to be stored."""
    resolved = as_resolved(entry)
    return Shown(
        number=entry.number,
        stage=Stage.SEARCH,
        generation=entry.generation,
        spec=entry.spec,
        resolved=resolved,
        name=f"{entry.number:03d} {short_name(resolved)}",
        tags={
            **({Tag.BASELINE: "true"} if entry.marks.get("baseline") else {}),
            **attempts_tag(entry),
            **mutations_tag(entry),
        },
        mutations=mutations_json(entry),
        weights=weights / f"{entry.generation}-{entry.number}.safetensors",
        started=entry.started,
        taken_over=taken_over,
    )


def final_trial(entry: Entry, twin: Entry | None = None) -> Shown:
    """A trial of the final stage; `twin` is the final with the same spec whose numbers it shares."""
    contrast, side, replica = part_of(entry)
    resolved = as_resolved(entry)
    return Shown(
        number=entry.number,
        stage=Stage.FINAL,
        generation=entry.generation,
        spec=entry.spec,
        resolved=resolved,
        name=f"final {contrast}/{side} #{replica} {short_name(resolved)}",
        tags={
            Tag.CANDIDATE: f"{contrast}/{side}",
            Tag.REPLICA: str(replica),
            **({Tag.SAME_AS: str(twin.number)} if twin else {}),
            **({Tag.UNTUNED: str(entry.marks["untuned"])} if "untuned" in entry.marks else {}),
            **attempts_tag(entry),
        },
        weights=None,
        started=entry.started,
    )


def sweep_trial(entry: Entry) -> Shown:
    """A learning rate tried for a contestant of the finals."""
    contrast, side, place = part_of(entry)
    resolved = as_resolved(entry)
    return Shown(
        number=entry.number,
        stage=Stage.SWEEP,
        generation=entry.generation,
        spec=entry.spec,
        resolved=resolved,
        name=f"sweep {contrast}/{side} rate x {2.0**place:g} {short_name(resolved)}",
        tags={Tag.CANDIDATE: f"{contrast}/{side}", Tag.REPLICA: str(place), **attempts_tag(entry)},
        weights=None,
        started=entry.started,
    )


def part_of(entry: Entry) -> tuple[str, str, int]:
    """Contrast, side and replica of a final."""
    return str(entry.marks["contrast"]), str(entry.marks["side"]), int(entry.marks["replica"])


def short_name(resolved: Resolved) -> str:
    """A candidate in a few words: 'linear+rotary swiglu 2L'."""
    model = resolved.candidate.model
    return f"{model.mixer.kind}+{model.position.kind} {model.ffn.kind} {model.layers}L"
