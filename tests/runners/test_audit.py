"""An audit proves that each proposal followed from what had been told, and finds the one that did not."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from studied import broken, experiment, made_up, ok, opened, uri

from runners.audit import audit
from runners.cli import main
from runners.environment import capture
from runners.history import from_ranges
from runners.reopening import Wanted, reopen
from runners.study import Study
from runners.sync import keep_for_sync
from runners.tasks import task_from_plain
from search_space.records import Stage

TRIALS = 26


def filled(folder: Path, *overrides: str) -> None:
    """A study with two trials always running, and every seventh broken."""
    with opened(folder, *overrides) as study:
        running = [study.propose(), study.propose()]
        while len(study.trials()) < TRIALS:
            first = running.pop(0)
            assert first is not None
            study.tell(first.number, broken() if first.number % 7 == 3 else made_up(first))
            running.append(study.propose())


@pytest.mark.parametrize("sampler", ["tpe", "random", "evolution"])
def test_every_proposal_follows_from_its_record(tmp_path: Path, sampler: str) -> None:
    filled(tmp_path, f"search.sampler={sampler}", "search.population=6")
    with opened(tmp_path, f"search.sampler={sampler}", "search.population=6") as study:
        found = list(audit(study))
    assert [each.number for each in found] == list(range(TRIALS))
    assert [each for each in found if each.why or not each.holds or not each.drawn] == []


def spoil(folder: Path, number: int, key: str, value: object) -> None:
    """Change what the study says of a trial's birth."""
    with closing(sqlite3.connect(folder / "study.db")) as connection, connection:
        where = "key = 'assay.trial' AND trial_id = (SELECT trial_id FROM trials WHERE number = ?)"
        (text,) = connection.execute(
            f"SELECT value_json FROM trial_user_attributes WHERE {where}", (number,)
        ).fetchone()
        birth = json.loads(text)
        if key in birth["point"]:
            birth["point"][key] = value
        else:
            birth["marks"]["history"][key] = value
        connection.execute(
            f"UPDATE trial_user_attributes SET value_json = ? WHERE {where}", (json.dumps(birth), number)
        )


def test_a_point_and_a_history_that_were_changed_are_found(tmp_path: Path) -> None:
    filled(tmp_path)
    spoil(tmp_path, 5, "optimizer.adamw.learning_rate", 0.0042)
    spoil(tmp_path, 20, "finished", "0-20")
    with opened(tmp_path) as study:
        found = {each.number: each for each in audit(study)}
    assert not found[5].holds
    assert "optimizer.adamw.learning_rate: stored 0.0042" in found[5].why
    assert not found[20].holds
    assert "trial 20, which came later" in found[20].why
    assert found[4].holds


BRED = ("search.sampler=evolution", "search.population=4")


def test_trials_that_saw_an_end_before_its_trial_was_run_again_are_audited_or_counted_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "studies"
    folder.mkdir()
    with opened(folder, *BRED) as study:
        for number in range(12):
            assert study.propose() is not None
            study.tell(number, broken() if number == 3 else ok(2.0 - number / 100))
        reopen(study, [Wanted(stage=Stage.SEARCH, number=3)])
    with opened(folder, *BRED) as study:
        study.tell(3, ok(0.5))
        for number in range(12, 16):
            assert study.propose() is not None
            study.tell(number, ok(1.0))
        keep_for_sync(study, tmp_path, capture())
        saw = sum(3 in from_ranges(entry.marks["history"]["finished"]) for entry in study.trials())
        found = list(audit(study))
    assert [each for each in found if each.why or not each.holds] == []
    forget_when_it_was_asked_for(folder)
    assert main(["audit", "small", "--study", uri(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(each["holds"] is None for each in told) == saw > 4
    assert main(["audit", "small", "--study", uri(folder)]) == 0
    said = capsys.readouterr().out
    assert f"small: {16 - saw} of 16 drawn trials follow" in said
    assert f"{saw} could not be audited" in said
    assert "not audited: trial 3 was run again" in said


def forget_when_it_was_asked_for(folder: Path) -> None:
    """Make the study one in which it was not noted when another try was asked for."""
    with closing(sqlite3.connect(folder / "study.db")) as connection, connection:
        where = "key = 'assay.attempts'"
        (text,) = connection.execute(f"SELECT value_json FROM trial_user_attributes WHERE {where}").fetchone()
        kept = [{key: value for key, value in each.items() if key != "proposed"} for each in json.loads(text)]
        connection.execute(f"UPDATE trial_user_attributes SET value_json = ? WHERE {where}", (json.dumps(kept),))


def test_the_command_says_how_many_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "studies").mkdir()
    whole = f"sqlite:///{tmp_path}/studies/small.db"
    with Study.open(whole, experiment("search.sampler=random")) as study:
        study.bind(task_from_plain(study.experiment.task).shape(), "made up")
        keep_for_sync(study, tmp_path, capture())
        for _ in range(3):
            proposed = study.propose()
            assert proposed is not None
            study.tell(proposed.number, made_up(proposed))
    assert main(["audit", "small", "--study", whole]) == 0
    assert "3 of 3 drawn trials follow from what had been told" in capsys.readouterr().out
    assert main(["audit", "other", "--study", whole]) == 2
    assert main(["audit", "small", "--study", uri(tmp_path / "nowhere")]) == 2
    assert not (tmp_path / "nowhere").exists()
