"""The finals of the best candidates: who takes part, what is trained with which seeds, and how it goes on."""

import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
from studied import broken, ok, opened
from test_finals import Silent

from analysis.contest import JUDGE
from runners.contest import STAGES, ContestSource, bout_of, ledger_of
from runners.contestants import Baseline, line_up
from runners.engine import Job
from runners.progress import Progress
from runners.study import Study
from search_space.canon import digest
from search_space.contest import BASELINE, Bout
from search_space.errors import UserError
from search_space.experiment import ContestSpec, Experiment
from search_space.points import changed
from search_space.records import Stage, Status, TrialResult

RATE = "optimizer.adamw.learning_rate"
SPEC = ContestSpec(top=2, max_seeds=5, sweep=3)


def baseline(held: Experiment, **change: str) -> Baseline:
    point = {"model.mixer.kind": "softmax", "model.position.kind": "none", RATE: 3e-3, **change}
    return Baseline(point=changed(held.full, held.space, point, {}), source="a file")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study whose trials are the better the later they were proposed."""
    folder = tmp_path_factory.mktemp("searched")
    with opened(folder, "search.sampler=random") as study:
        propose(study, 12)
    return folder


def propose(study: Study, trials: int) -> None:
    for _ in range(trials):
        proposed = study.propose()
        assert proposed is not None
        study.tell(proposed.number, ok(2.0 - proposed.number / 100))


def searched(folder: Path, template: Path) -> Study:
    """The study in the folder, begun with the trials of the template."""
    if not (folder / "study.db").exists():
        shutil.copytree(template, folder, dirs_exist_ok=True)
    return opened(folder, "search.sampler=random")


def source_of(study: Study, spec: ContestSpec = SPEC) -> ContestSource:
    ledgers = {stage: ledger_of(study, stage) for stage in STAGES}
    lineup = line_up(study, ledgers[Stage.FINAL], spec, baseline(study.experiment), JUDGE)
    source = ContestSource(study, ledgers, lineup, JUDGE, Silent(), Progress())
    source.catch_up()
    return source


def trained(job: Job, stage: Stage, gap: float) -> TrialResult:
    """What a job comes to: the baseline loses by the gap, whatever its rate."""
    model = job.spec.candidate["model"]
    loses = model["position"]["kind"] == "none" and model["mixer"].get("softmax", {}).get("queries_per_kv") == 1
    loss = 1.0 + gap * loses + 0.01 * math.sin(job.spec.seeds.data + int(digest(model)[:6], 16))
    done = ok(loss)
    return (
        TrialResult(**{**vars(done), "metrics": {**done.metrics, "test/loss": loss}}) if stage is Stage.FINAL else done
    )


def drain(source: ContestSource, *, gap: float = 0.5, most: int = 1000) -> list[tuple[Stage, Job]]:
    jobs: list[tuple[Stage, Job]] = []
    while len(jobs) < most and (job := source.next()) is not None:
        stage = Stage.FINAL if job.test else Stage.SWEEP
        jobs.append((stage, job))
        source.finish(job.key, trained(job, stage, gap))
        source.settle_shown()
    return jobs


def bouts(study: Study) -> dict[Bout, str]:
    """The spec of each training, by what it is."""
    return {bout_of(entry): entry.spec.id for stage in STAGES for entry in ledger_of(study, stage).entries()}


def test_the_best_candidates_of_different_kinds_meet_the_baseline(tmp_path: Path, template: Path) -> None:
    with searched(tmp_path, template) as study:
        ledger = ledger_of(study, Stage.FINAL)
        lineup = line_up(study, ledger, ContestSpec(top=5, sweep=0), baseline(study.experiment), JUDGE)
        kinds = [
            {key: value for key, value in contestant.resolved.flat.items() if key != RATE}
            for contestant in lineup.contestants
        ]
        assert all(one != other for k, one in enumerate(kinds) for other in kinds[:k])
        assert lineup.contestants[BASELINE].source == "a file"
        numbers = [int(contestant.source.rpartition("/")[2]) for contestant in lineup.contestants[1:]]
        assert numbers == sorted(numbers, reverse=True)
        assert len(numbers) == 5


def test_with_sweeps_twice_as_many_are_tried_once_more_and_the_best_of_both_tries_enter(
    tmp_path: Path, template: Path
) -> None:
    with searched(tmp_path, template) as study:
        source = source_of(study)
        contest = source._lineup.contest
        assert [round(2 - loss, 2) for loss in contest.searched] == [0.11, 0.09, 0.08, 0.07]
        worst_first = iter((1.5, 1.4, 1.3, 1.2))
        while (job := source.next()) is not None:
            own = job.key // len(STAGES) < len(contest.candidates) and not job.test
            loss = next(worst_first) if own else 1.0 + 0.01 * math.sin(job.key)
            metrics = {**ok(loss).metrics, "test/loss": loss}
            source.finish(job.key, TrialResult(**{**vars(ok(loss)), "metrics": metrics}))
        met = {bout.contestant for bout in bouts(study) if bout.stage is Stage.FINAL}
        assert met == {BASELINE, 3, 4}
        assert contest.share == SPEC.alpha / 2


def test_all_contestants_share_the_seeds_of_a_replica_and_nothing_else_does(tmp_path: Path, template: Path) -> None:
    with searched(tmp_path, template) as study:
        drain(source_of(study))
        by_stage: dict[tuple[Stage, int], set[object]] = {}
        for stage in STAGES:
            for entry in ledger_of(study, stage).entries():
                bout = bout_of(entry)
                key = (stage, bout.place if stage is Stage.FINAL else 0)
                by_stage.setdefault(key, set()).add(entry.spec.seeds)
        assert all(len(seeds) == 1 for seeds in by_stage.values())
        alike = [seeds.pop() for seeds in by_stage.values()]
        alike.append(study.trials()[0].spec.seeds)
        for stream in ("init", "data", "dropout"):
            assert len({getattr(seeds, stream) for seeds in alike}) == len(alike)


def test_finals_are_trained_at_the_best_rate_of_their_sweep_and_say_when_that_is_at_its_end(
    tmp_path: Path, template: Path
) -> None:
    with searched(tmp_path, template) as study:
        source = source_of(study)
        while (job := source.next()) is not None and not job.test:
            rate = job.spec.candidate["optimizer"]["adamw"]["learning_rate"]
            source.finish(job.key, ok(1.0 + abs(math.log2(rate / 6e-3))))
        sweeps = ledger_of(study, Stage.SWEEP).entries()
        assert {bout_of(entry).place for entry in sweeps if bout_of(entry).contestant == BASELINE} == {-1, 0, 1, 2}
        (first,) = ledger_of(study, Stage.FINAL).entries()
        assert bout_of(first) == Bout(Stage.FINAL, BASELINE, 0)
        assert first.point[RATE] == first.spec.candidate["optimizer"]["adamw"]["learning_rate"] == 6e-3
        assert "untuned" not in first.marks


def test_a_contest_goes_on_where_it_was_cut_off_to_the_same_trainings(tmp_path: Path, template: Path) -> None:
    with searched(tmp_path / "whole", template) as study:
        drain(source_of(study))
        whole = bouts(study)
    for cut in (4, 11):
        with searched(tmp_path / "cut", template) as study:
            source = source_of(study)
            drain(source, most=cut)
            left = source.next()
            assert left is not None
    with searched(tmp_path / "cut", template) as study:
        again = source_of(study)
        jobs = drain(again)
        assert jobs[0][1].spec == left.spec
        assert bouts(study) == whole
        assert again.is_over()
        assert drain(source_of(study)) == []


def test_a_decided_finalist_gets_no_more_seeds(tmp_path: Path, template: Path) -> None:
    with searched(tmp_path, template) as study:
        jobs = drain(source_of(study))
        counts = Counter(bout.contestant for bout in bouts(study) if bout.stage is Stage.FINAL)
        assert len(counts) == 1 + SPEC.top
        assert 2 < counts[BASELINE] < SPEC.max_seeds
        assert len(set(counts.values())) == 1
        assert len(jobs) == len(bouts(study))


def test_more_seeds_are_welcome_and_other_terms_are_refused(tmp_path: Path, template: Path) -> None:
    with searched(tmp_path, template) as study:
        drain(source_of(study), gap=0.0)
        more = drain(source_of(study, ContestSpec(top=2, max_seeds=6, sweep=3)), gap=0.0)
        assert len(more) == 3
        for other in (ContestSpec(top=3, max_seeds=5, sweep=3), ContestSpec(top=2, max_seeds=5, sweep=3, delta=0.1)):
            with pytest.raises(UserError, match="begun on other terms"):
                source_of(study, other)
        ledger = ledger_of(study, Stage.FINAL)
        with pytest.raises(UserError, match="the baseline was a file, now a file"):
            line_up(study, ledger, SPEC, baseline(study.experiment, **{"model.position.kind": "rotary"}), JUDGE)


def test_better_trials_that_come_later_change_nobody(tmp_path: Path, template: Path) -> None:
    with searched(tmp_path, template) as study:
        before = [entrant.source for entrant in source_of(study)._lineup.contestants]
    with searched(tmp_path, template) as study:
        propose(study, 2)
        assert [entrant.source for entrant in source_of(study)._lineup.contestants] == before


def test_a_training_that_ends_badly_is_no_pair_and_is_not_run_again(tmp_path: Path, template: Path) -> None:
    with searched(tmp_path, template) as study:
        source = source_of(study)
        while (job := source.next()) is not None:
            source.finish(job.key, broken(Status.DIVERGED))
        assert source.is_over()
        assert {bout.stage for bout in bouts(study)} == {Stage.SWEEP}


def test_without_a_candidate_that_differs_there_is_nobody_to_meet(tmp_path: Path) -> None:
    with opened(tmp_path) as study, pytest.raises(UserError, match="none of its 0 finished trials differs"):
        source_of(study)
