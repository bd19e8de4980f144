"""Searches whose trials copy each other: what they come to, on both engines, through kills, and trained again."""

import errno
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from drivers import Driver
from populations import RATE, TEXT
from processes import wait_for
from studied import experiment, uri
from test_kill import kept_in, stored
from tracked import store_uri

from runners.cli import main
from runners.ledger import Entry
from runners.mutations import mutations_of
from runners.replay import replay
from runners.search import run_search
from runners.store import Store
from runners.study import Study
from runners.tracking import Tracker
from search_space.places import locate
from search_space.records import Artifact, Metric, Status, Tag

BYTES = TEXT.replace(
    "{mqar: {seq_len: 32, pairs: 4, vocabulary: 32, examples: 64, held_out: 16}}",
    "{python_source: {seq_len: 32, max_bytes: 65536}}",
).replace("tokens: 1024, batch_tokens: 128, eval_tokens: 128", "tokens: 8192, batch_tokens: 128, eval_tokens: 1024")
EARLY = ("search.population=8", "search.pruner={pbt: {interval_tokens: 1024}}", "budget.eval_every=1024")


def driver(folder: Path, *overrides: str) -> Driver:
    folder.mkdir(exist_ok=True)
    return Driver(folder, *overrides, given=kept_in(folder), text=TEXT)


def driven(folder: Path, *overrides: str) -> None:
    """Run the search, or go on with it, to its end."""
    driver(folder, *overrides).finish()


def entries(folder: Path, *overrides: str) -> list[Entry]:
    with Study.open(uri(folder), experiment(*overrides, text=TEXT)) as study:
        return list(study.trials())


def lineage(folder: Path, *overrides: str) -> list[tuple[object, ...]]:
    """Point, end, mutations and curve of every trial, without what a clock decides."""
    found: list[tuple[object, ...]] = []
    for entry in entries(folder, *overrides):
        assert entry.result is not None
        curve = [(reading.tokens, reading.loss, reading.train_loss) for reading in entry.result.curve]
        mutations = [(each.tokens, each.donor, each.before, each.after) for each in mutations_of(entry)]
        found.append((dict(entry.point), entry.result.status, dict(entry.readings), mutations, curve))
    return found


@pytest.mark.slow
def test_kills_change_no_lineage_and_a_replay_trains_the_whole_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    driven(whole)
    for readings in (7, 14):
        killed_after(broken, readings)
    driven(broken)
    assert lineage(broken) == lineage(whole)

    found = entries(whole)
    assert [entry.result.status for entry in found if entry.result] == [Status.OK] * 8
    changed = [entry for entry in found if entry.mutations]
    assert changed
    assert not list((whole / "bred/checkpoints").iterdir()), "no state outlives its use"
    store = Store(locate(store_uri(broken)))
    run = store.find_run(f"bred/{changed[0].number}")
    assert run.data.tags[Tag.MUTATIONS].count("\n") == len(changed[0].mutations) - 1
    assert store.artifact(run, Artifact.MUTATIONS) is not None
    assert float(run.data.params[RATE]) == changed[0].point[RATE]
    assert run.info.status == "FINISHED"
    steps = [point.step for point in store.client.get_metric_history(run.info.run_id, Metric.VALIDATION_CURVE)]
    assert sorted(steps) == [0, 256, 512, 768, 1024]
    report = replay(f"bred/{changed[0].number}", store_uri(broken))
    assert report.bit_equal, report.text()
    uris = ["--tracking-uri", store_uri(broken)]
    assert main(["train", f"bred/{changed[0].number}", "--tokens", "4096", *uris]) == 2
    assert "settings that changed on the way" in capsys.readouterr().err
    assert main(["show", f"bred/{changed[0].number}", *uris]) == 0
    assert f"  mutation {mutations_of(changed[0])[0].line}" in capsys.readouterr().out


def killed_after(folder: Path, readings: int) -> None:
    """Kill the driver when so many readings are stored."""
    victim = driver(folder)
    wait_for("progress of the driver", lambda: read(folder) >= readings or victim.ended)
    assert victim.kill() == -signal.SIGKILL, victim.err


def read(folder: Path) -> int:
    """How many readings the study holds."""
    if not stored(folder):
        return 0
    with closing(sqlite3.connect(folder / "study.db", timeout=30)) as connection:
        return int(connection.execute("SELECT count(*) FROM trial_intermediate_values").fetchone()[0])


@pytest.mark.slow
def test_the_worst_learning_rates_end_better_than_alone(tmp_path: Path) -> None:
    bred = searched(tmp_path / "bred", *EARLY)
    alone = searched(tmp_path / "alone", *EARLY, "search.pruner=none")
    changed = [entry.number for entry in bred if entry.mutations]
    losses = [[entry.result.metrics[Metric.LOSS] for entry in found if entry.result] for found in (bred, alone)]
    assert [entry.point for entry in bred] == [entry.point for entry in alone]
    assert losses[1].index(max(losses[1])) in changed, "the worst of all learning rates"
    for number in range(8):
        if number in changed:
            assert losses[0][number] < losses[1][number] - 0.1
        else:
            assert losses[0][number] == losses[1][number], "whoever copies nobody trains as if alone"


def searched(folder: Path, *overrides: str) -> list[Entry]:
    """The trials of a whole search over bytes."""
    folder.mkdir()
    asked = experiment(*overrides, text=BYTES)
    run_search(asked, tracker=Tracker(store_uri(folder)), study_uri=uri(folder))
    with Study.open(uri(folder), asked) as study:
        return list(study.trials())


@pytest.mark.slow
def test_a_state_that_cannot_be_handed_over_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, refused = ("search.trials=4",), []

    def disk_is_full(*where: object) -> None:
        refused.append(where)
        raise OSError(errno.ENOSPC, "No space left on device")

    for folder in (tmp_path / "whole", tmp_path / "full"):
        folder.mkdir()
        made = experiment(*asked, text=TEXT)
        run_search(made, tracker=Tracker(store_uri(folder)), study_uri=uri(folder))
        monkeypatch.setattr("runners.heirlooms.put", disk_is_full)
    assert refused
    assert lineage(tmp_path / "full", *asked) == lineage(tmp_path / "whole", *asked)
    assert any(entry.mutations for entry in entries(tmp_path / "full", *asked))


@pytest.mark.fault
def test_ray_comes_to_the_lineage_of_the_local_engine(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    asked = ("search.trials=4",)
    driven(tmp_path / "local", *asked)
    driven(tmp_path / "far", *asked, "engine.kind=ray")
    assert lineage(tmp_path / "far", *asked) == lineage(tmp_path / "local", *asked)
    assert any(entry.mutations for entry in entries(tmp_path / "far", *asked))
