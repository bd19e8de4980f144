"""The rules across several keys: budgets that divide, pruners with rungs, samplers that fit their space."""

import math
import random
from collections.abc import Mapping
from typing import Any

from search_space import values
from search_space.domains import Choice
from search_space.errors import Faults
from search_space.points import changed
from search_space.population_rules import check_population
from search_space.records import Budget
from search_space.section import Section
from search_space.settings import COPIES, RANKS_FRONTS, SEVERAL_OBJECTIVES, PrunerSpec, SearchSpec, SizeTarget
from search_space.space import Space, conditional, random_point, searched, size

READINGS = 8
"""Validation readings of an unpruned trial where the file does not say how many."""
DEFAULT_ROWS = 16
DEFAULT_EVAL_ROWS = 128
SAMPLED_POINTS = 256
"""Points tried to see whether a contrast can change anything."""
MOST_NAMED = 4


def read_budget(top: Section, task: Mapping[str, Any], pruner: PrunerSpec) -> tuple[Budget, PrunerSpec]:
    """The budget and the pruner with everything filled in that the file leaves out."""
    keys = ("tokens", "batch_tokens", "micro_batch_tokens", "eval_tokens", "eval_every", "max_seconds")
    section = top.section("budget", keys)
    length = task[task["kind"]].get("seq_len", 1) if task else 1
    tokens = section.need("tokens", values.count(), 0, "say how many training tokens one trial gets, such as 200k")
    batch = section.take("batch_tokens", values.count(), min(DEFAULT_ROWS * length, tokens or DEFAULT_ROWS * length))
    every = max(batch, tokens // READINGS // batch * batch)
    if 0 < pruner.first_tokens < tokens:
        every = pruner.first_tokens
    every = section.take("eval_every", values.count(), every)
    if pruner.kind != "none" and not pruner.first_tokens:
        pruner = pruner.beginning(every)
    budget = Budget(
        tokens=tokens,
        batch_tokens=batch,
        micro_batch_tokens=section.take("micro_batch_tokens", values.count(), batch),
        eval_tokens=section.take("eval_tokens", values.count(), DEFAULT_EVAL_ROWS * length),
        eval_every=every,
        max_seconds=section.take("max_seconds", values.real(above=True, high=1e9), 3600.0),
    )
    return budget, pruner


def check(faults: Faults, fields: Mapping[str, Any]) -> None:
    """Record every broken rule whose parts are sound in themselves."""
    _check_budget(faults, fields["budget"], fields["task"], fields["search"].pruner)
    _check_search(faults, fields["search"], fields["objectives"], fields["space"])
    if fields["name"] in fields["search"].warm_start:
        faults.add(
            "search.warm_start",
            f"names this search itself ({fields['name']}); remove it: the same command goes on with a search, and "
            "--extend goes on under an edited file",
        )
    _check_objectives(faults, fields)
    _check_contrasts(faults, fields)
    check_contest(faults, fields)
    if fields["search"].pruner.kind in COPIES:
        check_population(faults, fields)


def _multiple(faults: Faults, path: str, value: int, other_path: str, unit: int) -> None:
    if not faults.clean(path, other_path) or value % unit == 0:
        return
    below = value // unit * unit
    near = f"{below} or {below + unit}" if below else f"{unit}"
    faults.add(path, f"takes a multiple of {other_path} ({unit}); got {value}, write {near}", also=(other_path,))


def _check_budget(faults: Faults, budget: Budget, task: Mapping[str, Any], pruner: PrunerSpec) -> None:
    _multiple(faults, "budget.tokens", budget.tokens, "budget.batch_tokens", budget.batch_tokens)
    _multiple(
        faults, "budget.batch_tokens", budget.batch_tokens, "budget.micro_batch_tokens", budget.micro_batch_tokens
    )
    _multiple(faults, "budget.eval_every", budget.eval_every, "budget.batch_tokens", budget.batch_tokens)
    fields = task[task["kind"]] if task else {}
    if "seq_len" in fields:
        length_path, length = f"task.{task['kind']}.seq_len", fields["seq_len"]
        for name in ("micro_batch_tokens", "eval_tokens"):
            if name == "micro_batch_tokens" and budget.micro_batch_tokens == budget.batch_tokens:
                name = "batch_tokens"
            _multiple(faults, f"budget.{name}", getattr(budget, name), length_path, length)
        longest = max([length, *fields.get("eval_lengths", [])])
        if budget.eval_tokens < longest and faults.clean("budget.eval_tokens", "task"):
            faults.add(
                "budget.eval_tokens",
                f"must hold one sequence of the longest evaluation length ({longest}); "
                f"got {budget.eval_tokens}, write {longest} or more",
            )
    if budget.eval_every > budget.tokens and faults.clean("budget.eval_every", "budget.tokens"):
        faults.add(
            "budget.eval_every",
            f"takes at most budget.tokens ({budget.tokens}); got {budget.eval_every}, write a smaller one",
            also=("budget.tokens",),
        )
    if pruner.kind == "none":
        return
    first_path, first = f"search.pruner.{pruner.kind}.{pruner.first_key}", pruner.first_tokens
    _multiple(faults, first_path, first, "budget.eval_every", budget.eval_every)
    if first >= budget.tokens and faults.clean(first_path, "budget.tokens", "budget.eval_every"):
        faults.add(
            first_path,
            f"must lie below budget.tokens ({budget.tokens}), or nothing is ever "
            f"{'copied' if pruner.kind in COPIES else 'pruned'}; got {first}, write a smaller one or `pruner: none`",
            also=("budget.tokens",),
        )


def _check_search(faults: Faults, search: SearchSpec, objectives: tuple[str, ...], space: Space) -> None:
    sampler, pruner = search.sampler, search.pruner.kind
    if faults.clean("search.sampler", "objectives"):
        if len(objectives) > 1 and sampler not in SEVERAL_OBJECTIVES:
            faults.add(
                "search.sampler",
                f"takes one objective, but objectives names {', '.join(objectives)}; got {sampler}, "
                f"write one of {', '.join(SEVERAL_OBJECTIVES)}, or keep one objective",
                also=("objectives",),
            )
        if len(objectives) == 1 and sampler == "nsga2":
            faults.add(
                "search.sampler",
                f"nsga2 is for several objectives; got only {objectives[0]}: name two or more "
                "under objectives, or take tpe",
                also=("objectives",),
            )
    evolves = sampler in ("nsga2", "evolution")
    if faults.clean("search", "objectives") and evolves and search.population > search.trials / 4:
        faults.add(
            "search.population",
            f"takes at most a quarter of search.trials ({search.trials}), or there are too "
            f"few generations to learn from; got {search.population}, write {max(search.trials // 4, 2)} or at "
            f"least {4 * search.population} trials",
            also=("search.trials",),
        )
    if faults.clean("search.pruner", "objectives") and pruner != "none":
        _check_pruner(faults, pruner, objectives)
    if faults.clean("search.sampler", *space.fields):
        _check_sampler(faults, sampler, space)


def _check_pruner(faults: Faults, pruner: str, objectives: tuple[str, ...]) -> None:
    """A pruner must see what a trial may win by."""
    if "loss" not in objectives:
        faults.add(
            "search.pruner",
            f"{pruner} stops trials by their losses on the way, but objectives names {', '.join(objectives)} "
            "alone; name loss among them, or write `pruner: none`",
            also=("objectives",),
        )
    elif len(objectives) > 1 and pruner not in RANKS_FRONTS:
        faults.add(
            "search.pruner",
            f"{pruner} compares losses and cannot stop a trial that may win by "
            f"another objective ({', '.join(objectives)}); write one of {', '.join(RANKS_FRONTS)}, or `pruner: none`",
            also=("objectives",),
        )


def _check_sampler(faults: Faults, sampler: str, space: Space) -> None:
    domains = searched(space)
    if sampler == "grid" and math.isinf(size(space)):
        open_paths = [path for path, domain in domains.items() if math.isinf(_size(domain))]
        faults.add(
            "search.sampler",
            f"grid needs a finite space, but {_some(open_paths)} hold real intervals; give "
            "them lists or {low, high, step}, or take random or tpe",
        )
    if sampler not in ("gp", "cmaes"):
        return
    if not domains:
        faults.add("search.sampler", f"{sampler} has nothing to search, every field is fixed; take random")
    live_sometimes = sorted(conditional(space))
    if live_sometimes:
        faults.add(
            "search.sampler",
            f"{sampler} needs every searched field to be always active, but "
            f"{_some(live_sometimes)} belong to variants that are searched; fix those variants or take tpe",
        )
    named = [path for path, domain in domains.items() if isinstance(domain, Choice)]
    if sampler == "cmaes" and named:
        faults.add(
            "search.sampler",
            f"cmaes searches numbers only, but {_some(named)} are choices; fix them, write ranges, or take tpe",
        )


def _size(domain: Any) -> float:
    return size(Space(fields={"value": domain}))


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
    return ", ".join(paths[:MOST_NAMED]) + more


def _check_objectives(faults: Faults, fields: Mapping[str, Any]) -> None:
    target = fields["size"]
    if isinstance(target, SizeTarget) and target.measure in fields["objectives"] and faults.clean("objectives"):
        faults.add(
            "objectives",
            f"names {target.measure}, which model.size holds equal for every candidate; remove it "
            "there or from model.size",
            item=fields["objectives"].index(target.measure),
        )
    limits = {"params": "max_params", "flops_per_token": "max_flops_per_token"}
    if isinstance(target, SizeTarget) and target.measure in limits:
        limit = getattr(fields["limits"], limits[target.measure])
        path = f"limits.{limits[target.measure]}"
        if target.value > limit and faults.clean(path, "model.size"):
            faults.add(
                path,
                f"lies below model.size.{target.measure} ({target.value:g}), so no candidate is legal; got "
                f"{limit:g}, raise it or remove it",
            )


def _check_contrasts(faults: Faults, fields: Mapping[str, Any]) -> None:
    """Every contrast that names a change must be able to change some candidate."""
    space, full = fields["space"], fields["full"]
    if not faults.clean(*space.fields):
        return
    rng = random.Random(0)
    points = [random_point(space, rng) for _ in range(SAMPLED_POINTS if fields["final"].contrasts else 0)]
    for contrast in fields["final"].contrasts:
        path = f"final.contrasts.{contrast.name}"
        if (
            contrast.change
            and faults.clean(path)
            and all(changed(full, space, p, contrast.change) == p for p in points)
        ):
            sought = ", ".join(f"{key}={value!r}" for key, value in contrast.change.items())
            faults.add(
                path,
                f"changes no candidate of this space, all have {sought} or lack the variant; change "
                "another value, or remove the contrast",
            )


def check_contest(faults: Faults, fields: Mapping[str, Any]) -> None:
    """A contest has somebody to beat, and losses at the length it compares."""
    contest, task = fields["final"].contest, fields["task"]
    if not faults.clean("final"):
        return
    if contest.top and not fields["baseline"] and faults.clean("baseline"):
        faults.add("final.top", "needs a candidate to beat; name one under `baseline:`, or remove it")
    if not contest.top and contest != type(contest)():
        faults.add("final.top", "is missing, without which no candidate meets the baseline; write `top: 5` beside it")
    lengths = (task[task["kind"]] if task else {}).get("eval_lengths", ())
    if contest.at_length and contest.at_length not in lengths and faults.clean("task"):
        held = ", ".join(map(str, lengths)) or "none"
        faults.add("final.at_length", f"takes one of the task's eval_lengths ({held}); got {contest.at_length}")
