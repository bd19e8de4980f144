"""What docs/experiments.md says of each key beyond what the reader of experiment files shows by itself."""

from dataclasses import dataclass
from typing import Any

from search_space import rules, settings

BASE: dict[str, Any] = {
    "name": "example",
    "task": {"python_source": {"seq_len": 64, "eval_lengths": [128]}},
    "budget": {"tokens": 204800, "batch_tokens": 1024},
    "search": {"trials": 48},
    "baseline": {"model": {"position": "rotary"}},
    "final": {"top": 3},
}
"""Enough of a file for a key to be read beside it."""
BRED: dict[str, Any] = {
    **{name: BASE[name] for name in ("name", "task", "budget")},
    "search": {"trials": 48, "sampler": "random"},
    "model": {
        **{"d_model": 32, "layers": 1, "tied": True, "placement": "pre", "init": "scaled_normal"},
        "mixer": {"softmax": {"kv_heads": 1, "queries_per_kv": 1, "head_dim": 16, "qk_norm": "none"}},
        **{"position": "rotary", "ffn": {"gelu": {"expansion": 2.0}}, "norm": "rmsnorm"},
    },
}
"""The same for the keys of a population, whose trials have one model."""


@dataclass(frozen=True)
class Key:
    """What the page says of a key beyond what the reader shows."""

    meaning: str
    example: str
    """As an experiment file has it."""
    takes: str = ""
    """Only where the reader does not take it in one step."""
    default: str = ""
    """Only where it depends on other keys."""


LENGTH = "sequences of the training length"
KEYS = {
    "name": Key("names the search, its study and its MLflow runs", "attention_2", default="the file's own name"),
    "description": Key("shown in the dashboard and the report", "Which attention at 130k parameters?"),
    "task": Key(
        "where tokens come from; one task", "python_source", "a task's name, or {name: {field: value}}", "none"
    ),
    "budget.tokens": Key("training tokens of one trial: the unit of all budgets", "2048000", default="none"),
    "budget.batch_tokens": Key("tokens of one optimiser step", "2048", default=f"{rules.DEFAULT_ROWS} {LENGTH}"),
    "budget.micro_batch_tokens": Key(
        "tokens that pass through the model at a time; gradients are summed", "512", default="batch_tokens"
    ),
    "budget.eval_tokens": Key("tokens of each validation", "64KiB", default=f"{rules.DEFAULT_EVAL_ROWS} {LENGTH}"),
    "budget.eval_every": Key(
        "training tokens between two readings; pruning decides at readings",
        "51200",
        default=f"grace_tokens of the pruner, else {rules.READINGS} readings",
    ),
    "budget.max_seconds": Key("wall clock after which a trial ends as timed_out", "600"),
    "objectives": Key(
        f"what is made better; several want one of {', '.join(settings.SEVERAL_OBJECTIVES)}",
        "[loss, params]",
        f"one or more of {', '.join(settings.OBJECTIVES)}",
    ),
    "search.sampler": Key("who proposes points", "random"),
    "search.pruner": Key(
        "who ends trials early",
        "median",
        f"one of {', '.join(settings.PRUNERS)}, or {{name: {{field: value}}}}",
        "none",
    ),
    "search.trials": Key("trials of the search, pruned ones included", "24"),
    "search.seed": Key("of proposals, weights and data", "7"),
    "search.population": Key(
        "points per generation of nsga2, alive at a time in evolution, or trials of one population (pbt)",
        "12",
        default=", ".join(
            [f"{settings.SearchSpec().population}", *(f"{n} for {name}" for name, n in settings.POPULATIONS.items())]
        ),
    ),
    "search.diagnostics": Key("look inside each model on the way: warnings in words, plots in MLflow", "true"),
    "search.warm_start": Key(
        "earlier searches beside this one whose trials the sampler learns from",
        "[other_search]",
        "names of searches",
    ),
    "engine.kind": Key("who places trials: this machine's processes, or Ray Tune", "local"),
    "engine.jobs": Key("trials at a time, at most", "2"),
    "engine.resources.cpu": Key("processors one trial asks Ray for", "2"),
    "engine.resources.gpu": Key("devices one trial asks Ray for; 0.25 lets four share one", "0.25"),
    "engine.gpus_per_trial": Key("the same in whole devices", "1", default="engine.resources.gpu"),
    "engine.device": Key("where models train; auto is cuda where there is one", "cpu"),
    "engine.dtype": Key("of activations; auto is bfloat16 where a device has it", "float32"),
    "engine.threads": Key("threads of one trial", "2"),
    "engine.deterministic": Key("only operations that give the same bits again", "false"),
    "engine.retries": Key("runs again of a trial that failed", "1"),
    "engine.checkpoint_tokens": Key("training tokens between two checkpoints; 0: at readings", "51200"),
    "engine.disk_bytes": Key("what checkpoints and weights of the search may take", "5GiB"),
    "final.seeds": Key("paired seeds of each final, trained after the search", "4"),
    "final.contrasts": Key(
        "the best trial for which a change changes something, against itself with it; {} changes the seeds alone",
        "{no_positions: {model.position: none}}",
        "{name: {path: value}}",
        "none",
    ),
    "final.top": Key(
        "best candidates that meet the baseline after the search, with as many paired seeds as they need; at most 5; "
        "with a sweep twice as many are tried once more for these places",
        "5",
    ),
    "final.delta": Key("gap below which two candidates are equal, in nats per token", "0.01"),
    "final.max_seeds": Key("replicas of each of them, at most", "8"),
    "final.sweep": Key("learning rates tried for each before, a factor of 2 apart; 0: each keeps its own", "3"),
    "final.alpha": Key("chance that any of their verdicts is ever wrong", "0.01"),
    "final.at_length": Key("eval length at which their test losses are compared; 0: the training length", "128"),
    "baseline": Key(
        "a candidate that is trained as trial 0; what it leaves out takes its default",
        "{model: {position: rotary}}",
        "one value for each path it names",
        "none",
    ),
    "limits.max_params": Key("larger models are refused before they train", "1M", default="no limit"),
    "limits.max_flops_per_token": Key("forward FLOPs per token, likewise", "10M", default="no limit"),
    "limits.max_state_bytes": Key(
        "decoding state after a sequence of the training length", "64KiB", default="no limit"
    ),
    "limits.max_latency_ms": Key(
        "milliseconds of a forward pass over one sequence, measured before a candidate trains", "20", default="no limit"
    ),
    "limits.min_tokens_per_second": Key("of forward and backward passes, measured likewise", "500", default="no limit"),
    "blocks": Key("your own block modules, beside the file or on PYTHONPATH", "json", "one or more modules", "none"),
    "max_hours": Key("the search proposes nothing after so long", "1.5", default="no limit"),
    "max_tokens": Key("or after so many training tokens of all trials", "50M", default="no limit"),
    "model.size.params": Key("all parameters; d_model and d_ff are solved for", "130k", default="not held"),
    "model.size.active_params": Key("those one token passes through", "130k", default="not held"),
    "model.size.body_params": Key("those without embeddings and head", "130k", default="not held"),
    "model.size.flops_per_token": Key("forward FLOPs per token", "400k", default="not held"),
}
for kind in (kind for kind in settings.PRUNERS[1:] if kind not in settings.COPIES):
    KEYS[f"search.pruner.{kind}.grace_tokens"] = Key("no trial is pruned before", "51200", default="budget.eval_every")
for kind in settings.RANKS_FRONTS:
    KEYS[f"search.pruner.{kind}.factor"] = Key("one trial in so many survives a rung", "3")
KEYS["search.pruner.pbt.interval_tokens"] = Key(
    "training tokens after which the worst trials of a population go on from the state of one of the best, each time",
    "51200",
    default="budget.eval_every",
)
KEYS["search.pruner.pbt.quantile"] = Key("share of the population that does, and share it goes on from", "0.2")
KEYS["search.pruner.pbt.factors"] = Key(
    "one of them, drawn, multiplies each searched setting that was taken over (of a beta, its distance to 1)",
    "[0.5, 2.0]",
    "one or more numbers above 0",
)
TASK_EXAMPLES = {
    "seq_len": "128",
    "eval_lengths": "[256, 512]",
    "max_bytes": "4MiB",
    "paths": "[notes/, log.jsonl]",
    "text_field": "body",
    "pairs": "16",
    "vocabulary": "512",
    "examples": "12800",
    "held_out": "256",
    "seed": "1",
}
"""By field."""
