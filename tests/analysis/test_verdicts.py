"""Tests of analysis/verdicts.py."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import synthetic
from conftest import store_uri

from analysis.effects import main_effects
from analysis.frame import Search
from analysis.load import find_run, list_searches, load_search
from analysis.text import undecided_lines, verdicts_text
from analysis.verdicts import contrasts
from runners.store import Store
from search_space.places import locate
from search_space.records import Metric, Stage, Status, Tag


def test_a_planted_contrast_is_decided_and_a_change_of_seed_is_not(search: Search) -> None:
    position, seed = contrasts(search)
    assert (position.name, position.verdict.kind) == ("position", "worse")
    assert position.metric == Metric.TEST_LOSS
    assert position.verdict.low < 0.22 < position.verdict.high
    assert position.text.startswith("rotary beats none by 0.2")
    assert "4 paired seeds, equal parameters, equal FLOPs/token" in position.text
    assert (seed.name, seed.verdict.kind) == ("seed", "undecided")
    assert "other seeds minus first seeds" in seed.text
    assert "nothing but the seeds differs: undecided is the right answer" in seed.text


def test_alpha_is_shared_by_the_contrasts_that_were_asked_for(search: Search) -> None:
    assert [contrast.verdict.alpha for contrast in contrasts(search, alpha=0.06)] == [0.03, 0.03]
    assert "at most 5 %" in verdicts_text(search)


def test_differences_are_taken_within_a_seed(search: Search) -> None:
    position = contrasts(search)[0]
    finals = search.finals
    for _, pair in position.pairs.iterrows():
        rows = finals[finals["replica"] == pair["replica"]].set_index("candidate")[Metric.TEST_LOSS]
        assert pair["difference"] == pytest.approx(rows["position/changed"] - rows["position/base"])
    json.dumps(position.to_json(), allow_nan=False)


def test_failed_and_missing_replicas_are_counted_and_break_no_pair(empty_store: Path, tmp_path: Path) -> None:
    root = tmp_path / "mlruns"
    shutil.copytree(empty_store, root)
    writer = synthetic.Writer(store_uri(root), root, "partly")
    rng = np.random.default_rng(0)
    writer.trial(0, synthetic.BASELINE, synthetic.curve(2.5, rng, 0.01))
    number = 0
    for replica in range(4):
        for side in ("base", "changed"):
            bad = (replica, side) == (1, "changed")
            flat = {**synthetic.BASELINE, "model.layers": 2 if side == "base" else 4}
            writer.trial(
                number,
                flat,
                synthetic.curve(2.5 if side == "base" else 2.1, rng, 0.001)[: 1 if bad else None],
                status=Status.DIVERGED if bad else Status.OK,
                stage=Stage.FINAL,
                tags={Tag.CANDIDATE: f"depth/{side}", Tag.REPLICA: str(replica)},
                running=(replica, side) == (3, "changed"),
            )
            number += 1
    found = load_search(store_uri(root), "partly")
    (depth,) = contrasts(found)
    assert list(depth.pairs["replica"]) == [0, 2]
    assert depth.metric == Metric.LOSS
    assert depth.failures == {"base": 0, "changed": 1}
    assert depth.verdict.kind == "undecided"
    assert "1 seed(s) of layers=4 ended badly" in depth.text
    assert "position: no final has run." in undecided_lines(found, main_effects(found), [depth])


def test_without_finals_nothing_is_decided(empty_store: Path, tmp_path: Path) -> None:
    root = tmp_path / "mlruns"
    shutil.copytree(empty_store, root)
    writer = synthetic.Writer(store_uri(root), root, "alone")
    writer.trial(0, synthetic.BASELINE, synthetic.curve(2.5, np.random.default_rng(0), 0.01))
    found = load_search(store_uri(root), "alone")
    assert contrasts(found) == []
    assert "nothing is decided" in verdicts_text(found)


def depth_finals(writer: synthetic.Writer, gaps: list[float], bad: dict[str, set[int]], generation: int = 0) -> None:
    """A contrast 'depth' whose changed side is higher by these gaps, one a replica; `bad` names what diverged."""
    for number in range(2 * len(gaps)):
        replica, side = number // 2, ("base", "changed")[number % 2]
        diverged = replica in bad.get(side, ())
        loss = 2.5 + 0.01 * replica + (gaps[replica] if side == "changed" else 0.0)
        writer.trial(
            number,
            {**synthetic.BASELINE, "model.layers": 2 if side == "base" else 4},
            [(synthetic.BUDGET, loss)],
            status=Status.DIVERGED if diverged else Status.OK,
            stage=Stage.FINAL,
            tags={Tag.CANDIDATE: f"depth/{side}", Tag.REPLICA: str(replica)},
            metrics={Metric.TOKENS_PER_SECOND: 1e9 if (replica, side) == (0, "base") else 1000.0},
            generation=generation,
        )


def depth_writer(empty_store: Path, tmp_path: Path) -> synthetic.Writer:
    root = tmp_path / "mlruns"
    shutil.copytree(empty_store, root)
    return synthetic.Writer(store_uri(root), root, "depth")


LOWER = [-0.40, -0.41, -0.40, -0.39, -0.40, -0.41]


@pytest.mark.parametrize(("bad", "mirror"), [({"changed": {0, 2, 4}}, 1), ({"base": {0, 2, 4}}, -1)])
def test_the_side_that_fails_more_often_never_wins(
    empty_store: Path, tmp_path: Path, bad: dict[str, set[int]], mirror: int
) -> None:
    writer = depth_writer(empty_store, tmp_path)
    depth_finals(writer, [mirror * gap for gap in LOWER], bad)
    found = load_search(writer.uri, "depth")
    (depth,) = contrasts(found, alpha=0.4)
    frail, sound = ("layers=4", "layers=2") if mirror == 1 else ("layers=2", "layers=4")
    assert (depth.verdict.n, depth.verdict.kind) == (3, "undecided")
    assert depth.verdict.high < 0 or depth.verdict.low > 0, "the pairs alone would decide"
    assert depth.text.startswith(f"undecided: {frail} fails 3 of 6 seeds, {sound} 0 of 6; layers=4 minus layers=2 is")
    assert f"depth: {depth.text}" in undecided_lines(found, main_effects(found), [depth])
    json.dumps(depth.to_json(), allow_nan=False)


def test_a_side_that_loses_and_fails_too_is_worse(empty_store: Path, tmp_path: Path) -> None:
    writer = depth_writer(empty_store, tmp_path)
    depth_finals(writer, [-gap for gap in LOWER], {"changed": {0, 2}})
    (depth,) = contrasts(load_search(writer.uri, "depth"))
    assert depth.verdict.kind == "worse"
    assert depth.text.startswith("layers=2 beats layers=4 by 0.4")
    assert "2 seed(s) of layers=4 ended badly" in depth.text


def test_a_side_that_fails_on_every_seed_is_named(empty_store: Path, tmp_path: Path) -> None:
    writer = depth_writer(empty_store, tmp_path)
    depth_finals(writer, LOWER[:4], {"changed": {0, 1, 2, 3}})
    (depth,) = contrasts(load_search(writer.uri, "depth"))
    assert depth.text == (
        "undecided: layers=4 fails 4 of 4 seeds, layers=2 0 of 4; there is no seed on which both ended well"
    )


def test_costs_are_those_of_complete_pairs(empty_store: Path, tmp_path: Path) -> None:
    writer = depth_writer(empty_store, tmp_path)
    depth_finals(writer, LOWER, {"changed": {0}})
    (depth,) = contrasts(load_search(writer.uri, "depth"))
    assert depth.costs["tokens/s"] == pytest.approx(0.0), "the base of the broken pair ran a million times faster"


def test_the_newest_generation_alone_is_judged_and_found(empty_store: Path, tmp_path: Path) -> None:
    writer = depth_writer(empty_store, tmp_path)
    # Written newest first: neither the order of writing nor that of text may choose.
    depth_finals(writer, [-gap for gap in LOWER], {}, generation=10)
    depth_finals(writer, [-9.0, *LOWER, *LOWER], {}, generation=9)
    found = load_search(writer.uri, "depth")
    assert set(found.finals["generation"]) == {10}
    (depth,) = contrasts(found)
    assert (depth.verdict.kind, depth.verdict.n) == ("worse", 6)
    (listed,) = list_searches(writer.uri)
    assert listed.finals == 12
    newest = set(found.finals["run_id"])
    assert find_run(writer.uri, "depth/final/3").run_id in newest
    assert Store(locate(writer.uri)).find_run("depth/final/3").info.run_id in newest
