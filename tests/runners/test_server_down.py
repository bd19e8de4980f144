"""A tracking server that is killed costs the view for a while: the search goes on, and later all of it is shown."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up import environment
from mlflow.entities import Run
from servers import TrackingServer
from studied import experiment, uri
from test_crew import wait_for
from test_kill import stored

from runners.cli import main
from runners.store import Store
from runners.study import Study
from search_space.places import locate
from search_space.records import Metric, Tag

HERE = Path(__file__).parent
TRIALS = 40
ASKED = (f"search.trials={TRIALS}", "search.pruner=none")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TrackingServer]:
    made = TrackingServer(tmp_path / "server")
    yield made
    made.stop()


def driver(folder: Path, server: TrackingServer) -> "subprocess.Popen[str]":
    file = folder / "small.yaml"
    file.write_text(experiment().text)
    words = [sys.executable, str(HERE / "drive.py"), str(folder), str(file), *ASKED]
    given = environment(seconds=0.2, ASSAY_STORE=server.uri)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given)


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
    for entry in entries:
        assert entry.result is not None
        points = client.get_metric_history(trials[entry.number].info.run_id, Metric.VALIDATION_CURVE)
        assert [(p.step, p.value) for p in points] == [(r.tokens, r.loss) for r in entry.result.curve]


@pytest.mark.fault
def test_a_server_that_dies_and_comes_back_shows_everything(tmp_path: Path, server: TrackingServer) -> None:
    server.start()
    running = driver(tmp_path, server)
    wait_for("the first trials", lambda: stored(tmp_path) > 2)
    server.kill()
    before = stored(tmp_path)
    wait_for("trials without a server", lambda: stored(tmp_path) > before + 10)
    server.start()
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert "cannot be written" in err
    assert "can be written again" in err
    assert "unshown 0" in err
    assert f"all {TRIALS} trials were run" in out
    all_is_shown(tmp_path, server)


@pytest.mark.fault
def test_a_search_goes_on_and_ends_without_the_server_it_began_with(tmp_path: Path, server: TrackingServer) -> None:
    server.start()
    first = driver(tmp_path, server)
    wait_for("the first trials", lambda: stored(tmp_path) > 2)
    server.kill()
    first.kill()
    first.communicate()
    _, err = (second := driver(tmp_path, server)).communicate(timeout=120)
    assert second.returncode == 0, err
    assert f"unshown {TRIALS + 1 - _settled(tmp_path)}" in err
    server.start()
    _, err = (third := driver(tmp_path, server)).communicate(timeout=120)
    assert third.returncode == 0, err
    assert "unshown 0" in err
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
