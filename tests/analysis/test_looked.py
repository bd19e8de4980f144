"""Diagnostics in a report: what checkups found stands in words and in one picture; without them nothing is said."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import synthetic
from conftest import store_uri
from matplotlib.text import Text

from analysis.diagnostics import diagnostics_figure, diagnostics_lines, looked
from analysis.frame import Search
from analysis.load import load_search
from analysis.report import write_report
from search_space.records import Artifact, Tag

SINKS = "layer 2: 6 of 8 heads attend only to token 1"


def checkup(tokens: int, warnings: list[str], *, heads: int = 8) -> dict[str, Any]:
    layer = {"rms": 1.5, "rank": 20.0, "dead_units": 0.0, "entropy": [0.5] * heads, "sink_share": [], "redundancy": []}
    roles = {"query": 0.5, "ffn_in": 0.02}
    return {
        "tokens": tokens,
        "metrics": {"diagnostics/warnings": float(len(warnings))},
        "layers": [layer, {**layer, "rms": 40.0}],
        "gradients": {"layer 1": roles, "layer 2": roles, "outside": {"embedding": 0.1}},
        "updates": {},
        "warnings": warnings,
        "notes": [] if heads else ["layers 1, 2: no attention weights can be read off linear"],
    }


@pytest.fixture(scope="module")
def kept(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A search of four trials: one sound, one with sinks in two layers, one without weights, one not looked at."""
    root = tmp_path_factory.mktemp("looked") / "mlruns"
    shutil.copytree(empty_store, root)
    writer = synthetic.Writer(store_uri(root), root, "looked")
    found = {
        0: checkup(400, []),
        1: checkup(400, [SINKS, "layer 1: 3 of 8 heads attend only to token 1"]),
        2: checkup(400, [], heads=0),
    }
    for number in range(4):
        tags, metrics = {}, {}
        if number in found:
            metrics = {"diagnostics/warnings": float(len(found[number]["warnings"])), "diagnostics/entropy": 0.5}
            tags = {Tag.WARNINGS: "\n".join(found[number]["warnings"])} if found[number]["warnings"] else {}
        run = writer.trial(number, synthetic.BASELINE, [(400, 2.0 + number / 10)], metrics=metrics, tags=tags)
        if number in found:
            writer.client.log_text(run, json.dumps([checkup(100, []), found[number]]), Artifact.DIAGNOSTICS)
    writer.finish()
    return store_uri(root)


def test_warnings_and_what_could_not_be_read_are_told_trial_by_trial(kept: str) -> None:
    search = load_search(kept, "looked")
    shown = looked(search)
    assert [trial.run for trial in shown] == ["looked/0", "looked/1", "looked/2"]
    assert [checkup.tokens for checkup in shown[0].checkups] == [100, 400]
    lines = diagnostics_lines(search, shown)
    assert lines[0] == "looked/0 (loss 2.000): nothing unusual."
    assert lines[1].startswith(f"looked/1 (loss 2.100): {SINKS}; layer 1: 3 of 8")
    assert lines[2] == "looked/2 (loss 2.200): layers 1, 2: no attention weights can be read off linear."
    assert lines[3:] == [
        "1 of 3 trials that were looked at have warnings.",
        "2x: … of … heads attend only to token …",
    ]
    assert looked(search, most=1) == shown[:1]


def test_metrics_of_checkups_are_columns(kept: str) -> None:
    frame = load_search(kept, "looked").trials
    assert frame["diagnostics/entropy"].tolist()[:3] == [0.5] * 3
    assert frame["diagnostics/entropy"].isna().tolist() == [False, False, False, True]


def test_the_picture_has_a_row_a_trial_and_says_where_there_is_nothing(kept: str) -> None:
    search = load_search(kept, "looked")
    figure = diagnostics_figure(search, looked(search))
    words = [text.get_text() for text in figure.findobj(Text)]
    cells = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert words.count("no attention weights to read") == 1
    assert any(text.startswith("looked/1, loss 2.100") for text in words)
    assert cells.count("40") == 6, "the residual of layer 2 at both checkups of three trials"
    assert "best 3 finished trials" in "\n".join(words)


def test_a_report_shows_diagnostics_where_there_are_any(kept: str, search: Search, tmp_path: Path) -> None:
    page = write_report(kept, "looked", tmp_path)
    written = page.with_suffix(".md").read_text(encoding="utf-8")
    assert f"- looked/1 (loss 2.100): {SINKS}" in written
    assert "](diagnostics.png)" in written
    assert (tmp_path / "diagnostics.png").stat().st_size > 10_000
    assert looked(search) == []
