"""A tracking server that is killed costs the view for a while: the search goes on, and later all of it is shown."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from drivers import Driver
from gated_trials import ALL, allow
from lossy_wire import LossyWire
from made_up import environment
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from processes import wait_for
from servers import TrackingServer
from studied import experiment, uri
from test_kill import stored
from tracked import children, result, searched, store_uri, write_search

from runners import recorder
from runners.cli import main
from runners.store import Store
from runners.study import Study
from runners.tracking import Tracker
from runners.twins import one_of_each
from search_space.places import locate
from search_space.records import Metric, Status, Tag

TRIALS = 24
ASKED = (f"search.trials={TRIALS}", "search.pruner=none", "budget.max_seconds=3600")
ENDS = {(Status.OK, ""), (Status.DIVERGED, "made up")}
"""How made-up trials end; any other end is an effect of the server."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TrackingServer]:
    made = TrackingServer(tmp_path / "server")
    yield made
    made.stop()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """How many trials may run."""
    allow(tmp_path / "gate", 3)
    return tmp_path / "gate"


def driver(folder: Path, server: TrackingServer, gate: Path, first: Callable[[], None] | None = None) -> Driver:
    quickly = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    given = environment(seconds=0.05, gate=gate, ASSAY_STORE=server.uri, **quickly)
    return Driver(folder, *ASKED, given=given, first=first)


def impatient() -> None:
    """Has the driver of this process wait less for its server in the end."""
    recorder.CLOSE_SECONDS = 1.0


def shown(server: TrackingServer) -> list[Run]:
    """Every run in the server's database."""
    store = Store(locate(server.place.uri))
    (parent,) = store.searches().values()
    return list(store.client.search_runs([parent.info.experiment_id], max_results=1000))


def all_is_shown(folder: Path, server: TrackingServer) -> None:
    runs = shown(server)
    trials = {int(run.data.tags[Tag.NUMBER]): run for run in runs if run.data.tags[Tag.KIND] == "trial"}
    assert Counter(run.info.status for run in runs) == {"FINISHED": TRIALS + 1}
    client = Store(locate(server.place.uri)).client
    with Study.open(uri(folder), experiment(*ASKED)) as study:
        entries = study.trials()
    assert [entry.number for entry in entries] == sorted(trials) == list(range(TRIALS))
    assert {(entry.result.status, entry.result.reason) for entry in entries if entry.result} <= ENDS
    for entry in entries:
        assert entry.result is not None
        points = client.get_metric_history(trials[entry.number].info.run_id, Metric.VALIDATION_CURVE)
        assert [(p.step, p.value) for p in points] == [(r.tokens, r.loss) for r in entry.result.curve]


@pytest.mark.fault
def test_a_server_that_dies_and_comes_back_shows_everything(tmp_path: Path, server: TrackingServer, gate: Path) -> None:
    server.start()
    running = driver(tmp_path, server, gate)
    wait_for("the first trials", lambda: stored(tmp_path) == 4)
    server.kill()
    allow(gate, 15)
    wait_for("trials without a server", lambda: stored(tmp_path) == 16)
    wait_for("word of the server", lambda: "cannot be written" in running.err)
    server.start()
    allow(gate, ALL)
    running.finish()
    assert "can be written again" in running.err
    assert "unshown 0" in running.err
    assert f"all {TRIALS} trials were run" in running.out
    all_is_shown(tmp_path, server)


@pytest.mark.fault
def test_a_search_goes_on_and_ends_without_the_server_it_began_with(
    tmp_path: Path, server: TrackingServer, gate: Path
) -> None:
    server.start()
    first = driver(tmp_path, server, gate)
    wait_for("the first trials", lambda: stored(tmp_path) == 4)
    server.kill()
    first.kill()
    allow(gate, ALL)
    (second := driver(tmp_path, server, gate, impatient)).finish()
    assert f"unshown {TRIALS + 1 - _settled(tmp_path)}" in second.err
    server.start()
    (third := driver(tmp_path, server, gate)).finish()
    assert "unshown 0" in third.err
    all_is_shown(tmp_path, server)


def _settled(folder: Path) -> int:
    with Study.open(uri(folder), experiment(*ASKED)) as study:
        return sum(entry.settled for entry in study.trials())


@pytest.mark.slow
def test_a_new_search_is_refused_without_its_server(
    tmp_path: Path, server: TrackingServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(experiment().text)
    assert main(["search", str(file), "--tracking-uri", server.uri]) == 2
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.fault
def test_a_lost_answer_of_the_server_doubles_no_run(
    tmp_path: Path, server: TrackingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    server.start()
    tiny = searched()
    with LossyWire(server.uri) as wire:
        tracker = Tracker(wire.uri)
        wire.lose("runs/create", 1)  # The client tries again by itself.
        tiny.start(tracker)
        for number, (path, answers) in enumerate([("create", 1), ("create", 9), ("log-inputs", 9), ("log-batch", 9)]):
            wire.lose(f"runs/{path}", answers)
            if answers > 1:
                with pytest.raises(MlflowException):
                    tracker.finish_trial(tiny.start_trial(tracker, number), result())
                wire.lose("", 0)
            tracker.finish_trial(tiny.start_trial(tracker, number), result())
        tracker.finish_search("FINISHED")
    assert wire.lost >= 2 + 3 * 2
    runs = shown(server)
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert sorted(run.data.tags[Tag.KEY] for run in runs) == ["tiny", *(f"tiny/0/search/{n}" for n in range(4))]


@pytest.mark.slow
def test_of_runs_with_one_key_the_one_that_ended_stays(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    write_search(uri)
    client, (ended, other) = Store(locate(uri)).client, children(uri)
    twins = [client.create_run(ended.info.experiment_id, tags=dict(ended.data.tags)) for _ in range(2)]
    client.set_tag(twins[0].info.run_id, Tag.STATUS, Status.PREEMPTED)
    client.delete_tag(twins[1].info.run_id, Tag.STATUS)
    found = one_of_each(client, [*(client.get_run(run.info.run_id) for run in twins), ended, other], {})
    assert {key: run.info.run_id for key, run in found.items()} == {
        run.data.tags[Tag.KEY]: run.info.run_id for run in (ended, other)
    }
    assert {run.info.run_id for run in children(uri)} == {run.info.run_id for run in (ended, other)}
