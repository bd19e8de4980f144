"""What follows an attempt: on from a checkpoint, half the micro-batch, another try, or the end with its reason."""

import dataclasses
from pathlib import Path

import pytest
from studied import broken, experiment, ok, opened, uri

from runners.attempts import MOST_WITHOUT_PROGRESS, Attempt, Attempts, attempts_of, halved, micro_batch, verdict
from runners.deaths import OutOfMemoryKills, kills_so_far
from runners.ledger import Entry
from runners.study import Study
from search_space.records import Metric, Stage, Status, Tag, TrialResult, TrialSpec
from search_space.settings import EngineSpec

PREEMPTED, OOM, FAILED = Status.PREEMPTED, Status.OUT_OF_MEMORY, Status.FAILED


def attempt(status: Status, *, began: int = 0, kept: int = 0, asked: bool = False) -> Attempt:
    return Attempt(
        status=status,
        reason="made up",
        began=began,
        reached=kept,
        kept=kept,
        micro_batch_tokens=128,
        seconds=0.1,
        asked=asked,
    )


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TrialSpec:
    with opened(tmp_path_factory.mktemp("study")) as study:
        proposed = study.propose()
        assert proposed is not None
        return proposed.spec


@pytest.mark.parametrize("status", [Status.OK, Status.PRUNED, Status.DIVERGED, Status.TIMED_OUT, Status.INFEASIBLE])
def test_ends_that_are_the_trials_own_are_final(spec: TrialSpec, status: Status) -> None:
    assert verdict(spec, [], attempt(status), retries=3) is status


def test_failures_are_tried_again_as_often_as_asked(spec: TrialSpec) -> None:
    once, twice = [attempt(FAILED)], [attempt(FAILED)] * 2
    assert verdict(spec, [], attempt(FAILED), retries=0) is FAILED
    assert verdict(spec, once, attempt(FAILED), retries=2) is None
    assert verdict(spec, twice, attempt(FAILED), retries=2) is FAILED
    assert verdict(spec, [attempt(PREEMPTED)] * 2, attempt(FAILED), retries=1) is None


def test_a_trial_that_is_taken_away_again_and_again_fails_unless_it_gets_on(spec: TrialSpec) -> None:
    stuck = [attempt(PREEMPTED)] * (MOST_WITHOUT_PROGRESS - 1)
    assert verdict(spec, stuck[1:], attempt(PREEMPTED), retries=0) is None
    assert verdict(spec, stuck, attempt(PREEMPTED), retries=0) is FAILED
    assert verdict(spec, stuck, attempt(PREEMPTED, kept=256), retries=0) is None
    moving = [attempt(PREEMPTED, began=128 * n, kept=128 * (n + 1)) for n in range(20)]
    assert verdict(spec, moving, attempt(PREEMPTED, began=2560, kept=2560), retries=0) is None


def test_memory_is_tried_once_with_half_the_micro_batch(spec: TrialSpec) -> None:
    assert halved(spec) == 64
    assert micro_batch(spec, []) == 128
    assert verdict(spec, [], attempt(OOM), retries=0) is None
    assert micro_batch(spec, [attempt(OOM), attempt(PREEMPTED)]) == 64
    assert verdict(spec, [attempt(OOM)], attempt(OOM), retries=5) is OOM


@pytest.mark.parametrize(("rows", "batch", "expected"), [(1, 4, 0), (2, 4, 1), (3, 3, 1), (6, 12, 3), (5, 10, 2)])
def test_half_a_micro_batch_fits_whole_into_the_batch(spec: TrialSpec, rows: int, batch: int, expected: int) -> None:
    budget = dataclasses.replace(spec.budget, micro_batch_tokens=32 * rows, batch_tokens=32 * batch)
    assert halved(dataclasses.replace(spec, budget=budget)) == 32 * expected


def test_whoever_asks_for_another_try_gets_all_of_them_anew(spec: TrialSpec) -> None:
    ended = [attempt(OOM), attempt(OOM, asked=True)]
    assert micro_batch(spec, ended) == 128
    assert verdict(spec, ended, attempt(OOM), retries=0) is None
    assert verdict(spec, [attempt(FAILED, asked=True)], attempt(FAILED), retries=1) is None


def made(study: Study, folder: Path, **engine: int) -> tuple[Attempts, Entry]:
    """The attempts of a search and its first trial."""
    proposed = study.propose()
    assert proposed is not None
    return Attempts(folder, Stage.SEARCH, EngineSpec(**engine), study.attempted), study.trials()[0]


def test_attempts_survive_the_driver_and_decide_what_comes_next(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        attempts, entry = made(study, tmp_path / "kept", retries=1)
        for result in (broken(OOM), broken(FAILED)):
            attempts.start(study.trials()[0], weights=None, test=False)
            assert attempts.end(study.trials()[0], result) is None
    with opened(tmp_path) as study:
        entry = study.trials()[0]
        assert [each.status for each in attempts_of(entry)] == [OOM, FAILED]
        attempts = Attempts(tmp_path / "kept", Stage.SEARCH, EngineSpec(retries=1), study.attempted)
        start = attempts.start(entry, weights=None, test=False)
        assert start.job.micro_batch_tokens == 64
        ended = attempts.end(entry, broken(OOM))
        assert ended is not None
        assert (ended.status, ended.reason) == (OOM, "made up (with micro-batches of 64 tokens)")
        assert ended.metrics[Metric.MICRO_BATCH_TOKENS] == 64


def test_a_trial_that_makes_no_progress_fails_with_the_reason(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        attempts, _ = made(study, tmp_path / "kept")
        ended: TrialResult | None = None
        for number in range(MOST_WITHOUT_PROGRESS):
            assert ended is None
            attempts.start(study.trials()[0], weights=None, test=False)
            ended = attempts.end(study.trials()[0], dataclasses.replace(broken(PREEMPTED), reason=f"kill {number}"))
        assert ended is not None
        assert ended.status is FAILED
        assert ended.reason == "taken away 5 times in a row without getting to a checkpoint; the last time: kill 4"


def test_checkpoints_of_ended_trials_go_at_once_and_those_left_by_a_kill_later(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        attempts, entry = made(study, tmp_path / "kept")
        folder = attempts.folder_of(entry)
        folder.mkdir(parents=True)
        attempts.tidy(study.trials())
        assert folder.exists()
        attempts.start(entry, weights=None, test=False)
        attempts.end(entry, ok(1.0))
        assert not folder.exists()
        folder.mkdir()
        study.tell(0, ok(1.0))
        attempts.tidy(study.trials())
        assert not folder.exists()


def group(root: Path, kind: str, kills: int) -> Path:
    """A made-up kernel whose control group, or machine, counts so many kills."""
    lines, file = {
        "v2": ("0::/here\n", "sys/fs/cgroup/here/memory.events"),
        "v1": ("4:cpu:/x\n3:memory:/here\n", "sys/fs/cgroup/memory/here/memory.oom_control"),
        "none": ("0::/nowhere\n", "proc/vmstat"),
    }[kind]
    for path, text in (("proc/self/cgroup", lines), (file, f"oom 7\noom_kill {kills}\n")):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize("kind", ["v2", "v1", "none"])
def test_kills_are_read_from_the_nearest_counter(kind: str, tmp_path: Path) -> None:
    assert kills_so_far(group(tmp_path, kind, 3)) == 3


def test_each_kill_for_memory_explains_one_death() -> None:
    count = [4]
    kills = OutOfMemoryKills(lambda: count[0])
    assert not kills.struck()
    kills.note()
    count[0] = 6
    kills.note()
    assert [kills.struck() for _ in range(3)] == [True, True, False]


def test_the_tag_names_every_earlier_attempt() -> None:
    line = dataclasses.replace(attempt(FAILED, began=256, kept=256), peak_bytes=2048.0, reason="exit code 7").line
    assert line == "failed from 256 at 256 tokens, micro-batch 128, peak memory 2,048 bytes: exit code 7"
    assert Tag.ATTEMPTS == "assay.attempts"


def test_the_study_of_an_experiment_with_retries_is_the_same(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with Study.open(uri(tmp_path), experiment("engine.retries=3", "engine.disk_bytes=1048576")) as study:
        assert study.generation == 0
