"""What is doubtful about a legal model is told before a search, and kept with each of its runs."""

import json
from pathlib import Path

import pytest
from tracked import children, experiment_text, result, searched, store_uri

from runners.cli import main
from runners.tracking import Tracker
from search_space.records import Tag

POSTED = "\n  placement: post\n  init: scaled_normal"
DOUBTFUL = "dyt" + POSTED
"""A norm without statistics on the residual stream."""


def test_check_counts_the_cautions_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "tiny.yaml"
    file.write_text(experiment_text(norm=DOUBTFUL).replace("[none, rotary]", "rotary"))
    assert main(["check", str(file), "--samples", "1"]) == 0
    assert "caution         1x: model.norm.kind='dyt'" in capsys.readouterr().out
    file.write_text(experiment_text(norm="rmsnorm" + POSTED).replace("[none, rotary]", "rotary"))
    assert main(["check", str(file), "--samples", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cautions"] == {}


@pytest.mark.slow
def test_a_run_keeps_its_cautions_and_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri, search = store_uri(tmp_path), searched(norm=f"[dyt, rmsnorm]{POSTED}")
    numbers: dict[str, int] = {}
    for number in range(40):
        point = search.trial(number)[1].flat
        if point["model.position.kind"] == "rotary":
            numbers.setdefault(str(point["model.norm.kind"]), number)
    tracker = Tracker(uri)
    search.start(tracker)
    for number in numbers.values():
        tracker.finish_trial(search.start_trial(tracker, number), result())
    tracker.finish_search("FINISHED")
    doubtful, plain = sorted(children(uri), key=lambda run: run.data.params["model.norm.kind"])
    assert "'dyt'" in doubtful.data.tags[Tag.CAUTIONS]
    assert Tag.CAUTIONS not in plain.data.tags
    assert main(["show", doubtful.info.run_id, "--tracking-uri", uri]) == 0
    assert "  caution  model.norm.kind='dyt'" in capsys.readouterr().out
