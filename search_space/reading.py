"""Reads an experiment: the text, its overrides, each section, then the rules across sections."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from search_space import rules, settings, values, yamlfile
from search_space.errors import Faults
from search_space.overrides import Source, apply, parse_override
from search_space.section import Section
from search_space.settings import (
    ContestSpec,
    Contrast,
    EngineSpec,
    FinalSpec,
    FreeSize,
    Limits,
    PrunerSpec,
    SearchSpec,
    SizeTarget,
)
from search_space.space import Space, unknown
from search_space.spacefile import read_change, read_point, read_space
from search_space.taskspec import read_task

FullSpace = Callable[[tuple[str, ...]], Space]

SECTIONS = (
    "name",
    "description",
    "task",
    "budget",
    "objectives",
    "search",
    "engine",
    "final",
    "baseline",
    "limits",
    "blocks",
    "max_hours",
    "max_tokens",
)
"""Top-level keys beside those of the space (model, optimizer, ...)."""
CONTEST_KEYS = tuple(field.name for field in dataclasses.fields(ContestSpec))


def read_experiment(
    source: Path | str, *, full_space: FullSpace, tasks: Mapping[str, type], overrides: Sequence[str], name: str
) -> dict[str, Any]:
    """The fields of an Experiment; ExperimentError lists every independent fault."""
    text = yamlfile.read_text(source) if isinstance(source, Path) else source
    document = yamlfile.parse(text, str(source) if isinstance(source, Path) else "experiment")
    if document.data is None:
        raise yamlfile.fault(document.file, 1, yamlfile.EMPTY)
    changes = [parse_override(override) for override in overrides]
    origin = Source(document, changes)
    faults = Faults(origin)
    if not isinstance(document.data, dict):
        faults.add("", f"holds {document.data!r} at the top; write a mapping that begins with `task:` or `model:`")
        faults.raise_any()
    for change in changes:
        if change.path == "blocks":
            apply(document.data, change, None)
    full = _full_space(faults, document.data, full_space)
    for change in changes:
        apply(document.data, change, full)
    top = Section(faults, "", document.data, (*SECTIONS, *full.fields))
    stem = source.stem if isinstance(source, Path) else ""
    fields = _read_all(top, full, tasks)
    fields["name"] = _name(top, name, stem)
    rules.check(faults, fields)
    faults.raise_any()
    return {**fields, "text": text, "overrides": tuple(overrides)}


def _full_space(faults: Faults, data: Mapping[str, Any], full_space: FullSpace) -> Space:
    """The space with the user's own blocks; without them, and with a fault recorded, where they cannot be had."""
    modules = Section(faults, "", data, data).take("blocks", values.many(values.module), ())
    try:
        return full_space(modules)
    except (Exception, SystemExit) as error:
        if not modules:
            raise
        words = f"{type(error).__name__}: {error}"
        faults.add(
            "blocks",
            f"cannot be imported ({words}); correct the module, or put it beside the experiment file, in the folder "
            "you run from, or on PYTHONPATH",
        )
        faults.raise_any()
        raise AssertionError("a fault was added") from error


def _name(top: Section, given: str, stem: str) -> str:
    """The caller's name, else the one in the file, else the file's own."""
    if given:
        try:
            return str(values.name(given))
        except ValueError as error:
            top.faults.add("name", str(error))
            return given
    if stem:
        return top.take("name", values.name, _stem(stem))
    return top.need("name", values.name, "", "name the search")


def _stem(stem: str) -> str:
    """The file's own name as a search name."""
    kept = "".join(
        character if character.isascii() and (character.isalnum() or character == "-") else "_" for character in stem
    )
    return kept[:64].strip("_-") or "experiment"


def _read_all(top: Section, full: Space, tasks: Mapping[str, type]) -> dict[str, Any]:
    faults = top.faults
    if top.has("task"):
        task = read_task(faults, top.data["task"], tasks)
    else:
        task = {}
        faults.add("task", f"is missing; write `task:` with one of {', '.join(tasks)}")
    size, spec = _size(top, full)
    if isinstance(size, SizeTarget):
        full = without_width(full)
    search = _search(top)
    space = read_space(faults, full, spec)
    fields: dict[str, Any] = {
        "description": top.take("description", values.text, ""),
        "space": space,
        "full": full,
        "size": size,
        "limits": _limits(top),
        "task": task,
        "objectives": top.take(
            "objectives", values.many(values.one_of("objective", settings.OBJECTIVES), at_least=1), ("loss",)
        ),
        "engine": _engine(top),
        "baseline": read_point(faults, full, space, top.data["baseline"]) if top.has("baseline") else {},
        "final": _final(top, full),
        "blocks": top.take("blocks", values.many(values.module), ()),
        "max_hours": top.take("max_hours", values.real(above=True), math.inf),
        "max_tokens": top.take("max_tokens", values.count(), math.inf),
    }
    budget, pruner = rules.read_budget(top, fields["task"], search.pruner)
    return {**fields, "budget": budget, "search": dataclasses.replace(search, pruner=pruner)}


def without_width(full: Space) -> Space:
    """The space without d_model, which a size target solves for."""
    model = full.fields["model"]
    assert isinstance(model, Space)
    kept = {name: node for name, node in model.fields.items() if name != "d_model"}
    return Space(fields={**full.fields, "model": Space(fields=kept, help=model.help)}, help=full.help)


def _size(top: Section, full: Space) -> tuple[settings.Size, dict[str, Any]]:
    """The size target, and what the file says about the space without it."""
    spec = {key: top.data[key] for key in full.fields if top.data.get(key) is not None}
    model = spec.get("model")
    if not isinstance(model, Mapping) or "size" not in model:
        return FreeSize(), spec
    rest = {key: value for key, value in model.items() if key != "size"}
    spec["model"] = rest
    section = Section(top.faults, "model.size", model["size"], settings.MEASURES)
    if len(section.data) != 1:
        if top.faults.clean("model.size"):
            top.faults.add("model.size", f"takes exactly one of {', '.join(settings.MEASURES)}; got {model['size']!r}")
        return FreeSize(), _without_width(rest, spec)
    if "d_model" in rest:
        top.faults.add("model.d_model", "is given together with model.size, which solves for it; keep one of the two")
    targets = {name: section.take(name, values.count(low=1000), 0) for name in section.data}
    ((measure, value),) = targets.items()
    spec = _without_width(rest, spec)
    return (SizeTarget(measure=measure, value=float(value)) if value else FreeSize()), spec


def _without_width(model: Mapping[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "model": {key: value for key, value in model.items() if key != "d_model"}}


def _limits(top: Section) -> Limits:
    names = ("max_params", "max_flops_per_token", "max_state_bytes")
    section = top.section("limits", (*names, "max_latency_ms", "min_tokens_per_second"))
    return Limits(
        **{name: float(section.take(name, values.count(), 0)) or math.inf for name in names},
        max_latency_ms=section.take("max_latency_ms", values.real(above=True), math.inf),
        min_tokens_per_second=section.take("min_tokens_per_second", values.real(above=True), 0.0),
    )


def _engine(top: Section) -> EngineSpec:
    default = EngineSpec()
    numbers = ("jobs", "threads", "retries", "checkpoint_tokens", "disk_bytes")
    section = top.section(
        "engine", ("kind", *numbers, "resources", "gpus_per_trial", "device", "dtype", "deterministic")
    )
    resources = section.section("resources", ("cpu", "gpu"))
    gpus = resources.take("gpu", values.real(high=1024.0), default.gpus)
    if section.has("gpus_per_trial") and resources.has("gpu"):
        section.faults.add("engine.gpus_per_trial", "says the same as engine.resources.gpu; keep one of them")
    return EngineSpec(
        kind=section.take("kind", values.one_of("engine", settings.ENGINES), default.kind),
        jobs=section.take("jobs", values.count(high=4096), default.jobs),
        cpus=resources.take("cpu", values.real(high=1024.0), default.cpus),
        gpus=float(section.take("gpus_per_trial", values.count(low=0, high=1024), gpus)),
        device=section.take("device", values.one_of("device", settings.DEVICES), default.device),
        dtype=section.take("dtype", values.one_of("dtype", settings.DTYPES), default.dtype),
        threads=section.take("threads", values.count(high=1024), default.threads),
        deterministic=section.take("deterministic", values.flag, default.deterministic),
        retries=section.take("retries", values.count(low=0, high=100), default.retries),
        checkpoint_tokens=section.take("checkpoint_tokens", values.count(low=0), default.checkpoint_tokens),
        disk_bytes=section.take("disk_bytes", values.count(low=2**20), default.disk_bytes),
    )


def _search(top: Section) -> SearchSpec:
    """How points are proposed; a pruner's grace is 0 where the file gives none."""
    default = SearchSpec()
    section = top.section("search", ("sampler", "pruner", "trials", "seed", "population", "diagnostics", "warm_start"))
    sampler = section.take("sampler", values.one_of("sampler", settings.SAMPLERS), default.sampler)
    population = settings.POPULATIONS.get(sampler, default.population)
    return SearchSpec(
        sampler=sampler,
        pruner=_pruner(section),
        trials=section.take("trials", values.count(high=10**6), default.trials),
        seed=section.take("seed", values.count(low=0, high=2**31 - 1), default.seed),
        population=section.take("population", values.count(low=2, high=10**5), population),
        diagnostics=section.take("diagnostics", values.flag, default.diagnostics),
        warm_start=section.take("warm_start", values.many(values.name), default.warm_start),
    )


def _pruner(search: Section) -> PrunerSpec:
    given = search.data.get("pruner", "none")
    picked = {given: None} if isinstance(given, str) else given
    path = "search.pruner"
    if not isinstance(picked, Mapping) or len(picked) != 1:
        search.faults.add(path, f"takes one of {', '.join(settings.PRUNERS)}; got {given!r}")
        return PrunerSpec()
    ((kind, spec),) = picked.items()
    if kind not in settings.PRUNERS:
        search.faults.add(f"{path}.{kind}", unknown("pruner", kind, settings.PRUNERS))
        return PrunerSpec()
    rungs = ("grace_tokens", "factor")
    copying = ("interval_tokens", "quantile", "factors")
    known = {"none": (), "median": ("grace_tokens",), "asha": rungs, "hyperband": rungs, "pbt": copying}[kind]
    section = Section(search.faults, f"{path}.{kind}", spec, known)
    default = PrunerSpec()
    return PrunerSpec(
        kind=kind,
        grace_tokens=section.take("grace_tokens", values.count(), 0),
        factor=section.take("factor", values.count(low=2, high=100), default.factor),
        interval_tokens=section.take("interval_tokens", values.count(), 0),
        quantile=section.take("quantile", values.real(high=0.5, above=True), default.quantile),
        factors=section.take("factors", values.many(values.real(high=100.0, above=True), at_least=1), default.factors),
    )


def _final(top: Section, full: Space) -> FinalSpec:
    section = top.section("final", ("seeds", "contrasts", *CONTEST_KEYS))
    seeds = section.take("seeds", values.count(low=2, high=1000), FinalSpec().seeds)
    given = section.data.get("contrasts")
    if given is not None and not isinstance(given, Mapping):
        section.faults.add("final.contrasts", f"takes a mapping {{name: {{path: value}}}}; got {given!r}")
        given = None
    contrasts: list[Contrast] = []
    for name, change in (given or {}).items():
        path = f"final.contrasts.{name}"
        try:
            values.name(name)
        except ValueError as error:
            section.faults.add(path, str(error))
        contrasts.append(Contrast(name=name, change=read_change(section.faults, full, path, change or {})))
    return FinalSpec(seeds=seeds, contrasts=tuple(contrasts), contest=_contest(section))


def _contest(final: Section) -> ContestSpec:
    default = ContestSpec()
    return ContestSpec(
        top=final.take("top", values.count(low=0, high=settings.MOST_FINALISTS), default.top),
        delta=final.take("delta", values.real(), default.delta),
        max_seeds=final.take("max_seeds", values.count(low=2, high=1000), default.max_seeds),
        sweep=final.take("sweep", sweep, default.sweep),
        alpha=final.take("alpha", values.real(high=0.5, above=True), default.alpha),
        at_length=final.take("at_length", values.count(low=0), default.at_length),
    )


def sweep(value: Any) -> int:
    """How many learning rates a sweep tries."""
    if isinstance(value, int) and not isinstance(value, bool) and value in settings.SWEEPS:
        return value
    raise ValueError(f"takes one of {', '.join(map(str, settings.SWEEPS))}; got {value!r}")
