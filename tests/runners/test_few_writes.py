"""What a search writes to its study for each trial: little, in order, and nothing of what is another driver's."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from servers import postgres
from sqlalchemy import event
from studied import SHAPE, curve, experiment, ok, opened

from runners.study import Study
from search_space.places import driver_uri

PRUNED = "search.pruner={asha: {grace_tokens: 256, factor: 2}}"
WANTED = 2
"""Readings of four at which that pruner decides."""


def run_trial(study: Study) -> None:
    """One trial from its proposal to its close, with four readings."""
    proposed = study.propose()
    assert proposed is not None
    readings = curve(1.0)
    for end, reading in enumerate(readings, start=1):
        study.report(proposed.number, reading, readings[:end])
    study.tell(proposed.number, ok(1.0))


def test_a_trial_began_at_the_same_moment_in_every_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        with opened(tmp_path) as study:
            study.propose()
            began = study.trials()[0].started
        with opened(tmp_path) as study:
            assert study.trials()[0].started == began
    time.tzset()
    with opened(tmp_path) as study:
        assert study.trials()[0].started == began
        assert abs(began - time.time()) < 600


def test_nothing_is_written_of_a_trial_that_another_driver_claimed(tmp_path: Path) -> None:
    with opened(tmp_path, PRUNED) as study:
        for _ in range(3):
            study.propose()
        ledger, other = study._ledger, "elsewhere:1:1"
        study.record(1, ok(1.0))
        study.record(2, ok(2.0))
        for lost in (0, 1):
            study.storage.set_trial_user_attr(ledger._ids[lost], "assay.owner", other)
        assert not study.report(0, curve(1.0)[0], curve(1.0)[:1])
        assert not study.record(0, ok(1.0))
        study.settle(1, 2)
        assert [entry.settled for entry in study.trials()] == [False, False, True]
    with opened(tmp_path, PRUNED) as study:
        (lost, unsettled, settled) = study.trials()
        assert (lost.readings, lost.result, lost.owner) == ({}, None, other)
        assert (unsettled.result, unsettled.settled) == (ok(1.0), False)
        assert (settled.result, settled.settled) == (ok(2.0), True)


def test_what_has_ended_is_not_written_again(tmp_path: Path) -> None:
    with opened(tmp_path, PRUNED) as study:
        run_trial(study)
        before = study.trials()[0]
        assert not study.record(0, ok(9.0))
        assert not study._ledger.read(0, 256, 9.0)
    with opened(tmp_path, PRUNED) as study:
        assert study.trials()[0] == before


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.slow])])
def study(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Study]:
    """A study with one trial behind it."""
    if request.param == "sqlite":
        with opened(tmp_path, PRUNED) as study:
            run_trial(study)
            yield study
        return
    with postgres() as server, Study.open(server, experiment(PRUNED)) as study:
        study.bind(SHAPE, "made up")
        run_trial(study)
        yield study


def test_a_trial_takes_few_statements_and_transactions_however_many_went_before(study: Study) -> None:
    counts: Counter[str] = Counter()
    event.listen(study.storage.engine, "before_cursor_execute", lambda *_: counts.update(["statements"]))
    event.listen(study.storage.engine, "commit", lambda *_: counts.update(["commits"]))
    seen = []
    for _ in range(12):
        counts.clear()
        run_trial(study)
        seen.append((counts["statements"] <= 20, counts["commits"] <= 9))
    assert seen == [(True, True)] * 12, counts


def test_only_the_end_of_a_trial_waits_for_the_disk_of_sqlite(tmp_path: Path) -> None:
    waits: dict[str, set[int]] = {}

    def look(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        words = statement.split()
        if words[0] in ("INSERT", "UPDATE"):
            (level,) = connection.connection.execute("PRAGMA synchronous").fetchone()
            waits.setdefault(words[2] if words[0] == "INSERT" else words[1], set()).add(level)

    with opened(tmp_path, PRUNED) as study:
        event.listen(study.storage.engine, "before_cursor_execute", look)
        proposed = study.propose()
        assert proposed is not None
        study.report(proposed.number, curve(1.0)[0], curve(1.0)[:1])
        beginning, waits = waits, {}
        study.record(proposed.number, ok(1.0))
        end, waits = waits, {}
        study.settle(proposed.number)
    normal, full = {1}, {2}
    tables = ("trials", "trial_params", "trial_user_attributes", "trial_intermediate_values")
    assert beginning == dict.fromkeys(tables, normal)
    assert end == {"trial_user_attributes": full}
    assert waits.pop("study_user_attributes") == normal
    assert waits == {"trials": normal, "trial_values": normal}


@pytest.mark.postgres
@pytest.mark.slow
def test_beginning_and_end_of_a_trial_wait_for_the_disk_of_postgres() -> None:
    with postgres() as server:
        watch = sqlalchemy.create_engine(driver_uri(server), isolation_level="AUTOCOMMIT").connect()
        for command in ("ALTER SYSTEM SET wal_writer_delay = '10s'", "SELECT pg_reload_conf()"):
            watch.execute(sqlalchemy.text(command))

        def waited(act: Callable[[], object]) -> bool:
            """True when all that the server has logged is on the disk."""
            act()
            left = "SELECT pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()"
            return not watch.execute(sqlalchemy.text(left)).scalar()

        with Study.open(server, experiment(PRUNED)) as study:
            study.bind(SHAPE, "made up")
            # The server may log something, or write its log, of itself: once, but not time after time.
            found: dict[str, list[bool]] = {name: [] for name in ("begin", "read", "end", "close")}
            for number in range(5):
                found["begin"].append(waited(study.propose))
                found["read"].append(waited(lambda n=number: study.report(n, curve(1.0)[0], curve(1.0)[:1])))
                found["end"].append(waited(lambda n=number: study.record(n, ok(1.0))))
                found["close"].append(waited(lambda n=number: study.settle(n)))
        watch.engine.dispose()
    assert min(sum(found[name]) for name in ("begin", "end")) >= 4, found
    assert max(sum(found[name]) for name in ("read", "close")) <= 4, found
