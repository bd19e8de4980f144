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
from analysis.load import load_search
from analysis.text import undecided_lines, verdicts_text
from analysis.verdicts import contrasts
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
