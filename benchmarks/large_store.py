"""A tracking store with one search of many trials, as a search leaves it: tags, parameters, curves, and its tables.

Rows go straight into the tables that MLflow makes; what a driver joins on the parent is joined by the driver's code.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
from mlflow.tracking import MlflowClient

from runners.artifacts import ArtifactWriter
from runners.curves import SHARD_TRIALS, CurveShards
from runners.store import every_run
from runners.table import TrialTable
from search_space.batches import SIZE
from search_space.places import locate
from search_space.records import Artifact, Metric, Stage, Status, Tag

PARAMETERS = 20
NAME = "large"
FINAL = (Metric.LOSS, Metric.PARAMS, Metric.FLOPS, Metric.TOKENS, Metric.TOKENS_PER_SECOND)
NOTE = (
    "### large/{0}\n250,000 parameters (230,000 without embeddings), 500,000 FLOPs per token\n\n`assay show large/{0}`"
)


class _Made:
    """The numbers of the search."""

    def __init__(self, trials: int, readings: int) -> None:
        rng = np.random.default_rng(0)
        self.ids = [f"{number:032x}" for number in range(trials)]
        self.options = rng.integers(0, 3, (trials, PARAMETERS))
        self.rates = np.exp(rng.uniform(np.log(1e-4), np.log(1e-1), trials))
        worth = rng.normal(0, 0.02, (PARAMETERS, 3))
        losses = 2 + worth[np.arange(PARAMETERS), self.options].sum(axis=1) + 0.01 * np.log2(self.rates / 3e-3) ** 2
        self.losses = losses + 0.01 * rng.standard_normal(trials)
        self.bad = (self.options[:, 0] == 2) & (self.rates > 2e-2)
        self.steps = 1024 * np.arange(1, readings + 1)
        drop = 1.4 * ((self.steps / 1024.0) ** -0.6 - readings**-0.6)
        self.curves = self.losses[:, None] + drop + 0.002 * rng.standard_normal((trials, readings))


def write_store(root: Path, trials: int, readings: int, *, tables: bool = True) -> str:
    """Make a store that holds one search of so many trials; its URI. Without `tables` its parent keeps none."""
    root.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{root}/mlflow.db"
    client, made = MlflowClient(uri), _Made(trials, readings)
    experiment = client.create_experiment(NAME, artifact_location=(root / "artifacts" / NAME).as_uri())
    tags = {Tag.KIND: "search", Tag.KEY: NAME, Tag.SEARCH: NAME, Tag.UNIT: "byte", Tag.BATCH: str(-(-trials // SIZE))}
    parent = client.create_run(experiment, run_name=NAME, tags=tags)
    with closing(sqlite3.connect(root / "mlflow.db")) as database, database:
        _write_runs(database, made, experiment, parent.info.run_id, root)
        _write_metrics(database, made)
    files = ArtifactWriter(client, locate(uri), parent)
    shards = CurveShards(None, files.put)
    _write_shards(root / "artifacts" / NAME / parent.info.run_id / "artifacts", made)
    if tables:
        shards.join(files)
        TrialTable(client, parent, files, is_served=True).close(every_run(client, [experiment]), tags)
    client.set_terminated(parent.info.run_id)
    return uri


def _write_runs(database: sqlite3.Connection, made: _Made, experiment: str, parent: str, root: Path) -> None:
    columns = "run_uuid, name, status, start_time, end_time, artifact_uri, experiment_id, user_id, lifecycle_stage"
    place, same = (root / "artifacts" / NAME).as_uri(), ("u", "active", "UNKNOWN", "", "", "")
    _insert(
        database,
        f"runs ({columns}, source_type, source_name, entry_point_name, source_version)",
        (
            (
                run,
                _name(number),
                "FINISHED",
                10 * number,
                10 * number + 9,
                f"{place}/{run}/artifacts",
                experiment,
                *same,
            )
            for number, run in enumerate(made.ids)
        ),
    )
    _insert(
        database,
        "tags (run_uuid, key, value)",
        ((run, *tag) for number, run in enumerate(made.ids) for tag in _tags(number, run, made, parent).items()),
    )
    chosen = (
        (run, f"model.p{place}", f"option{made.options[number, place]}")
        for number, run in enumerate(made.ids)
        for place in range(PARAMETERS - 1)
    )
    rates = ((run, "optimizer.adamw.learning_rate", repr(float(made.rates[n]))) for n, run in enumerate(made.ids))
    _insert(database, "params (run_uuid, key, value)", (*chosen, *rates))
    database.execute(
        "INSERT INTO datasets (dataset_uuid, experiment_id, name, digest, dataset_source_type, dataset_source)"
        " VALUES ('d', ?, 'text', 'abc', 'assay_task', '{}')",
        (int(experiment),),
    )
    _insert(
        database,
        "inputs (input_uuid, source_type, source_id, destination_type, destination_id)",
        ((f"i{run}", "DATASET", "d", "RUN", run) for run in made.ids),
    )


def _name(number: int) -> str:
    return f"{number:05d} softmax+rotary swiglu 2L"


def _tags(number: int, run: str, made: _Made, parent: str) -> dict[str, str]:
    return {
        Tag.KIND: "trial",
        Tag.SEARCH: NAME,
        Tag.KEY: f"{NAME}/0/search/{number}",
        Tag.NUMBER: str(number),
        Tag.GENERATION: "0",
        Tag.STAGE: str(Stage.SEARCH),
        Tag.BATCH: str(number // SIZE + 1),
        Tag.STATUS: str(Status.DIVERGED if made.bad[number] else Status.OK),
        Tag.SPACE: "61374822f4e7",
        Tag.SPEC: run[-12:],
        Tag.POINT: run[-12:],
        Tag.ARCH: run[-12:],
        Tag.FINGERPRINT: "ab" * 32,
        Tag.DETERMINISTIC: "true",
        Tag.ENVIRONMENT: "ece9dcf9747f",
        Tag.NOTE: NOTE.format(number),
        "mlflow.parentRunId": parent,
        "mlflow.runName": _name(number),
    }


def _write_metrics(database: sqlite3.Connection, made: _Made) -> None:
    points: list[tuple[str, str, float, int]] = []
    last = int(made.steps[-1])
    for number, run in enumerate(made.ids):
        values = (made.losses[number], 250_000.0 + number, 5e5 + number, float(last), 5e4 + number)
        held = [pair for pair in zip(FINAL, values, strict=True) if not (made.bad[number] and pair[0] == Metric.LOSS)]
        points += [(run, name, float(value), last) for name, value in held]
        for step, loss in zip(made.steps.tolist(), made.curves[number].tolist(), strict=True):
            points += [(run, Metric.VALIDATION_CURVE, loss, step), (run, Metric.TRAIN_CURVE, loss - 0.02, step)]
    columns = "(run_uuid, key, value, step, timestamp, is_nan)"
    _insert(database, f"metrics {columns}", ((*point, point[3], 0) for point in points))
    latest = ((*point, point[3], 0) for point in points if point[3] == last)
    _insert(database, f"latest_metrics {columns}", latest)


def _write_shards(place: Path, made: _Made) -> None:
    readings = len(made.steps)
    folder = place / Artifact.CURVES
    folder.mkdir(parents=True)
    for first in range(0, len(made.ids), SHARD_TRIALS):
        chosen = np.arange(first, min(first + SHARD_TRIALS, len(made.ids)))
        held = made.curves[chosen].ravel()
        table = {
            "run": np.repeat([made.ids[number] for number in chosen], readings),
            "number": np.repeat(chosen, readings),
            "stage": np.repeat(str(Stage.SEARCH), len(chosen) * readings),
            "tokens": np.tile(made.steps, len(chosen)),
            "loss": held,
            "train_loss": held - 0.02,
            "seconds": np.tile(made.steps / 5e4, len(chosen)),
        }
        parquet.write_table(arrow.table(table), folder / f"{first // SHARD_TRIALS:05d}.parquet")


def _insert(database: sqlite3.Connection, into: str, rows: Iterable[Sequence[object]]) -> None:
    marks = ", ".join("?" * (into.count(",") + 1))
    database.executemany(f"INSERT INTO {into} VALUES ({marks})", rows)
