"""Tests of analysis/report.py, analysis/text.py, analysis/leaderboard.py and analysis/plots.py."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic
from conftest import store_uri
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis import landscape, landscape_plots, plots, text
from analysis.effects import main_effects
from analysis.frame import Search
from analysis.leaderboard import leaderboard, seed_spread
from analysis.load import load_search
from analysis.report import write_report
from analysis.verdicts import contrasts
from search_space.records import Metric, Status


def figures(search: Search) -> dict[str, Figure]:
    return {
        "leaderboard": plots.leaderboard_figure(search),
        "curves": plots.curves_figure(search),
        "effects": plots.effects_figure(main_effects(search)),
        "cost": plots.cost_figure(search),
        "failures": plots.failures_figure(search),
        "finals": plots.finals_figure(search, contrasts(search)),
        "rates": landscape_plots.rates_figure(search),
        "pairs": landscape_plots.pairs_figure(search, landscape.pairs(search)),
    }


def test_the_leaderboard_orders_finished_then_pruned_then_failed(search: Search) -> None:
    board = leaderboard(search)
    groups = board["status"].map({"ok": 0, "pruned": 1}).fillna(2)
    assert groups.is_monotonic_increasing
    done = board[board["status"] == Status.OK]
    assert done["loss"].is_monotonic_increasing
    baseline = done[done["is_baseline"]].iloc[0]
    assert baseline["difference"] == 0
    np.testing.assert_allclose(done["difference"], done["loss"] - baseline["loss"])
    assert board[board["status"] == Status.PRUNED]["tokens"].is_monotonic_decreasing
    assert board[board["status"] != Status.OK]["difference"].isna().all()


def test_the_terminal_shows_baseline_bigram_and_what_a_lead_is_worth(search: Search) -> None:
    shown = text.leaderboard_text(search, top=3)
    assert shown.count("quickstart/0 ") == 1
    assert "baseline" in shown
    assert "below the bigram model (2.6100)" in shown
    assert re.search(r"quickstart/\d+ leads quickstart/\d+ by 0\.\d+ nats/byte on one seed each", shown)
    assert max(len(line) for line in shown.splitlines()) < 200


def test_seed_spread_is_the_pooled_deviation_of_replicas(search: Search) -> None:
    spread, degrees = seed_spread(search)
    groups = [group[Metric.LOSS].to_numpy() for _, group in search.finals.groupby("point_id")]
    assert degrees == sum(len(group) - 1 for group in groups) == 14
    squares = sum(group.var(ddof=1) * (len(group) - 1) for group in groups)
    assert spread == pytest.approx(np.sqrt(squares / degrees))


def test_a_report_says_what_won_what_is_open_and_how_to_replay(uri: str, search: Search, tmp_path: Path) -> None:
    page = write_report(uri, "quickstart", tmp_path / "a report")
    written = page.with_suffix(".md").read_text(encoding="utf-8")
    for part in (
        "# quickstart",
        "rotary beats none by",
        "below the bigram model",
        "## Undecided",
        "seed: undecided: other seeds minus first seeds",
        "out of memory | RuntimeError: DefaultCPUAllocator",
        "of 30 trials",
        f"data fingerprint (sha256): `{'ab' * 32}`",
        "torch 2.13.0",
        "assay replay quickstart/best",
        "assay replay quickstart/final/0",
        "every candidate at params 250k",
    ):
        assert part in written, part
    best = search.finished["number"].iloc[0]
    assert f"`assay replay quickstart/{best}`" in written
    pictures = set(re.findall(r"\]\((\S+\.png)\)", written))
    assert pictures == {f"{name}.png" for name in figures(search)}
    for picture in pictures:
        assert (page.parent / picture).read_bytes().startswith(b"\x89PNG")
    assert "nan" not in re.findall(r"[a-z]+", written.lower())


def test_no_figure_cuts_or_overlaps_its_labels(search: Search) -> None:
    for name, figure in figures(search).items():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        frame = figure.bbox
        for label in figure.findobj(Text):
            if not label.get_visible() or not label.get_text() or label.axes is None:
                continue
            box = label.get_window_extent(renderer)
            inside = (box.x0 >= -1, box.y0 >= -1, box.x1 <= frame.x1 + 1, box.y1 <= frame.y1 + 1)
            ticks = [*label.axes.get_xticklabels(), *label.axes.get_yticklabels()]
            assert all(inside) or label in ticks, f"{name}: {label.get_text()!r} at {box}"
        for axes in figure.axes:
            boxes = [label.get_window_extent(renderer) for label in axes.get_yticklabels() if label.get_text()]
            boxes.sort(key=lambda box: box.y0)
            for below, above in itertools.pairwise(boxes):
                assert below.y1 <= above.y0 + 1, f"{name}: labels overlap"


def test_every_figure_names_units_and_numbers(search: Search) -> None:
    for name, figure in figures(search).items():
        words = " ".join(label.get_text() for label in figure.findobj(Text))
        assert re.search(r"\d+ (finished )?trials|n=\d+", words), name
        if name != "failures":
            assert "nats/byte" in words, name


def test_a_search_in_its_first_minute_can_be_reported(empty_store: Path, tmp_path: Path) -> None:
    root = tmp_path / "mlruns"
    shutil.copytree(empty_store, root)
    writer = synthetic.Writer(store_uri(root), root, "young")
    writer.trial(0, synthetic.BASELINE, [], running=True)
    writer.trial(1, synthetic.BASELINE, [], status=Status.FAILED, reason="worker exited with 139 | core dumped")
    page = write_report(store_uri(root), "young", tmp_path / "out").with_suffix(".md").read_text(encoding="utf-8")
    assert "No trial has finished." in page
    assert "139 \\| core dumped" in page
    found = load_search(store_uri(root), "young")
    assert "No choice was tried in two ways" in text.effects_text(found)
    assert "running" in text.leaderboard_text(found)


def test_a_report_takes_seconds_and_neither_torch_nor_the_client(uri: str, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from analysis.report import write_report;"
        f"write_report({uri!r}, 'quickstart', Path('out')); print(time.process_time());"
        "assert not {'torch', 'mlflow', 'optuna', 'blocks', 'runners'} & set(sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert float(out.stdout) < 5
