"""Many trials under a small disk quota: the search ends, the disk holds what it may, the best models stay loadable."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from studied import SHAPE, curve, experiment, ok, opened, uri
from tracked import searched, store_uri

from runners.checkpoints import size_bytes, write
from runners.progress import Progress
from runners.quota import Quota
from runners.recorder import Recorder
from runners.search import SearchSource
from runners.store import Store
from runners.study import Study
from runners.tracking import Tracker
from search_space.places import locate
from search_space.records import Artifact, Metric, Reading, Status, Tag, TrialResult

QUOTA = 2**20
MODEL, STATE = 60_000, 40_000
"""Bytes of a made-up model, and of a made-up checkpoint."""


def loss_of(number: int) -> float:
    """Losses without order; the best trial is none of the last."""
    return 1.0 + (number * 37 % 101) / 101 - (number == 77)


def train(source: SearchSource, job_key: int, folder: Path, weights: Path, checkpoint: Path) -> TrialResult:
    """A made-up trial that leaves a checkpoint on its way and a model at its end, and heeds the pruner."""
    for reading in curve(loss_of(job_key)):
        seen = Reading(
            tokens=reading.tokens, loss=reading.loss + loss_of(job_key), train_loss=1.0, seconds=reading.seconds
        )
        if not source.report(job_key, seen):
            return TrialResult(status=Status.PRUNED, reason="made up", curve=(seen,), tokens=seen.tokens)
        source.follow(job_key, seen)
        write(checkpoint, str(seen.tokens), {"state": torch.zeros(STATE, dtype=torch.uint8)}, {"tokens": seen.tokens})
    save_file({"number": torch.full((MODEL // 4,), float(job_key))}, str(weights))
    return ok(loss_of(job_key))


@pytest.mark.slow
def test_two_hundred_pruned_trials_under_a_quota_finish_and_the_best_stays_loadable(tmp_path: Path) -> None:
    overrides = (
        "search.trials=200",
        "search.sampler=random",
        "search.pruner={asha: {grace_tokens: 256, factor: 2}}",
        f"engine.disk_bytes={QUOTA}",
    )
    place = store_uri(tmp_path)
    tracker, made = Tracker(place), searched("small")
    said: list[str] = []
    with Study.open(uri(tmp_path), experiment(*overrides)) as study:
        study.bind(SHAPE, "made up")
        asked = study.experiment
        recorder = Recorder(
            tracker, lambda: tracker.start_search(asked, asked.space.id, made.data, made.environment), said.append
        )
        recorder.open(needed=True)
        source = SearchSource(study, recorder, tmp_path / "small", Progress())
        while (job := source.next()) is not None:
            assert job.weights is not None
            assert job.checkpoint is not None
            source.finish(job.key, train(source, job.key, tmp_path, job.weights, job.checkpoint))
            # A model that is just being stored lies in both places.
            assert max(size_bytes(tmp_path / "small"), models(tmp_path)) <= QUOTA
        recorder.close(lambda: tracker.finish_search("FINISHED", source.metrics()))
        assert size_bytes(tmp_path / "small") + models(tmp_path) <= QUOTA
        statuses = [entry.result.status for entry in study.trials() if entry.result is not None]
    assert said == []
    assert len(statuses) == 200
    assert set(statuses) == {Status.OK, Status.PRUNED}
    store = Store(locate(place))
    finished = [run for run in store.children(store.parent("small")) if run.data.tags[Tag.STATUS] == Status.OK]
    finished.sort(key=lambda run: run.data.metrics[Metric.LOSS])
    kept = [store.artifact(run, Artifact.MODEL, required=False) for run in finished]
    assert kept[0] is not None
    assert load_file(kept[0])["number"][0] == int(finished[0].data.tags[Tag.NUMBER]) == 77
    held = sum(model is not None for model in kept)
    assert 2 < held < len(finished)
    assert all(model is not None for model in kept[:held]), "a better model went before a worse one"
    assert all("engine.disk_bytes" in run.data.tags[Tag.WEIGHTS] for run in finished[held:])


def models(folder: Path) -> int:
    """Bytes of all models in the store."""
    return sum(file.stat().st_size for file in folder.rglob(Artifact.MODEL))


def test_models_of_earlier_sessions_count_and_the_best_stays_alone(tmp_path: Path) -> None:
    weights = tmp_path / "w"
    with opened(tmp_path, f"engine.disk_bytes={QUOTA}") as study:
        for number in range(2):
            assert study.propose() is not None
            study.tell(number, ok(1.0 + number))
        assert study.propose() is not None
        study.record(2, ok(0.5))
        weights.write_bytes(bytes(2 * QUOTA))
        quota = Quota(study, tmp_path / "none")
        assert [entry.number for entry in quota.admit(study.trials()[2], weights)] == [1, 0]
        assert weights.exists()
        study.settle(2)
    with opened(tmp_path, f"engine.disk_bytes={QUOTA}") as study:
        assert study.propose() is not None
        study.record(3, ok(0.7))
        gone = Quota(study, tmp_path / "none").admit(study.trials()[3], weights)
        assert [entry.number for entry in gone] == [3]
