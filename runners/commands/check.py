"""`assay check`: what a search would draw and cost; nothing is trained."""

import argparse
import json
import math
import random
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from blocks.cautions import cautions
from blocks.families import InfeasibleArchitecture
from runners.candidate import Resolved, make_spec, rebuild, resolve
from runners.commands.reading import read_experiment
from runners.guard import Guard
from runners.progress import in_words
from runners.tasks import task_from_plain
from search_space.canon import seed_from
from search_space.experiment import Experiment
from search_space.records import Seeds
from search_space.space import random_point, searched, size

_SAMPLE_SECONDS = 5.0


def run(arguments: argparse.Namespace) -> int:
    """Draw points, resolve them, and tell what came of it."""
    experiment = read_experiment(arguments)
    facts = _facts(experiment, arguments.samples)
    print(json.dumps(facts, indent=2) if arguments.json else _text(experiment, facts))
    return 0


def _facts(experiment: Experiment, samples: int) -> dict[str, Any]:
    shape = task_from_plain(experiment.task).shape()
    rng = random.Random(seed_from("check", experiment.search.seed))
    legal: list[Resolved] = []
    refusals: Counter[str] = Counter()
    doubts: Counter[str] = Counter()
    started = time.perf_counter()
    drawn = 0
    points = size(experiment.space)
    guard = Guard(experiment)
    while drawn < min(samples, points) and time.perf_counter() - started < _SAMPLE_SECONDS:
        drawn += 1
        try:
            point = random_point(experiment.space, rng)
            guard.check(point, shape)
            legal.append(resolve(point, experiment, shape))
            doubts.update(cautions(legal[-1].candidate.model))
        except InfeasibleArchitecture as error:
            refusals[str(error)] += 1
    guard.close()
    facts: dict[str, Any] = {
        "name": experiment.name,
        "points": None if math.isinf(points) else int(points),
        "searched_fields": len(searched(experiment.space)),
        "sampled": drawn,
        "legal_and_inside_budget": len(legal) / drawn,
        "refusals": dict(refusals.most_common(5)),
        "cautions": dict(doubts.most_common(5)),
    }
    if legal:
        legal.sort(key=lambda resolved: resolved.cost.params)
        facts |= {"cheapest": _model(legal[0]), "dearest": _model(legal[-1]), "predicted": _predict(experiment, legal)}
    return facts


def _model(resolved: Resolved) -> dict[str, Any]:
    kinds = {
        path: value for path, value in resolved.flat.items() if path.startswith("model.") and path.endswith(".kind")
    }
    return {"kinds": kinds, "d_model": resolved.candidate.model.d_model, **asdict(resolved.cost)}


def _predict(experiment: Experiment, legal: list[Resolved]) -> dict[str, float]:
    """Seconds, from one timed forward and backward pass of the model with the median FLOPs."""
    median = sorted(legal, key=lambda resolved: resolved.cost.flops_per_token)[len(legal) // 2]
    spec = make_spec(median, experiment, fingerprint="", seeds=Seeds(init=0, data=0, dropout=0))
    model = rebuild(spec).model.build(0, device=spec.device)
    length = model.config.train_len
    rows = max(1, experiment.budget.micro_batch_tokens // length)
    tokens = torch.zeros((rows, length), dtype=torch.long, device=spec.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(spec.threads)
    seconds = min(_timed_pass(model, tokens) for _ in range(3))
    torch.set_num_threads(threads)
    per_token = seconds / tokens.numel()
    trial = per_token * experiment.budget.tokens
    waves = math.ceil(min(experiment.search.trials, size(experiment.space)) / experiment.engine.jobs)
    contest = experiment.final.contest
    tried = contest.entrants - contest.top
    met = (contest.top + 1) * (contest.sweep + contest.max_seeds) + tried if contest.top else 0
    finals = math.ceil((2 * experiment.final.seeds * len(experiment.final.contrasts) + met) / experiment.engine.jobs)
    return {
        "seconds_per_unpruned_trial": round(trial, 2),
        "seconds_if_nothing_is_pruned": round(trial * waves, 1),
        "seconds_of_finals": round(trial * finals, 1),
        "jobs": experiment.engine.jobs,
    }


def _timed_pass(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    started = time.perf_counter()
    logits, auxiliary = model(tokens)
    (logits.float().logsumexp(-1).mean() + auxiliary).backward()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _text(experiment: Experiment, facts: dict[str, Any]) -> str:
    points = "without number (a real interval is searched)" if facts["points"] is None else f"{facts['points']:,}"
    lines = [
        f"{experiment.name}: good",
        f"  points          {points}; {facts['searched_fields']} fields searched",
        f"  legal           {facts['legal_and_inside_budget']:.1%} of {facts['sampled']} points drawn; "
        "the rest is redrawn, never stored",
    ]
    lines += [f"                  refused {count}x: {reason}" for reason, count in facts["refusals"].items()]
    lines += [f"  caution         {count}x: {caution}" for caution, count in facts["cautions"].items()]
    for name in ("cheapest", "dearest"):
        if name in facts:
            model = facts[name]
            kinds = " ".join(str(kind) for kind in model["kinds"].values())
            lines.append(
                f"  {name:<15} {model['params']:,} parameters, {model['flops_per_token']:,.0f} FLOPs/token, "
                f"{model['weight_bytes']:,} bytes of weights, "
                f"{model['state_bytes_per_token']:,.0f} state bytes/token: {kinds}"
            )
    if "predicted" in facts:
        predicted = facts["predicted"]
        lines.append(
            f"  predicted time  {predicted['seconds_per_unpruned_trial']} s an unpruned trial; "
            f"{in_words(predicted['seconds_if_nothing_is_pruned'])} for {experiment.search.trials} trials on "
            f"{predicted['jobs']} job(s) if nothing is pruned, "
            f"at most {in_words(predicted['seconds_of_finals'])} for the finals"
        )
    else:
        lines[0] = f"{experiment.name}: no legal point among {facts['sampled']} drawn"
    return "\n".join(lines)
