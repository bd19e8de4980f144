"""Writes a search with planted effects through the tracking client, in the layout that search_space.records names."""

import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
from mlflow.entities import Metric as Point
from mlflow.entities import Param, RunTag
from mlflow.tracking import MlflowClient

from search_space.canon import digest
from search_space.domains import Choice, FloatRange
from search_space.records import TERMINAL, Artifact, Metric, Stage, Status, Tag
from search_space.space import OneOf, Space
from search_space.stored import space_to_plain

BATCH = 1024
BUDGET = 200 * BATCH
EVERY = 25 * BATCH
WORTH = {
    "model.mixer.kind": {"softmax": 0.0, "linear": 0.06, "sliding_window": 0.01},
    "model.position.kind": {"rotary": 0.0, "none": 0.22, "alibi": 0.02, "t5_bias": 0.0},
    "model.ffn.kind": {"swiglu": 0.0, "gelu": 0.03, "relu": 0.05},
    "model.norm.kind": {"rmsnorm": 0.0, "layernorm": 0.0},
    "model.placement.kind": {"pre": 0.0, "post": 0.05},
    "model.layers": {2: 0.08, 3: 0.03, 4: 0.0},
    "model.tied": {True: 0.0, False: 0.0},
}
RATE = "optimizer.adamw.learning_rate"
KV_HEADS = "model.mixer.softmax.kv_heads"
WINDOW = "model.mixer.sliding_window.window"
DROPOUT = "model.mixer.softmax.attention_dropout"
BASELINE: dict[str, Any] = {
    "model.mixer.kind": "softmax",
    KV_HEADS: 2,
    "model.position.kind": "none",
    "model.ffn.kind": "gelu",
    "model.norm.kind": "layernorm",
    "model.placement.kind": "pre",
    "model.layers": 2,
    "model.tied": True,
    RATE: 1e-3,
}


@dataclass
class Writer:
    """Writes one search; trial by trial, as a driver would."""

    uri: str
    root: Path
    name: str
    shards: bool = True
    noise: float = 0.01
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = MlflowClient(self.uri)
        location = (self.root / "artifacts" / self.name).as_uri()
        self.experiment = self.client.create_experiment(self.name, artifact_location=location)
        tags = {
            Tag.KIND: "search",
            Tag.SEARCH: self.name,
            Tag.KEY: self.name,
            Tag.UNIT: "byte",
            Tag.FINGERPRINT: "ab" * 32,
        }
        self.parent = self.client.create_run(self.experiment, run_name=self.name, tags=tags).info.run_id
        self.client.log_metric(self.parent, Metric.BASELINE_BIGRAM, 2.61)
        self.put(Artifact.EXPERIMENT_PLAIN, json.dumps(EXPERIMENT | {"name": self.name}))
        self.put(Artifact.ENVIRONMENT, json.dumps(ENVIRONMENT))

    def put(self, path: str, text: str) -> None:
        """Store a text on the parent."""
        self.client.log_text(self.parent, text, path)

    def trial(
        self,
        number: int,
        flat: dict[str, Any],
        curve: list[tuple[int, float]],
        *,
        status: Status = Status.OK,
        reason: str = "",
        stage: Stage = Stage.SEARCH,
        metrics: dict[str, float] | None = None,
        tags: dict[str, str] | None = None,
        running: bool = False,
        generation: int = 0,
    ) -> str:
        """Log one child run."""
        ids = {Tag.SPEC: digest([flat, number]), Tag.POINT: digest(flat), Tag.ARCH: digest(flat)}
        label = f"{number:03d} {flat['model.mixer.kind']}+{flat['model.position.kind']} {flat['model.layers']}L"
        heads = {
            Tag.KIND: "trial",
            Tag.SEARCH: self.name,
            Tag.KEY: f"{self.name}/{generation}/{stage}/{number}",
            Tag.GENERATION: str(generation),
            Tag.NUMBER: str(number),
            Tag.STAGE: str(stage),
            "mlflow.parentRunId": self.parent,
        }
        run = self.client.create_run(self.experiment, run_name=label, tags={**heads, **ids, **(tags or {})}).info.run_id
        points = [Point(Metric.VALIDATION_CURVE, loss, tokens, tokens) for tokens, loss in curve]
        points += [Point(Metric.TRAIN_CURVE, loss - 0.02, tokens, tokens) for tokens, loss in curve]
        tokens = curve[-1][0] if curve else 0
        final = {Metric.TOKENS: float(tokens), **cost(flat), **(metrics or {})}
        if status == Status.OK and not running:
            final |= {Metric.LOSS: curve[-1][1], Metric.BEST_LOSS: min(loss for _, loss in curve)}
        if not running:
            points += [Point(key, value, 0, tokens) for key, value in final.items()]
        sizes = {"model.d_model": 64 + 16 * (number % 3), "model.d_ff": 208 + 8 * (number % 5)}
        fixed = {DROPOUT: 0.0} if KV_HEADS in flat else {}
        params = [Param(path, str(value)) for path, value in {**sizes, **flat, **fixed}.items()]
        ended = [] if running else [RunTag(Tag.STATUS, str(status)), RunTag(Tag.REASON, reason)]
        self.client.log_batch(run, metrics=points, params=params, tags=ended)
        if running:
            return run
        self.client.set_terminated(run, TERMINAL[status])
        self.rows += [
            {
                "run": run,
                "number": number,
                "stage": str(stage),
                "tokens": tokens,
                "loss": loss,
                "train_loss": loss - 0.02,
                "seconds": tokens / 50_000,
            }
            for tokens, loss in curve
        ]
        return run

    def finish(self) -> None:
        """Store the shards and close the parent."""
        if self.shards and self.rows:
            with tempfile.TemporaryDirectory() as folder:
                half = len(self.rows) // 2
                for place, part in enumerate((self.rows[:half], self.rows[half:])):
                    file = Path(folder) / f"{place:05d}.parquet"
                    parquet.write_table(arrow.Table.from_pylist(part), file)
                    self.client.log_artifact(self.parent, str(file), Artifact.CURVES)
        self.client.set_terminated(self.parent, "FINISHED")


def _space() -> Space:
    """The space of the planted choices; d_model and d_ff are solved and no part of it."""
    families: dict[str, dict[str, Space]] = {}
    plain: dict[str, Choice] = {}
    for path, worth in WORTH.items():
        name = path.split(".")[1]
        if path.endswith(".kind"):
            families[name] = {kind: Space(fields={}) for kind in worth}
        else:
            options = tuple(worth)
            plain[name] = Choice(options=options, default=options[0])
    heads = {"kv_heads": Choice(options=(1, 2, 4), default=2), "attention_dropout": Choice(options=(0.0,), default=0.0)}
    families["mixer"]["softmax"] = Space(fields=heads)
    families["mixer"]["sliding_window"] = Space(fields={"window": Choice(options=(8, 16, 32), default=8)})
    nodes = {name: OneOf(variants=kinds, default=next(iter(kinds))) for name, kinds in families.items()}
    rate = FloatRange(low=2e-4, high=2e-2, default=1e-3, log=True)
    optimizer = OneOf(variants={"adamw": Space(fields={"learning_rate": rate})}, default="adamw")
    return Space(fields={"model": Space(fields={**nodes, **plain}), "optimizer": optimizer})


EXPERIMENT: dict[str, Any] = {
    "space": space_to_plain(_space()),
    "task": {"kind": "python_source", "python_source": {"seq_len": 64}},
    "size": {"params": 250_000},
    "budget": {
        "tokens": BUDGET,
        "batch_tokens": BATCH,
        "micro_batch_tokens": BATCH,
        "eval_tokens": 16_384,
        "eval_every": EVERY,
        "max_seconds": 600.0,
    },
    "search": {"sampler": "tpe", "pruner": {"kind": "asha"}, "trials": 30, "seed": 0, "population": 0},
    "final": {"seeds": 4, "contrasts": {"position": {"model.position.kind": "none"}, "seed": {}}},
}
ENVIRONMENT: dict[str, Any] = {"python": "3.11.7", "platform": "Linux x86_64", "versions": {"torch": "2.13.0"}}


def planted(flat: dict[str, Any]) -> float:
    """The final loss without noise."""
    total = 2.05 + sum(worth[flat[path]] for path, worth in WORTH.items())
    total += 0.05 * math.log2(flat[RATE] / 3e-3) ** 2 / 4
    return total + 0.02 * (flat.get(KV_HEADS) == 1)


def cost(flat: dict[str, Any]) -> dict[str, float]:
    """Cost measures that move with the architecture, about iso-parameter."""
    wide = {"softmax": 1.0, "linear": 0.9, "sliding_window": 0.93}[flat["model.mixer.kind"]]
    tilt = 1 + 0.002 * (len(flat["model.ffn.kind"]) - flat["model.layers"])
    return {
        Metric.PARAMS: float(round(250_000 * tilt)),
        Metric.FLOPS: float(round(500_000 * wide * (1 + 0.05 * flat["model.layers"]))),
        Metric.STATE_BYTES: 0.0 if flat["model.mixer.kind"] == "linear" else 256.0 * flat.get(KV_HEADS, 4),
        Metric.TOKENS_PER_SECOND: 48_000 / wide / (1 + 0.1 * flat["model.layers"]),
        Metric.SECONDS: 4.1,
    }


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """A random point; conditional fields only where they are live."""
    flat = {path: list(worth)[rng.integers(len(worth))] for path, worth in WORTH.items()}
    if flat["model.mixer.kind"] == "softmax":
        flat[KV_HEADS] = int(rng.choice([1, 2, 4]))
    if flat["model.mixer.kind"] == "sliding_window":
        flat[WINDOW] = int(rng.choice([8, 16, 32]))
    flat[RATE] = float(np.exp(rng.uniform(np.log(2e-4), np.log(2e-2))))
    return flat


def curve(final: float, rng: np.random.Generator, noise: float, last: int = BUDGET) -> list[tuple[int, float]]:
    """A power law in tokens that ends at `final`; one draw of noise moves it as a whole, a small one each reading."""
    shift = noise * rng.standard_normal()
    steps = range(EVERY, last + 1, EVERY)
    return [
        (t, final + shift + 1.4 * ((t / EVERY) ** -0.6 - (BUDGET / EVERY) ** -0.6) + 0.002 * rng.standard_normal())
        for t in steps
    ]


def write(uri: str, root: Path, name: str = "quickstart", trials: int = 30, seed: int = 0, **options: Any) -> Writer:
    """A search under successive halving with divergence, a crash and a running trial, and two paired finals."""
    rng = np.random.default_rng(seed)
    writer = Writer(uri, root, name, **options)
    rungs: dict[int, list[float]] = {EVERY: [], 2 * EVERY: [], 4 * EVERY: []}
    for number in range(trials):
        flat = BASELINE if number == 0 else draw(rng)
        tags = {Tag.BASELINE: "true"} if number == 0 else {}
        readings = curve(planted(flat), rng, writer.noise)
        if flat["model.placement.kind"] == "post" and flat[RATE] > 6e-3:
            reason = "validation loss 9.31 is over 1.5 times its start at 25,600 tokens"
            writer.trial(number, flat, readings[:1], status=Status.DIVERGED, reason=reason)
        elif number == 7:
            reason = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 17179869184 bytes"
            writer.trial(number, flat, [], status=Status.OUT_OF_MEMORY, reason=reason)
        else:
            stop = 0
            for rung, seen in rungs.items():
                loss = dict(readings)[rung]
                seen.append(loss)
                if number and loss > np.median(seen):
                    stop = rung
                    break
            kept = [point for point in readings if not stop or point[0] <= stop]
            status = Status.PRUNED if stop else Status.OK
            reason = f"worse than half at {stop:,} tokens" if stop else ""
            writer.trial(number, flat, kept, status=status, reason=reason, tags=tags)
    write_finals(writer, rng)
    writer.finish()
    return writer


def write_finals(writer: Writer, rng: np.random.Generator, seeds: int = 4) -> None:
    """Two contrasts: the best candidate without positions, and the best candidate under other seeds."""
    best = {**BASELINE, "model.position.kind": "rotary", RATE: 3e-3}
    number = 0
    for contrast, change in (("position", {"model.position.kind": "none"}), ("seed", {})):
        for replica in range(seeds):
            common = 0.01 * rng.standard_normal()
            for side, flat in (("base", best), ("changed", {**best, **change})):
                readings = curve(planted(flat) + common, rng, writer.noise)
                writer.trial(
                    number,
                    flat,
                    readings,
                    stage=Stage.FINAL,
                    metrics={Metric.TEST_LOSS: readings[-1][1] + 0.03},
                    tags={Tag.CANDIDATE: f"{contrast}/{side}", Tag.REPLICA: str(replica)},
                )
                number += 1
