"""Specs and results survive the way through plain data; their ids never change."""

import dataclasses
import json

import pytest

from search_space.checkup import Checkup
from search_space.records import (
    Budget,
    Reading,
    Seeds,
    Status,
    TrialResult,
    TrialSpec,
    result_from_plain,
    spec_from_plain,
    to_plain,
)

SPEC = TrialSpec(
    candidate={"model": {"layers": 2, "mixer": {"kind": "softmax", "softmax": {"kv_heads": 1}}}},
    task={"kind": "python_source", "python_source": {"seq_len": 64, "eval_lengths": []}},
    data_fingerprint="f" * 64,
    budget=Budget(
        tokens=204800, batch_tokens=1024, micro_batch_tokens=1024, eval_tokens=8192, eval_every=25600, max_seconds=60.0
    ),
    seeds=Seeds(init=1, data=2, dropout=3),
    device="cpu",
    dtype="float32",
    threads=1,
    deterministic=True,
    blocks=("my_package.my_mixer",),
    space_id="0" * 12,
)
RESULT = TrialResult(
    status=Status.PRUNED,
    reason="rung 1",
    metrics={"loss": 2.5},
    curve=(Reading(tokens=1024, loss=3.0, train_loss=3.1, seconds=0.5),),
    tokens=1024,
    environment={"torch": "2.13.0"},
)


def test_golden_ids_of_a_spec_never_change() -> None:
    assert SPEC.id == "0dd1918e7f49"
    assert SPEC.point_id == "473d2a75d7ee"


def test_a_spec_comes_back_from_json() -> None:
    assert spec_from_plain(json.loads(json.dumps(to_plain(SPEC)))) == SPEC


def test_a_result_comes_back_from_json() -> None:
    assert result_from_plain(json.loads(json.dumps(to_plain(RESULT)))) == RESULT


def test_fields_that_came_later_are_absent_from_plain_data_until_they_are_used() -> None:
    assert "diagnostics" not in to_plain(SPEC)
    assert "checkups" not in to_plain(RESULT)
    asked = dataclasses.replace(SPEC, diagnostics=True)
    assert asked.id != SPEC.id
    assert spec_from_plain(json.loads(json.dumps(to_plain(asked)))) == asked


def test_checkups_come_back_from_json() -> None:
    checkup = Checkup(
        tokens=1024,
        metrics={"diagnostics/entropy": 1.5},
        layers=({"rms": 1.0, "rank": 9.5, "dead_units": 0.0, "entropy": [1.0, 2.0]},),
        gradients={"layer 1": {"query": 0.5}},
        updates={},
        warnings=("layer 1: 6 of 8 heads attend only to token 1",),
    )
    looked = dataclasses.replace(RESULT, checkups=(checkup,))
    assert result_from_plain(json.loads(json.dumps(to_plain(looked)))) == looked


def test_seeds_change_the_spec_but_not_the_point() -> None:
    other = dataclasses.replace(SPEC, seeds=Seeds(init=9, data=2, dropout=3))
    assert other.id != SPEC.id
    assert other.point_id == SPEC.point_id


@pytest.mark.parametrize("field", ["data_fingerprint", "device", "dtype", "space_id"])
def test_everything_else_changes_the_point(field: str) -> None:
    other = dataclasses.replace(SPEC, **{field: "another"})
    assert other.point_id != SPEC.point_id


def test_status_values_never_change() -> None:
    assert [status.value for status in Status] == [
        "ok",
        "pruned",
        "infeasible",
        "diverged",
        "out_of_memory",
        "preempted",
        "timed_out",
        "failed",
    ]
