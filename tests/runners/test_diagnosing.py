"""Checkups: no number of a training changes, faults are named in the store and on the screen, and replays agree."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file
from tracked import Searched, children, searched, steps, store_uri, train_search

from analysis.load import load_search
from runners import cli
from runners.candidate import full_space
from runners.comparison import CLOCK, compare, spread_of
from runners.replay import replay
from runners.rows import result_json
from runners.store import Store
from runners.tasks import TASKS
from runners.train import run_trial
from search_space.checkup import PREFIX
from search_space.experiment import preset_path, read
from search_space.places import locate
from search_space.records import Artifact, Metric, Status, Tag, TrialResult, result_from_plain
from tests.runners.specs import Prepared, keep_going, losses, prepare, run

ASKED = "search.diagnostics=true"
MIXERS_WITHOUT_WEIGHTS = ("model.mixer=mamba2", "model.position=none")


def trained(made: Prepared, weights: Path) -> tuple[TrialResult, dict[str, torch.Tensor]]:
    result = run_trial(made.spec, made.data, keep_going, weights=weights)
    assert result.status is Status.OK, result.last_lines
    return result, load_file(weights)


DROPPING = ("model.residual_dropout=0.2", "model.mixer.softmax.attention_dropout=0.1")


@pytest.mark.parametrize(
    "overrides",
    [DROPPING, pytest.param(("model.ffn=moe_bias",), marks=pytest.mark.slow)],
    ids=["dropout", "experts"],
)
def test_checkups_change_no_number_of_the_training(overrides: tuple[str, ...], tmp_path: Path) -> None:
    plain, weights = trained(prepare(*overrides), tmp_path / "plain")
    looked, others = trained(prepare(*overrides, ASKED), tmp_path / "looked")
    assert [checkup.tokens for checkup in looked.checkups] == [640, 2560]
    assert plain.checkups == ()
    assert losses(plain) == losses(looked)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert {k: v for k, v in plain.metrics.items() if k not in CLOCK} == {
        k: v for k, v in looked.metrics.items() if k not in CLOCK
    }


@pytest.mark.slow
def test_a_checkup_holds_finite_numbers_of_every_kind() -> None:
    result = run(prepare(ASKED, "model.layers=2"))
    first, last = result.checkups
    names = {name.removeprefix(PREFIX) for name in first.metrics}
    assert {"entropy", "sink_heads", "repeated_heads", "rank_share", "residual_rms_last", "gradient_spread"} < names
    assert {"update_ratio", "dead_units", "position_r2", "order_effect", "largest_logit", "warnings"} < names
    assert "diagnostics/update_ratio" not in last.metrics, "a schedule's last step says nothing about the others"
    assert all(math.isfinite(value) for checkup in result.checkups for value in checkup.metrics.values())
    for checkup in result.checkups:
        assert [len(layer["entropy"]) for layer in checkup.layers] == [2, 2]
        assert set(checkup.gradients) == {"layer 1", "layer 2", "outside"}
        assert checkup.metrics["diagnostics/warnings"] == len(checkup.warnings)
    assert result_from_plain(json.loads(result_json(result))) == result


def test_a_mixer_without_weights_is_diagnosed_and_named() -> None:
    result = run(prepare(ASKED, *MIXERS_WITHOUT_WEIGHTS))
    assert result.status is Status.OK, result.last_lines
    assert [checkup.notes for checkup in result.checkups] == [
        ("layer 1: no attention weights can be read off mamba2",)
    ] * 2
    assert "diagnostics/entropy" not in result.checkups[0].metrics
    assert result.checkups[0].metrics["diagnostics/rank_share"] > 0


@pytest.mark.slow
def test_a_pruned_trial_keeps_its_first_checkup() -> None:
    result = run(prepare(ASKED), lambda reading: False)
    assert result.status is Status.PRUNED
    assert [checkup.tokens for checkup in result.checkups] == [640]


@pytest.mark.slow
def test_steps_that_are_far_too_large_are_named_with_their_place() -> None:
    fast, usual = (
        [words for checkup in run(prepare(ASKED, f"optimizer.adamw.learning_rate={rate}")).checkups
         for words in checkup.warnings if "one step moved" in words]
        for rate in (0.1, 0.003)
    )  # fmt: skip
    assert all(words.startswith("layer 1: one step moved the ") for words in fast)
    assert fast[0].endswith("; lower the learning rate")
    assert fast[1] == f"{fast[0]} (at 640 tokens)"
    assert usual == []


@pytest.mark.slow
def test_half_precision_is_looked_at_in_half_precision() -> None:
    result = run(prepare(ASKED, "engine.dtype=bfloat16"))
    assert result.status is Status.OK, result.last_lines
    assert [len(layer["entropy"]) for layer in result.checkups[-1].layers] == [2]


def diagnosed() -> Searched:
    """The tiny search with diagnostics."""
    plain = searched()
    text = plain.experiment.text.replace("sampler: random", "sampler: random, diagnostics: true")
    return dataclasses.replace(plain, experiment=read(text, full_space=full_space, tasks=TASKS))


@pytest.mark.slow
def test_the_store_holds_checkups_and_replays_agree_on_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = store_uri(tmp_path)
    train_search(uri, trials=2, search=diagnosed(), prune_at={1: 4096})
    store, (whole, cut) = Store(locate(uri)), children(uri)
    client = MlflowClient(uri)
    assert steps(client, whole, "diagnostics/entropy") == [2048, 8192]
    assert steps(client, cut, "diagnostics/entropy") == [2048]
    kept = json.loads(store.text(whole, Artifact.DIAGNOSTICS))
    assert [checkup["tokens"] for checkup in kept] == [2048, 8192]
    assert len(kept[0]["layers"]) == 1
    warnings = kept[-1]["warnings"]
    assert whole.data.tags.get(Tag.WARNINGS, "").splitlines() == warnings
    assert "diagnostics at 8,192 tokens" in whole.data.tags[Tag.NOTE]
    assert "assay replay tiny/0" in whole.data.tags[Tag.NOTE]
    frame = load_search(uri, "tiny").trials
    assert frame["diagnostics/entropy"].iloc[0] == kept[-1]["metrics"]["diagnostics/entropy"]
    assert frame["diagnostics/entropy"].notna().all()
    report = replay("tiny/0", uri)
    assert report.bit_equal, report.text()
    assert report.compared > 40
    client.set_tag(whole.info.run_id, Tag.WARNINGS, "layer 3: 6 of 8 heads attend only to token 1")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["show", "tiny/0", "--tracking-uri", uri]) == 0
    assert "  warning  layer 3: 6 of 8 heads attend only to token 1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkup_that_was_altered_is_found_by_the_replay() -> None:
    made = prepare(ASKED)
    one = run(made)
    other = dataclasses.replace(one.checkups[-1], metrics={**one.checkups[-1].metrics, "diagnostics/entropy": 1.0})
    changed = dataclasses.replace(one, checkups=(one.checkups[0], other))
    report = compare(run="r", spec=made.spec, recorded=changed, replayed=one, spread=spread_of({}), code=())
    assert [(deviation.name, deviation.tokens) for deviation in report.deviations] == [("diagnostics/entropy", 2560)]


@pytest.mark.slow
def test_checkups_of_a_trial_of_the_quickstart_take_less_than_3_percent_and_find_nothing_amiss() -> None:
    made = prepare(ASKED, text=preset_path("quickstart").read_text())
    result = run(made)
    assert result.status is Status.OK, result.last_lines
    assert len(result.checkups) == 2
    assert 0 < result.metrics[Metric.SECONDS_DIAGNOSE] < 0.03 * result.metrics[Metric.SECONDS]
    assert result.checkups[-1].warnings == ()
