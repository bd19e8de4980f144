"""A trial is stored whole or not at all, wherever in it the process is killed."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path

import pytest
from sql_deaths import COMMIT
from studied import uri
from test_many_workers import database, sqlite

HERE = Path(__file__).parent
INSERT = "INSERT INTO "
STORED = {"before": [0], "within": [0, 1], "after": [1]}
"""How many trials a process may store that dies so at their commit."""


@pytest.mark.fault
@pytest.mark.parametrize("place", [sqlite, pytest.param(database, marks=pytest.mark.postgres)])
def test_a_kill_at_any_moment_of_storing_leaves_the_whole_trial_or_none_of_it(
    tmp_path: Path, place: Callable[[Path], AbstractContextManager[str]]
) -> None:
    (other := tmp_path / "other").mkdir()
    with place(tmp_path) as study_uri:
        words = [sys.executable, str(HERE / "storing_deaths.py"), study_uri, uri(other)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    deaths, undisturbed = found["deaths"], found["undisturbed"]
    moments = [death["moment"] for death in deaths]
    assert {death["code"] for death in deaths} == {-signal.SIGKILL}, deaths

    # Where a stored trial has rows, they were written by statements at which the process was killed.
    tables = {table for table, rows in found["whole"].items() if rows}
    inserted = {moment["what"] for moment in moments if moment["what"].startswith(INSERT)}
    assert {what.removeprefix(INSERT) for what in inserted} == tables
    died = {(moment["what"], moment["when"]) for moment in moments}
    assert died >= set(product([*inserted, COMMIT], ["before", "within", "after"]))

    last = max(moment["step"] for moment in moments if moment["what"] in inserted)
    commit = min(moment["step"] for moment in moments if moment["what"] == COMMIT and moment["step"] > last)
    had = 1
    for death in deaths:
        rows, step = death["rows"], death["moment"]["step"]
        has = len(rows["trials"])
        assert has - had in (STORED[death["moment"]["when"]] if step == commit else [step > commit]), death
        for table in tables:
            assert set(rows[table]) == {str(number) for number in range(has)}, death
            if has > had:
                assert rows[table][str(had)] == undisturbed["rows"][table][str(had)], death
        had = has
    assert found["points"] == undisturbed["points"][: len(found["points"])]
    assert len(found["points"]) == had
