"""Tests of what a report tells a reader who knows nothing of the search: on which trial, how early, at what cost."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import synthetic
from conftest import store_uri
from matplotlib.colors import same_color

from analysis import plots
from analysis.compare import paired_verdict
from analysis.drawing import CLAIM_COLOURS, wrapped
from analysis.effects import main_effects
from analysis.frame import Search, short_path
from analysis.leaderboard import common_text
from analysis.load import load_search
from analysis.report import write_report
from analysis.text import effects_rows, effects_text, undecided_lines
from analysis.verdicts import contrasts
from search_space.records import Artifact, Metric, Stage, Status, Tag
from search_space.space import OneOf, Space
from search_space.stored import space_to_plain

SHALLOW = {**synthetic.BASELINE, "model.layers": 2}
DEEP = {**synthetic.BASELINE, "model.layers": 4}
LEFT_OVER = {**synthetic.BASELINE, "model.layers": 3}
LOSSES = {0: (SHALLOW, 2.5), 1: (DEEP, 2.1), 2: (SHALLOW, 2.55)}


@pytest.fixture(scope="module")
def told_store(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three finished trials without failures, and finals of the loser, the winner and a stranger; four are copies."""
    root = tmp_path_factory.mktemp("told") / "ml runs"
    shutil.copytree(empty_store, root)
    writer = synthetic.Writer(store_uri(root), root, "told")
    for number, (flat, loss) in LOSSES.items():
        readings = [(synthetic.EVERY, loss + 0.1), (synthetic.BUDGET, loss)]
        run = writer.trial(number, flat, readings)
        environment = {"cpu_model": "Abacus 9000", "threads": "1"}
        writer.client.log_text(run, json.dumps({"device": "cpu", "environment": environment}), Artifact.RESULT)
    number = 0
    for name, base in (("loser", SHALLOW), ("winner", DEEP), ("stranger", LEFT_OVER)):
        for replica in range(4):
            for side in ("base", "changed"):
                flat = base if side == "base" else {**base, "model.position.kind": "alibi"}
                loss = 2.5 + 0.01 * replica + (0.4 + 0.001 * replica**2) * (side == "changed")
                copied = {Tag.SAME_AS: "0"} if (name, side) == ("winner", "base") else {}
                tags = {Tag.CANDIDATE: f"{name}/{side}", Tag.REPLICA: str(replica), **copied}
                writer.trial(number, flat, [(synthetic.BUDGET, loss)], stage=Stage.FINAL, tags=tags)
                number += 1
    writer.finish()
    return root


@pytest.fixture(scope="module")
def told(told_store: Path) -> Search:
    return load_search(store_uri(told_store), "told")


@pytest.fixture(scope="module")
def page(told_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(store_uri(told_store), "told", tmp_path_factory.mktemp("report"))


def test_a_contrast_names_its_trial_and_whether_it_won(told: Search) -> None:
    found = {contrast.name: contrast for contrast in contrasts(told)}
    assert found["loser"].text.endswith("; base: told/0 (not the winner, which is told/1)"), "0 beats its double, 2"
    assert found["winner"].text.endswith("; base: told/1 (the winner)")
    assert found["stranger"].text.endswith("; base: no trial of told has its settings")


def test_the_finals_are_drawn_in_the_order_of_the_sentence(told: Search) -> None:
    found = contrasts(told)
    assert [contrast.verdict.kind for contrast in found] == ["worse"] * 3
    (axes,) = plots.finals_figure(told, found).axes
    labels = {label.get_text() for label in axes.get_yticklabels()}
    assert "winner\nnone beats alibi (n=4)\nbase: told/1 (the winner)" in labels
    for dots in axes.collections:
        places = np.asarray(dots.get_offsets(), dtype=float)
        assert len(places) == 4
        assert (places[:, 0] < -0.39).all(), "the winner minus the loser"
        assert same_color(tuple(np.atleast_2d(dots.get_facecolor())[0, :3]), CLAIM_COLOURS["better"])


@pytest.mark.parametrize("values", [[-0.2, 0.1], [-0.2, 0.1, -0.3]])
def test_three_pairs_foretell_nothing(values: list[float]) -> None:
    assert "more would" not in paired_verdict(values).text
    assert "more would probably settle" in paired_verdict([*values, -0.2, 0.1]).text


def test_effects_say_how_early_they_are(search: Search) -> None:
    effects = main_effects(search)
    assert (effects.tokens, effects.budget) == (synthetic.EVERY, synthetic.BUDGET)
    assert effects.early == "early: at 1/8 of the budget"
    assert "What each choice was worth (early: at 1/8 of the budget;" in effects_text(search)
    decided = [row for row in effects_rows(effects)[1] if row[-1].startswith(("better", "worse"))]
    assert decided
    assert all(row[-1].endswith(", early") for row in decided)
    assert dataclasses.replace(effects, tokens=synthetic.BUDGET * 2 // 7).early == "early: at 29 % of the budget"
    assert dataclasses.replace(effects, tokens=synthetic.BUDGET // 2).early == ""


@pytest.mark.parametrize(
    ("agreement", "finished", "warned"),
    [(0.59, 20, "low"), (0.6, 8, ""), (0.95, 7, "too few"), (float("nan"), 2, "no correlation")],
)
def test_effects_warn_of_an_order_that_may_not_last(
    search: Search, agreement: float, finished: int, warned: str
) -> None:
    effects = dataclasses.replace(main_effects(search), agreement=agreement, n_finished=finished)
    assert bool(effects.warning) == bool(warned)
    assert warned in effects.warning
    drawn = plots.effects_figure(effects).get_suptitle()
    assert ("WARNING" in drawn) == bool(warned)
    assert np.isnan(agreement) or f"Spearman {agreement:.2f}" in drawn
    assert dataclasses.replace(effects, tokens=effects.budget).warning == "", "the final loss itself was compared"


def test_every_undecided_effect_is_listed(search: Search) -> None:
    effects = main_effects(search)
    lines = undecided_lines(search, effects, contrasts(search))
    whole = next(line for line in lines if line.startswith("Whether these choices matter"))
    parts = " ".join(line for line in lines if line.startswith("Whether these options differ"))
    names = whole.rstrip(".").partition(": ")[2].split(", ")
    rows = [row for row in effects.rows if row.claim == "undecided"]
    mixed = [row for row in rows if short_path(row.path) not in names]
    assert rows
    assert mixed, "some choice has a decided option beside an undecided one"
    for row in mixed:
        assert f"{short_path(row.path)} {row.option} against {row.reference}" in parts


def test_a_report_tells_the_whole_cost(told: Search, page: Path) -> None:
    written = page.with_suffix(".md").read_text(encoding="utf-8")
    finals = [SHALLOW, LEFT_OVER, *({**base, "model.position.kind": "alibi"} for base in (SHALLOW, DEEP, LEFT_OVER))]
    trained = [*(flat for flat, _ in LOSSES.values()), *finals * 4]
    flops = sum(3 * synthetic.cost(flat)[Metric.FLOPS] * synthetic.BUDGET for flat in trained)
    assert len(told.trainings) == len(trained) == 23
    assert f"- training FLOPs: {flops / 1e12:.3g}T (3 × forward" in written
    assert f"- training tokens: {23 * synthetic.BUDGET / 1e6:.3g}M" in written
    assert f"- sum of the trainings' own time: {23 * 4.1:.0f} s" in written
    assert "- machine: Abacus 9000 (cpu)" in written
    assert "- wall time: " in written
    assert "24 finals, 20 trainings" in written
    assert "A trial took 4.1 s (median of unpruned)" in written


def test_a_report_quotes_its_store_for_the_shell(told: Search, page: Path) -> None:
    written = page.with_suffix(".md").read_text(encoding="utf-8")
    command = written.partition("`--tracking-uri ")[2].partition("`")[0]
    assert " " in told.uri
    assert shlex.split(command) == [told.uri]


def test_what_never_changed_is_said_once(told: Search, search: Search, page: Path) -> None:
    shared = common_text(told)
    assert shared.startswith("Common to all: mixer softmax, position none, ")
    assert "ffn gelu" in shared
    assert "optimizer" not in shared, "the file left one optimizer only"
    assert shared in page.with_suffix(".md").read_text(encoding="utf-8")
    assert common_text(search) == ""


def test_a_block_that_the_file_set_for_all_is_said(told: Search) -> None:
    families = {
        "mixer": OneOf(variants={"softmax": Space(fields={})}, default="softmax"),
        "ffn": OneOf(variants={"mine": Space(fields={}), "gelu": Space(fields={})}, default="mine"),
        "norm": OneOf(variants={"layernorm": Space(fields={}), "rmsnorm": Space(fields={})}, default="layernorm"),
    }
    narrow = {
        "model": Space(
            fields={
                name: dataclasses.replace(node, variants={kind: node.variants[kind]}, default=kind)
                for (name, node), kind in zip(families.items(), ("softmax", "gelu", "layernorm"), strict=True)
            }
        )
    }
    full = Space(fields={"model": Space(fields=families)})
    experiment = {"space": space_to_plain(Space(fields=narrow)), "full": space_to_plain(full)}
    fixed = dataclasses.replace(told, parent=dataclasses.replace(told.parent, experiment=experiment))
    assert common_text(fixed) == "Common to all: mixer softmax, position none, ffn gelu."


def test_nothing_is_drawn_of_failures_that_were_none(page: Path) -> None:
    assert "failures.png" not in page.with_suffix(".md").read_text(encoding="utf-8")
    assert not (page.parent / "failures.png").exists()
    assert (page.parent / "finals.png").exists()


def test_a_cut_table_says_so(uri: str, page: Path, tmp_path: Path) -> None:
    long = write_report(uri, "quickstart", tmp_path).with_suffix(".md").read_text(encoding="utf-8")
    rows = long.count("| `assay replay quickstart/")
    assert f"{rows} of 30 trials are shown; `assay runs quickstart` lists all." in long
    assert "trials are shown" not in page.with_suffix(".md").read_text(encoding="utf-8")


def test_the_bigram_line_is_in_view(told: Search) -> None:
    for level in (1.2, 2.61, 5.5):
        metrics = {**told.parent.run.metrics, Metric.BASELINE_BIGRAM: level}
        run = dataclasses.replace(told.parent.run, metrics=metrics)
        moved = dataclasses.replace(told, parent=dataclasses.replace(told.parent, run=run))
        (axes,) = plots.curves_figure(moved).axes
        low, high = axes.get_ylim()
        assert low < level < high


def test_equal_costs_make_no_front(told: Search) -> None:
    parameters, flops = plots.cost_figure(told).axes
    assert parameters.get_xlabel() == "parameters (equal by design, within 2%)"
    assert not parameters.lines
    assert flops.get_xlabel() == "forward FLOPs/token"
    assert len(flops.lines) == 1
    assert set(told.finished["status"]) == {Status.OK}


def test_a_description_is_broken_before_a_plus_or_at_a_space() -> None:
    text = "+".join(["sliding_window(kv_heads=4, window=32)"] * 4) + " learning_rate=1e+05"
    lines = wrapped(text).split("\n")
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
    assert all(not line.endswith("+") for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert "learning_rate=1e+05" in lines[-1]
