"""An experiment: what is searched, on which task, with which budget; read from a file, kept as plain data."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_space.candidate_file import write_candidate
from search_space.domains import Scalar
from search_space.errors import ExperimentError, Problem, UserError
from search_space.points import changed
from search_space.reading import read_experiment
from search_space.records import Budget
from search_space.settings import (
    ContestSpec,
    Contrast,
    EngineSpec,
    FinalSpec,
    FreeSize,
    Limits,
    PrunerSpec,
    SearchSpec,
    Size,
    SizeTarget,
    pruner_from_plain,
)
from search_space.space import Space, join, unknown
from search_space.stored import described, space_from_plain, space_to_plain, words

__all__ = [
    "ContestSpec",
    "Contrast",
    "EngineSpec",
    "Experiment",
    "ExperimentError",
    "FinalSpec",
    "FreeSize",
    "Limits",
    "Problem",
    "PrunerSpec",
    "SearchSpec",
    "SizeTarget",
    "as_file",
    "changed",
    "difference",
    "from_plain",
    "preset_path",
    "presets",
    "read",
]

FullSpace = Callable[[tuple[str, ...]], Space]
PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All that a search needs to know; two equal identities give the same search."""

    name: str
    description: str
    space: Space
    """What is drawn from: the full space, narrowed by the file."""
    full: Space
    """The derived space without d_model where the size is solved; baseline and contrasts are points of it."""
    size: Size
    limits: Limits
    task: Mapping[str, Any]
    """{'kind': name, name: {field: value}}; every field is filled in, tuples are lists."""
    budget: Budget
    objectives: tuple[str, ...]
    search: SearchSpec
    engine: EngineSpec
    baseline: Mapping[str, Scalar]
    """A flat point of the full space, or empty."""
    final: FinalSpec
    blocks: tuple[str, ...]
    max_hours: float
    max_tokens: float
    text: str
    """The file as it was read, before overrides."""
    overrides: tuple[str, ...]

    @property
    def task_kind(self) -> str:
        """The registered name of the task."""
        return str(self.task["kind"])

    def changed(self, point: Mapping[str, Scalar], contrast: Contrast) -> dict[str, Scalar]:
        """The point with the contrast's change applied; equal to the point where the change changes nothing."""
        return changed(self.full, self.space, point, contrast.change)

    def identity(self) -> dict[str, Any]:
        """What may not change under one name: all but how long, how wide and how it is described."""
        plain = self.plain()
        for key in ("name", "description", "text", "overrides", "max_hours", "max_tokens", "full"):
            del plain[key]
        del plain["search"]["trials"], plain["final"]["seeds"]
        plain["final"].pop("contest", None)
        plain["engine"] = self.engine.decides()
        plain["space"] = described(self.space)
        return plain

    def plain(self) -> dict[str, Any]:
        """The whole experiment as JSON data; limits that are not set are left out."""
        return {
            "name": self.name,
            "description": self.description,
            "space": space_to_plain(self.space),
            "full": space_to_plain(self.full),
            "size": {self.size.measure: self.size.value} if isinstance(self.size, SizeTarget) else {},
            "limits": self.limits.plain(),
            "task": json.loads(json.dumps(self.task)),
            "budget": dataclasses.asdict(self.budget),
            "objectives": list(self.objectives),
            "search": self.search.plain(),
            "engine": dataclasses.asdict(self.engine),
            "baseline": dict(self.baseline),
            "final": self.final.plain(),
            "blocks": list(self.blocks),
            "max_hours": _finite({"value": self.max_hours}),
            "max_tokens": _finite({"value": self.max_tokens}),
            "text": self.text,
            "overrides": list(self.overrides),
        }


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def from_plain(plain: Mapping[str, Any], full_space: FullSpace, tasks: Mapping[str, type]) -> Experiment:
    """The experiment that `plain()` describes; its spaces are the stored ones, whatever the registry holds today.

    `full_space` and `tasks` are those of `read`; a stored task that is no longer known raises ValueError.
    """
    if plain["task"]["kind"] not in tasks:
        raise UserError(f"{plain['name']}: task {unknown('task', plain['task']['kind'], tasks)}")
    full_space(tuple(plain["blocks"]))
    return Experiment(
        **{
            **plain,
            "space": space_from_plain(plain["space"]),
            "full": space_from_plain(plain["full"]),
            "size": next((SizeTarget(measure=m, value=v) for m, v in plain["size"].items()), FreeSize()),
            "limits": Limits(**plain["limits"]),
            "budget": Budget(**plain["budget"]),
            "objectives": tuple(plain["objectives"]),
            "search": SearchSpec(
                **{
                    **plain["search"],
                    "pruner": pruner_from_plain(plain["search"]["pruner"]),
                    "warm_start": tuple(plain["search"].get("warm_start", ())),
                }
            ),
            "engine": EngineSpec(**plain["engine"]),
            "final": FinalSpec(
                seeds=plain["final"]["seeds"],
                contrasts=tuple(Contrast(name=n, change=c) for n, c in plain["final"]["contrasts"].items()),
                contest=ContestSpec(**plain["final"].get("contest", {})),
            ),
            "blocks": tuple(plain["blocks"]),
            "max_hours": plain["max_hours"].get("value", math.inf),
            "max_tokens": plain["max_tokens"].get("value", math.inf),
            "overrides": tuple(plain["overrides"]),
        }
    )


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each path at which two identities differ: 'path: old -> new'."""
    before, after = _leaves(old), _leaves(new)
    return [
        f"{path}: {before.get(path, 'absent')} -> {after.get(path, 'absent')}"
        for path in dict.fromkeys([*before, *after])
        if before.get(path, "absent") != after.get(path, "absent")
    ]


def _leaves(identity: Mapping[str, Any]) -> dict[str, str]:
    """Each leaf as the words a reader of the file would use, by dotted path."""
    leaves: dict[str, str] = dict(identity.get("space", {}))

    def visit(path: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, child in value.items():
                visit(join(path, key), child)
        else:
            leaves[path] = words(value)

    visit("", {key: value for key, value in identity.items() if key != "space"})
    return leaves


def read(
    source: Path | str,
    *,
    full_space: FullSpace,
    tasks: Mapping[str, type],
    overrides: Sequence[str] = (),
    name: str = "",
) -> Experiment:
    """The experiment of a file (Path) or of a text (str), with overrides 'path=value' on top.

    Raises ExperimentError that lists every independent fault with its file, line, path, rule, value and remedy.
    """
    return Experiment(**read_experiment(source, full_space=full_space, tasks=tasks, overrides=overrides, name=name))


def as_file(point: Mapping[str, Scalar], experiment: Experiment, *, name: str = "") -> str:
    """An experiment file that holds exactly this point of the experiment's full space."""
    return write_candidate(point, experiment.plain(), name=name)


def presets() -> tuple[str, ...]:
    """Names of the experiments that come with Assay; those that reproduce a finding begin with 'findings/'."""
    files = [*sorted(PRESETS.glob("*.yaml")), *sorted(PRESETS.glob("findings/*.yaml"))]
    return tuple(file.relative_to(PRESETS).with_suffix("").as_posix() for file in files)


def preset_path(name: str) -> Path:
    """The file of a preset; ValueError with near matches when there is none."""
    if name not in presets():
        raise UserError(f"{name!r} {unknown('preset', name, presets())}; or give the path of an experiment file")
    return PRESETS / f"{name}.yaml"
