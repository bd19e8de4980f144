"""Several drivers run one study: no trial is lost or doubled, whoever of them dies."""

import io
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from drivers import Driver
from gated_trials import ALL, allow
from made_up import environment
from processes import wait_for
from studied import SHAPE, curve, experiment, ok, opened, uri
from test_kill import stored
from tracked import store_uri

from runners import crew
from runners.crew import Crew, FileTurns
from runners.driver import _start
from runners.history import Fate
from runners.owners import is_driven
from runners.progress import Progress
from runners.quota import Quota
from runners.recorder import Recorder
from runners.search import SearchSource
from runners.store import Store
from runners.study import Study, study_folder
from runners.tracking import Tracker
from search_space.canon import canonical_json
from search_space.places import locate
from search_space.records import Tag

HERE = Path(__file__).parent
TRIALS = 24
ASKED = (f"search.trials={TRIALS}", "search.sampler=random", "budget.max_seconds=3600")

HOLDS_THE_TURN = """
import sys, time
from pathlib import Path
from runners.crew import FileTurns
with FileTurns(Path(sys.argv[1])).hold():
    print("held", flush=True)
    time.sleep(0.5)
    Path(sys.argv[1] + ".ended").touch()
"""


def test_a_turn_is_had_by_one_process_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "turn.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_TURN, str(lock)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with FileTurns(lock).hold():
            assert (tmp_path / "turn.lock.ended").exists()


def test_a_driver_elsewhere_lives_as_long_as_its_beats_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(crew.time, "monotonic", lambda: now)
    with opened(tmp_path) as study:
        other = "elsewhere:12:34"
        study.note(f"assay.driver/{other}", 1.0)
        assert study.crew.others() == {other}
        now += crew.SILENT_SECONDS - 1
        assert study.crew.others() == {other}
        study.note(f"assay.driver/{other}", 2.0)
        now += 2
        assert study.crew.others() == {other}
        now += crew.SILENT_SECONDS
        assert study.crew.others() == set()


def test_a_driver_of_this_machine_that_is_gone_is_known_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        here = study.crew.me.partition(":")[0]
        study.note(f"assay.driver/{here}:{2**22 - 1}:1", 1.0)
        study.note(f"assay.driver/{here}:1:", 1.0)
        assert study.crew.others() == {f"{here}:1:"}


def test_drivers_of_a_study_that_cannot_be_read_any_more_are_not_taken_for_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        here, elsewhere = study.crew.me.partition(":")[0], "elsewhere:12:34"
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            ours = f"{here}:{other.pid}:{_start(other.pid)}"
            for driver in (ours, elsewhere):
                study.note(f"assay.driver/{driver}", 1.0)
            assert study.crew.others_as_last_known() == sorted([ours, elsewhere])
            study.storage.engine.dispose()
            (tmp_path / "study.db").write_bytes(b"no database any more" * 1000)
            (tmp_path / "study.db-wal").unlink(missing_ok=True)
            assert study.crew.others_as_last_known() == sorted([ours, elsewhere])
            other.kill()
            os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # It is a zombie now.
            assert study.crew.others_as_last_known() == [elsewhere]
        assert study.crew.others_as_last_known() == [elsewhere], "what can be known without the study counts"


def test_a_beat_learns_of_the_drivers_that_came_since_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(crew.time, "monotonic", lambda: now)
    with opened(tmp_path) as study:
        study.note("assay.driver/elsewhere:12:34", 1.0)
        now += crew.BEAT_SECONDS
        study.crew.beat()
        study.storage.engine.dispose()
        (tmp_path / "study.db").write_bytes(b"no database any more" * 1000)
        (tmp_path / "study.db-wal").unlink(missing_ok=True)
        assert study.crew.others_as_last_known() == ["elsewhere:12:34"]


def test_trials_of_a_driver_that_left_are_adopted_and_no_others(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        first, second = study.propose(), study.propose()
        assert first is not None
        assert second is not None
        here = study.crew.me.partition(":")[0]
        study._ledger.claim(first.number, f"{here}:1:")
        study.note(f"assay.driver/{here}:1:", 1.0)
        study._ledger.claim(second.number, f"{here}:{2**22 - 1}:1")
        assert study.elsewhere() == 2
        assert [entry.number for entry in study.adopt()] == [second.number]
        assert [proposed.number for proposed in study.running()] == [second.number]
        assert study.elsewhere() == 1


def test_a_study_that_a_driver_joined_counts_as_driven(tmp_path: Path) -> None:
    folder = study_folder(uri(tmp_path), "small")
    with Study.open(uri(tmp_path), experiment(), join=True):
        assert is_driven(folder)
        with Study.open(uri(tmp_path), experiment(), join=True):
            assert is_driven(folder)
    assert not is_driven(folder)


def test_a_driver_that_was_silent_too_long_writes_no_trial_that_another_took_over(tmp_path: Path) -> None:
    with opened(tmp_path, "search.sampler=random") as study:
        source = source_of(study, tmp_path)
        jobs = [source.next(), source.next()]
        assert all(job is not None for job in jobs)
        lost, kept = (job.key for job in jobs if job is not None)
        study.storage.set_trial_user_attr(study._ledger._ids[lost], "assay.owner", "elsewhere:1:1")
        reading = curve(2.0)[0]
        assert not source.report(lost, reading)
        source.finish(lost, ok(2.0))
        assert study.trials()[lost].result is None
        assert not study.record(lost, ok(2.0))
        source.finish(kept, ok(2.5))
        assert study.trials()[kept].result is not None


def source_of(study: Study, folder: Path) -> SearchSource:
    """The driver's side of a search whose tracking store is never opened."""
    recorder = Recorder(Tracker(store_uri(folder)), lambda: "", print)
    return SearchSource(study, recorder, folder, Progress(io.StringIO()))


def test_what_another_driver_keeps_counts_in_the_quota(tmp_path: Path) -> None:
    with opened(tmp_path, "search.sampler=random", f"engine.disk_bytes={2**20}") as study:
        quota = Quota(study, tmp_path / "checkpoints")
        first, second = study.propose(), study.propose()
        assert first is not None
        assert second is not None
        weights = tmp_path / "weights.safetensors"
        weights.write_bytes(bytes(2**20 - 4000))
        study.tell(first.number, ok(1.0))
        quota.know(study.trials()[first.number])
        study.tell(second.number, ok(2.0))
        gone = quota.admit(study.trials()[second.number], weights)
        assert [entry.number for entry in gone] == [second.number]


@pytest.mark.fault
@pytest.mark.parametrize("dies", ["the one that joined", "the one that leads"])
def test_the_others_finish_what_a_killed_driver_began(tmp_path: Path, dies: str) -> None:
    allow(gate := tmp_path / "gate", 2)
    given = environment(seconds=0.05, gate=gate, ASSAY_STORE=store_uri(tmp_path))
    first = Driver(tmp_path, *ASKED, given=given)
    wait_for("two trials of the first driver, and one more that runs", lambda: stored(tmp_path) == 3)
    second = Driver(tmp_path, *ASKED, "--join", given=given)
    wait_for("as many of the second", lambda: stored(tmp_path) == 6)
    victim, other = (second, first) if dies == "the one that joined" else (first, second)
    assert victim.kill() == -signal.SIGKILL
    allow(gate, ALL)
    other.finish()
    if dies == "the one that leads":
        # Whoever joined leaves what the dead leader ran to it where it ended first; the same command takes it up.
        Driver(tmp_path, *ASKED, given=given).finish()

    with Study.open(uri(tmp_path), experiment(*ASKED)) as study:
        entries = study.trials()
    assert [entry.number for entry in entries] == list(range(TRIALS))
    assert all(entry.settled for entry in entries)
    assert len({canonical_json(dict(entry.point)) for entry in entries}) == TRIALS
    store = Store(locate(store_uri(tmp_path)))
    (parent,) = store.searches().values()
    runs = list(store.client.search_runs([parent.info.experiment_id], max_results=1000))
    children = [run for run in runs if run.data.tags[Tag.KIND] == "trial"]
    assert Counter(run.data.tags[Tag.NUMBER] for run in children) == Counter(map(str, range(TRIALS)))
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_crew_notes_that_it_left(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        me = study.crew.me
        assert study.noted(f"assay.driver/{me}", None) > 0
    with opened(tmp_path) as study:
        other = Crew(study._ledger, FileTurns(tmp_path / "turn.lock"))
        other.leave()
        assert study.noted(f"assay.driver/{me}", None) == 0.0


def test_a_trial_that_another_driver_ended_and_closed_is_told_once(tmp_path: Path) -> None:
    with opened(tmp_path) as study, Study.open(uri(tmp_path), study.experiment, join=True) as joined:
        joined.bind(SHAPE, "made up")
        joined.crew.me = "elsewhere:1:1"
        proposed = joined.propose()
        assert proposed is not None
        study.refresh()
        assert [told.fate for told in study.told()] == [Fate.RUNNING]
        joined.record(proposed.number, ok(1.0))
        study.refresh()
        assert [told.fate for told in study.told()] == [Fate.OK]
        joined.settle(proposed.number)
        study.refresh()
        assert study.trials()[0].settled
        assert [told.number for told in study.told()] == [0]
