"""Which candidates meet in a final, and with which seeds."""

from dataclasses import replace
from pathlib import Path

from studied import ok, opened

from runners.engine import Job
from runners.finals import Finals
from runners.ledger import Entry
from runners.progress import Progress
from runners.recorder import Recorder
from runners.showing import Shown
from runners.study import Study
from search_space.records import Reading, TrialResult

FINAL = "final={seeds: 2, contrasts: {positions: {model.position: none}, seed_alone: {}}}"


class Silent(Recorder):
    """Shows nothing anywhere."""

    def __init__(self) -> None:
        self._done: list[Shown] = []

    def begin(self, trial: object) -> None:
        pass

    def reading(self, trial: object, reading: Reading) -> None:
        pass

    def finish(self, trial: Shown, result: TrialResult) -> None:
        self._done.append(trial)

    def ended(self, stage: object) -> list[Shown]:
        found = [trial for trial in self._done if trial.stage == stage]
        self._done = [trial for trial in self._done if trial.stage != stage]
        return found


def finals(study: Study) -> Finals:
    return Finals(study, Silent(), Progress())


def searched(folder: Path, losses: dict[str, float]) -> Study:
    """A study in which the trials of each position scheme have the given loss, the first one the lowest."""
    study = opened(folder, FINAL, "search.sampler=random")
    for _ in range(10):
        proposed = study.propose()
        assert proposed is not None
        position = str(proposed.resolved.flat["model.position.kind"])
        study.tell(proposed.number, ok(losses[position] + proposed.number / 1000))
    return study


def drain(source: Finals, most: int = 100) -> list[Job]:
    jobs = []
    while len(jobs) < most and (job := source.next()) is not None:
        jobs.append(job)
        source.finish(job.key, ok(1.0))
    return jobs


def best(study: Study, position: str) -> Entry:
    return next(entry for entry in study.trials() if entry.point["model.position.kind"] == position)


def test_the_base_is_the_best_trial_that_the_change_really_changes(tmp_path: Path) -> None:
    with searched(tmp_path, {"none": 1.0, "rotary": 2.0}) as study:
        source = finals(study)
        jobs = drain(source)
        bases = {final.contrast: final.base for final in source.outcomes()}
        assert bases == {"positions": best(study, "rotary").number, "seed_alone": best(study, "none").number}
        assert len(jobs) == 8
        assert all(job.test for job in jobs)
        kinds = [job.spec.candidate["model"]["position"]["kind"] for job in jobs]
        assert kinds == ["rotary", "none"] * 2 + ["none"] * 4


def test_both_sides_share_seeds_and_data_and_the_control_shares_data_alone(tmp_path: Path) -> None:
    with searched(tmp_path, {"none": 2.0, "rotary": 1.0}) as study:
        seeds = [job.spec.seeds for job in drain(finals(study))]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    for base, changed in ((seeds[0], seeds[4]), (seeds[2], seeds[5])):
        assert base.data == changed.data
        assert base.init != changed.init
        assert base.dropout != changed.dropout
    assert len({seed.init for seed in seeds}) == 4


def test_a_base_that_two_contrasts_share_is_trained_once_and_counts_in_both(tmp_path: Path) -> None:
    with searched(tmp_path, {"none": 2.0, "rotary": 1.0}) as study:
        source = finals(study)
        jobs = drain(source)
        assert len(jobs) == len({job.spec.id for job in jobs}) == 6
        assert [final.done for final in source.outcomes()] == [4, 4]


def test_finals_go_on_where_they_stopped_and_keep_their_base(tmp_path: Path) -> None:
    with searched(tmp_path, {"none": 2.0, "rotary": 1.0}) as study:
        source = finals(study)
        first = drain(source, most=3)
        left = source.next()
        assert left is not None
        better = study.propose()
        assert better is not None
        study.tell(better.number, ok(0.1))
        again = drain(finals(study))
        assert again[0].spec == left.spec
        assert len(first) + len(again) == 8
        assert finals(study).outcomes()[0].base == best(study, "rotary").number
        assert drain(finals(study)) == []


def test_a_contrast_without_a_base_is_left_out_with_the_reason(tmp_path: Path) -> None:
    with opened(tmp_path, FINAL) as study:
        source = finals(study)
        assert drain(source) == []
        assert [final.skipped for final in source.outcomes()] == ["no trial is ok"] * 2


def test_more_seeds_under_the_same_name_train_the_missing_replicas_alone(tmp_path: Path) -> None:
    four, six = (f"final={{seeds: {seeds}, contrasts: {{positions: {{model.position: none}}}}}}" for seeds in (4, 6))
    with opened(tmp_path, four, "search.sampler=random") as study:
        for _ in range(10):
            proposed = study.propose()
            assert proposed is not None
            study.tell(proposed.number, ok(1.0 + (proposed.resolved.flat["model.position.kind"] == "none")))
        first = drain(finals(study))
    with opened(tmp_path, six, "search.sampler=random") as study:
        assert study.generation == 0
        source = finals(study)
        more = drain(source)
        assert [entry.marks["replica"] for entry in source._ledger.entries()] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        assert [(final.done, final.total) for final in source.outcomes()] == [(12, 12)]
    assert (len(first), len(more)) == (8, 4)
    assert not {job.spec.id for job in first} & {job.spec.id for job in more}


def test_a_final_whose_loss_is_missing_is_settled_as_broken(tmp_path: Path) -> None:
    with searched(tmp_path, {"none": 2.0, "rotary": 1.0}) as study:
        source = finals(study)
        job = source.next()
        assert job is not None
        source.finish(job.key, replace(ok(1.0), metrics={}))
        source.settle_shown()
    with opened(tmp_path, FINAL, "search.sampler=random") as study:
        assert finals(study)._ledger[job.key].settled
