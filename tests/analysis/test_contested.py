"""Tests of analysis/contested.py: how the finals of the best candidates read from the tracking store."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic
from conftest import store_uri

from analysis.contested import bootstrap, contested
from analysis.frame import Search
from analysis.load import load_search
from analysis.text import verdicts_text
from analysis.verdicts import contrasts
from search_space.contest import CONTEST
from search_space.records import Artifact, Metric, Stage, Status, Tag

SOURCES = ["baseline of the experiment", "meet/3", "meet/7"]
TERMS = {"top": 2, "delta": 0.0, "max_seeds": 8, "sweep": 5, "alpha": 0.04, "at_length": 0, "contestants": SOURCES}
GAPS = (0.0, -0.2, 0.0)
DOCUMENTS = 40


@pytest.fixture(scope="module")
def met(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A search whose baseline met two finalists in six replicas, of which the last one of the baseline still trains."""
    root = tmp_path_factory.mktemp("met") / "mlruns"
    shutil.copytree(empty_store, root)
    writer = synthetic.Writer(store_uri(root), root, "meet")
    writer.client.set_tag(writer.parent, Tag.CONTEST, json.dumps(TERMS))
    rng = np.random.default_rng(0)
    writer.trial(0, synthetic.BASELINE, synthetic.curve(2.5, rng, 0.01))
    flats = [
        synthetic.BASELINE,
        {**synthetic.BASELINE, "model.position.kind": "rotary", "model.ffn.kind": "swiglu", synthetic.RATE: 4e-3},
        {**synthetic.BASELINE, "model.layers": 3},
    ]
    number = 0
    for replica in range(6):
        common = rng.standard_normal()
        for side, flat in enumerate(flats):
            bad = (side, replica) == (2, 1)
            loss = 2.0 + common + GAPS[side] + 0.01 * rng.standard_normal()
            tags = {Tag.CANDIDATE: f"{CONTEST}/{side}", Tag.REPLICA: str(replica)}
            if side == 2:
                tags[Tag.UNTUNED] = "not tuned: its best learning rate is at the end of its sweep"
            run = writer.trial(
                number,
                flat,
                [(synthetic.EVERY, 3.0)] if bad else synthetic.curve(loss, rng, 0.0),
                stage=Stage.FINAL,
                status=Status.DIVERGED if bad else Status.OK,
                metrics={} if bad else {Metric.TEST_LOSS: loss},
                tags=tags,
                running=(side, replica) == (0, 5),
            )
            spread = loss + np.linspace(-0.5, 0.5, DOCUMENTS) * (1 + 0.2 * side)
            kept = {"document_losses": spread.tolist(), "document_counts": [64] * DOCUMENTS}
            writer.client.log_text(run, json.dumps(kept), Artifact.RESULT)
            number += 1
    writer.finish()
    return load_search(store_uri(root), "meet")


def test_each_finalist_is_judged_at_its_share_over_the_pairs_in_a_row(met: Search) -> None:
    first, second = contrasts(met)
    assert [first.name, second.name] == ["meet/3", "meet/7"]
    assert first.verdict.alpha == second.verdict.alpha == 0.02
    assert first.pairs["replica"].tolist() == [0, 1, 2, 3, 4]
    assert second.pairs["replica"].tolist() == [0, 2, 3, 4]
    assert (first.verdict.kind, second.verdict.kind) == ("better", "undecided")
    assert "chance that any of them is wrong is at most 4 %" in verdicts_text(met)
    assert "(test split" in verdicts_text(met)


def test_a_verdict_reads_with_interval_documents_and_costs(met: Search) -> None:
    first, second = contrasts(met)
    assert first.text.startswith("rotary+swiglu beats baseline by 0.2")
    assert "5 paired seeds, [0.1" in first.text
    assert "over test documents, equal parameters" in first.text
    assert "not tuned" not in first.text
    assert "undecided: layers=3 minus baseline is" in second.text
    assert "1 seed(s) of layers=3 ended badly" in second.text
    assert "not tuned: its best learning rate is at the end of its sweep" in second.text
    json.dumps([first.to_json(), second.to_json()], allow_nan=False)


def test_the_interval_over_documents_is_about_the_documents_alone(met: Search) -> None:
    first = contrasts(met)[0]
    assert first.documents is not None
    low, high = first.documents
    deviation = np.std(np.linspace(-0.5, 0.5, DOCUMENTS) * 0.2) / np.sqrt(DOCUMENTS)
    assert (low + high) / 2 == pytest.approx(first.verdict.estimate, abs=0.2 * deviation)
    assert (high - low) / 2 == pytest.approx(2.33 * deviation, rel=0.1)


def test_the_bootstrap_heeds_weights_and_level() -> None:
    differences, weights = np.array([0.0, 0.0, 0.0, 1.0]), np.array([1.0, 1.0, 1.0, 1e-12])
    assert bootstrap(differences, weights, 0.5) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert bootstrap(differences, np.ones(4), 0.5)[1] > 0.2
    values = np.random.default_rng(1).standard_normal(200)
    wide, narrow = (bootstrap(values, np.ones(200), alpha) for alpha in (0.01, 0.2))
    assert wide[0] < narrow[0] < values.mean() < narrow[1] < wide[1]


def test_candidates_that_got_no_place_are_not_judged(met: Search) -> None:
    first = met.frame[met.frame["stage"] == Stage.FINAL].iloc[0]
    losses = {1: 1.0, 2: 1.2, 3: 2.0, 4: 1.9}
    tried = [
        {
            **first,
            "stage": Stage.SWEEP,
            "candidate": f"{CONTEST}/{k}",
            "replica": 0,
            Metric.LOSS: loss,
            "run_id": f"s{k}",
        }
        for k, loss in losses.items()
    ]
    terms = {**TERMS, "contestants": [*SOURCES, "meet/8", "meet/9"], "searched": [1.3, 1.2, 1.1, 1.0]}
    run = dataclasses.replace(met.parent.run, tags={**met.parent.run.tags, Tag.CONTEST: json.dumps(terms)})
    frame = pd.concat([met.frame, pd.DataFrame(tried)], ignore_index=True)
    crowded = dataclasses.replace(met, frame=frame, parent=dataclasses.replace(met.parent, run=run))
    assert [contrast.name for contrast in contrasts(crowded)] == ["meet/3", "meet/7"]
    assert {contrast.verdict.alpha for contrast in contrasts(crowded)} == {0.02}
    unknown = dataclasses.replace(crowded, frame=frame[frame["run_id"] != "s4"])
    assert contrasts(unknown) == []


def test_without_terms_there_is_no_contest(search: Search) -> None:
    assert contested(search) is None
