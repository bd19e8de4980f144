"""Drivers that join one search: what they know of each other's trials when they decide, count and clear away."""

import io
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from populations import TEXT
from studied import experiment, ok, opened, uri
from tracked import store_uri

from runners.cli import main
from runners.crew import FileTurns
from runners.heirlooms import settle_place
from runners.mutations import mutations_of
from runners.owners import JOINED, LOCK
from runners.progress import Progress
from runners.recorder import Recorder
from runners.replay import replay
from runners.search import SearchSource
from runners.study import Study
from runners.tracking import Tracker
from search_space.records import Reading, Status

HERE = Path(__file__).parent


@contextmanager
def both(folder: Path, text: str, *overrides: str) -> Iterator[tuple[Study, Study]]:
    """The study as the driver that leads has it, and as one that joined has it; each lives as the other sees it."""
    with ExitStack() as held:
        first = held.enter_context(opened(folder, *overrides, text=text))
        second = held.enter_context(Study.open(uri(folder), experiment(*overrides, text=text), join=True))
        second.bind(first.shape, first.fingerprint)
        host = first.crew.me.partition(":")[0]
        second.crew.me = f"{host}:1:"  # Both are this process, which is one driver only.
        second.crew._next_beat = 0.0
        second.crew.beat()
        yield first, second


def at(tokens: int, loss: float) -> Reading:
    return Reading(tokens=tokens, loss=loss, train_loss=loss, seconds=0.1)


def test_a_trial_copies_the_best_of_all_drivers_trials(tmp_path: Path) -> None:
    with both(tmp_path, TEXT) as (first, second):
        for study in (first, first, second, second):
            assert study.propose() is not None
        for number, loss in ((0, 0.5), (1, 2.0)):
            assert first.report(number, at(256, loss))
        assert second.report(2, at(256, 1.0))
        assert not second.report(3, at(256, 9.0)), "the worst of four"
        (copied,) = mutations_of(second.trials()[3])
    assert (copied.donor, copied.donor_loss) == (0, 0.5)


def test_a_driver_that_does_not_see_the_states_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one on another machine, over a study on a server: its folder of the search is another one."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "bred.yaml"
    file.write_text(TEXT)
    with opened(tmp_path, text=TEXT) as study:
        settle_place(study, study._folder)
        settle_place(study, study._folder)
    asked = ["search", str(file), "--join", "--study", uri(tmp_path), "--tracking-uri", store_uri(tmp_path)]
    (tmp_path / "bred/states.mark").write_text("of another machine")
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert "its pruner is pbt" in said
    assert "join on that machine" in said
    assert "Traceback" not in said
    with opened(tmp_path, text=TEXT) as study:
        assert not study.trials()
        settle_place(study, study._folder)
        assert study.noted("assay.states", "") == (tmp_path / "bred/states.mark").read_text(), "it leads, alone"


def source_of(study: Study, folder: Path) -> SearchSource:
    """The driver's side of a search whose tracking store is never opened."""
    recorder = Recorder(Tracker(store_uri(folder)), lambda: "", print)
    return SearchSource(study, recorder, study._folder, Progress(io.StringIO()))


def test_what_another_driver_ended_is_counted_however_it_came_to_be_known(tmp_path: Path) -> None:
    with both(tmp_path, experiment().text, "search.sampler=random") as (first, second):
        source = source_of(first, tmp_path)
        for number in range(3):
            assert second.propose() is not None
            second.tell(number, ok(2.0 - number))
        assert first.propose() is not None, "a proposal looks at all that is stored"
        source.show(now=True)
        outcome = source.outcome("", "", (), 0.0)
    assert outcome.counts == {Status.OK: 3}
    assert (outcome.best_number, outcome.best_loss) == (2, 0.0)


def driver(folder: Path, *more: str) -> "subprocess.Popen[str]":
    words = [sys.executable, str(HERE / "drive.py"), str(folder), str(folder / "bred.yaml"), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_drivers_breed_one_population_whose_trials_are_trained_again_to_the_bit(tmp_path: Path) -> None:
    (tmp_path / "bred.yaml").write_text(TEXT)
    (tmp_path / "bred").mkdir()
    asked = ("search.pruner={pbt: {interval_tokens: 256, quantile: 0.5}}",)
    with FileTurns(tmp_path / "bred/turn.lock").hold():
        drivers = [driver(tmp_path, *asked), driver(tmp_path, "--join", *asked)]
        end = time.monotonic() + 120
        while not all((tmp_path / "bred" / lock).exists() for lock in (LOCK, JOINED)):
            assert time.monotonic() < end, "the drivers do not start"
            time.sleep(0.05)
    for each in drivers:
        _, err = each.communicate(timeout=240)
        assert each.returncode == 0, err
    with Study.open(uri(tmp_path), experiment(*asked, text=TEXT)) as study:
        entries = study.trials()
    assert [entry.result.status for entry in entries if entry.result] == [Status.OK] * 8
    assert len({entry.owner for entry in entries}) == 2
    for entry in entries:
        assert entry.result is not None
        assert not [words for words in entry.result.remarks if "taken over" in words]
        for each in mutations_of(entry):
            assert each.donor // 4 == entry.number // 4, "a mate"
            assert each.donor_loss == entries[each.donor].readings[each.tokens] < each.loss
    assert not list((tmp_path / "bred/checkpoints").iterdir()), "no state outlives its use"
    copied = [(each, entry) for entry in entries for each in mutations_of(entry)]
    across = [entry.number for each, entry in copied if entries[each.donor].owner != entry.owner]
    assert across, "some copy a trial of the other driver"
    report = replay(f"bred/{across[-1]}", f"sqlite:///{tmp_path}/mlflow.db")
    assert report.bit_equal, report.text()
