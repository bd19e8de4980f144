"""Digests never change; flat and nested forms are inverse."""

import math
import subprocess
import sys

import pytest

from search_space.canon import canonical_json, digest, flatten, seed_from, unflatten

GOLDEN = [
    ({}, "8d764ced1511"),
    ({"b": 1, "a": [True, None, "ü", 1e-3, 3.0]}, "33c5238035f6"),
    ("model.layers", "322c68cd3cd5"),
    (2**63 - 1, "9d0ea53267a6"),
]


@pytest.mark.parametrize(("value", "expected"), GOLDEN)
def test_golden_digests_never_change(value: object, expected: str) -> None:
    assert digest(value) == expected


def test_golden_seeds_never_change() -> None:
    assert seed_from("search", 0, "init") == 2254441223461005916
    assert seed_from(7) == 4359823973405836615


def test_seeds_are_63_bit_and_keep_their_parts_apart() -> None:
    assert seed_from("ab", "c") != seed_from("a", "bc")
    assert all(0 <= seed_from("x", n) < 2**63 for n in range(1000))
    assert len({seed_from("x", n) for n in range(1000)}) == 1000


def test_key_order_does_not_matter_but_list_order_does() -> None:
    assert canonical_json({"b": 1, "a": 2}) == canonical_json({"a": 2, "b": 1}) == '{"a":2,"b":1}'
    assert digest([1, 2]) != digest([2, 1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_without_a_json_form_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"x": value})


def test_flat_and_nested_forms_are_inverse() -> None:
    nested = {"a": {"kind": "x", "x": {"n": 1, "f": 0.5}}, "b": True, "c": "s"}
    flat = flatten(nested)
    assert flat == {"a.kind": "x", "a.x.n": 1, "a.x.f": 0.5, "b": True, "c": "s"}
    assert unflatten(flat) == nested


def test_only_scalars_and_undotted_keys_are_flattened() -> None:
    with pytest.raises(AssertionError, match="not a scalar"):
        flatten({"a": [1]})
    with pytest.raises(AssertionError, match="dot"):
        flatten({"a.b": 1})


def test_another_process_with_another_hash_seed_gives_the_same_digest() -> None:
    code = "from search_space.canon import *; print(digest({'b': 2, 'a': 'x'}), seed_from('q'))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{digest({'b': 2, 'a': 'x'})} {seed_from('q')}\n"}
