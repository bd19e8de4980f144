"""A file can ask for any part of the space and for nothing outside it."""

import math
from typing import Any

import pytest
from toy_space import toy_space

from search_space.domains import Choice, FloatRange, IntRange
from search_space.space import NarrowingError, OneOf, Space, narrow, searched, size

FULL = toy_space()


def model(spec: dict[str, Any]) -> Any:
    """The fields of the narrowed model."""
    space = narrow(FULL, {"model": spec}).fields["model"]
    assert isinstance(space, Space)
    return space.fields


def test_a_scalar_fixes_a_list_chooses_and_a_mapping_is_a_range() -> None:
    assert model({"layers": 2})["layers"] == Choice(options=(2,), default=2, help="layers")
    assert model({"layers": [2, 8]})["layers"] == Choice(options=(2, 8), default=2, help="layers")
    assert model({"layers": {"low": 2, "high": 9, "step": 2}})["layers"] == IntRange(
        low=2, high=8, step=2, default=4, help="layers"
    )
    assert model({"layers": {"low": 2, "high": 9, "log": True}})["layers"].log


def test_the_declared_default_is_kept_where_the_file_keeps_it() -> None:
    assert model({"layers": [8, 4]})["layers"].default == 4
    assert model({"layers": {"low": 6, "high": 9}})["layers"].default == 6
    assert model({"mixer": ["linear", "softmax"]})["mixer"].default == "softmax"
    assert model({"mixer": "linear"})["mixer"].default == "linear"


def test_what_is_not_named_keeps_its_domain_except_opt_in_fields() -> None:
    fields = model({})
    assert fields["layers"] == FULL.fields["model"].fields["layers"]  # type: ignore[union-attr]
    assert set(fields["mixer"].variants) == {"linear", "softmax"}
    assert set(fields["pattern"].variants) == {"uniform"}
    assert fields["mixer"].variants["softmax"].fields["dropout"] == Choice(options=(0.0,), default=0.0)


def test_an_opt_in_field_is_opened_by_naming_it() -> None:
    fields = model({"mixer": {"softmax": {"dropout": {"low": 0, "high": 0.1}}}, "pattern": ["uniform", "every_nth"]})
    assert fields["mixer"].variants["softmax"].fields["dropout"] == FloatRange(
        low=0.0, high=0.1, default=0.0, help="dropout"
    )
    assert set(fields["pattern"].variants) == {"uniform", "every_nth"}


def test_variants_are_named_by_a_word_a_list_a_mapping_or_a_list_of_both() -> None:
    assert set(model({"mixer": "linear"})["mixer"].variants) == {"linear"}
    assert set(model({"mixer": ["linear", "softmax"]})["mixer"].variants) == {"linear", "softmax"}
    mapped = model({"mixer": {"softmax": {"heads": 4}, "linear": None}})["mixer"]
    mixed = model({"mixer": [{"softmax": {"heads": 4}}, "linear"]})["mixer"]
    assert mapped == mixed
    assert mapped.variants["softmax"].fields["heads"] == Choice(options=(4,), default=4, help="heads")


def test_the_order_in_which_a_file_lists_things_does_not_matter() -> None:
    one = {"model": {"layers": [2, 8, 4], "tied": [False, True], "mixer": ["softmax", "linear"]}}
    other = {"model": {"layers": [8, 4, 2], "tied": [True, False], "mixer": {"linear": None, "softmax": None}}}
    assert searched(narrow(FULL, one)) == searched(narrow(FULL, other))
    assert narrow(FULL, one).id == narrow(FULL, other).id


def test_families_inside_families_are_narrowed() -> None:
    pattern = model({"pattern": {"every_nth": {"every": 4, "mixer": {"softmax": {"heads": [1, 2]}}}}})["pattern"]
    inner = pattern.variants["every_nth"].fields["mixer"]
    assert isinstance(inner, OneOf)
    assert set(inner.variants) == {"softmax"}
    assert inner.variants["softmax"].fields["heads"] == Choice(options=(1, 2), default=2, help="heads")
    assert "model.pattern.every_nth.mixer.softmax.heads" in searched(
        narrow(FULL, {"model": {"pattern": {"every_nth": {"mixer": "softmax"}}}})
    )


def test_numbers_take_the_kind_of_their_field() -> None:
    assert model({"layers": 4.0})["layers"].options == (4,)
    base = model({"position": {"rotary": {"base": 1000}}})["position"].variants["rotary"].fields["base"]
    assert base.options == (1000.0,)
    assert isinstance(base.options[0], float)
    rate = narrow(FULL, {"optimizer": {"adamw": {"learning_rate": [1e-3]}}})
    assert size(rate.fields["optimizer"].variants["adamw"]) == 1  # type: ignore[union-attr]


def test_a_step_over_reals_is_a_list_that_ends_at_high() -> None:
    spec = {"optimizer": {"adamw": {"learning_rate": {"low": 0.01, "high": 0.05, "step": 0.01}}}}
    adamw = narrow(FULL, spec).fields["optimizer"].variants["adamw"]  # type: ignore[union-attr]
    assert adamw.fields["learning_rate"].options == (0.01, 0.02, 0.03, 0.04, 0.05)


def test_narrowing_twice_with_the_same_request_changes_nothing() -> None:
    spec = {"model": {"layers": [2, 4], "mixer": {"softmax": {"heads": [1, 2]}}, "position": ["none"]}}
    once = narrow(FULL, spec)
    assert narrow(once, spec).id == once.id


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 3}, "model", "takes a mapping with fields"),
    ({"modle": {}}, "modle", "did you mean 'model'"),
    ({"model": {"layers": True}}, "model.layers", "takes 1 to 64; got True, write a number"),
    ({"model": {"layers": "four"}}, "model.layers", "takes 1 to 64"),
    ({"model": {"layers": None}}, "model.layers", "takes 1 to 64"),
    ({"model": {"layers": [[1]]}}, "model.layers", "takes 1 to 64"),
    ({"model": {"layers": math.nan}}, "model.layers", "takes 1 to 64"),
    ({"model": {"layers": math.inf}}, "model.layers", "takes 1 to 64"),
    ({"model": {"layers": 2.5}}, "model.layers", "takes 1 to 64; got 2.5, write 3"),
    ({"model": {"layers": -7}}, "model.layers", "write 1"),
    ({"model": {"layers": 1e300}}, "model.layers", "write 64"),
    ({"model": {"d_model": 100}}, "model.d_model", "write 96"),
    ({"model": {"mixer": {"softmax": {"heads": 3}}}}, "model.mixer.softmax.heads", "got 3, write 2"),
    ({"model": {"mixer": {"softmax": {"heads": "two"}}}}, "model.mixer.softmax.heads", "write one of these"),
    ({"model": {"mixer": {"linear": {"feature_map": "rleu"}}}}, "model.mixer.linear.feature_map", "write 'relu'"),
    ({"optimizer": {"adamw": {"learning_rate": 7}}}, "optimizer.adamw.learning_rate", "write 0.1"),
    ({"model": {"layers": {}}}, "model.layers", "without 'low'"),
    ({"model": {"layers": {"low": 2, "high": 99}}}, "model.layers.high", "takes 1 to 64"),
    ({"model": {"layers": {"low": 2, "high": 8, "log": "yes"}}}, "model.layers.log", "true or false"),
    ({"model": {"layers": {"low": 2, "high": 8, "step": 0}}}, "model.layers.step", "above zero"),
    ({"model": {"layers": {"low": 2, "high": 8, "step": math.nan}}}, "model.layers.step", "above zero"),
    ({"model": {"layers": {"low": 2, "high": 8, "step": 1.5}}}, "model.layers.step", "multiple of 1"),
    ({"model": {"d_model": {"low": 64, "high": 128, "step": 24}}}, "model.d_model.step", "multiple of 16"),
    ({"model": {"d_model": {"low": 64, "high": 128, "log": True}}}, "model.d_model", "leave log out"),
    ({"model": {"tied": 1}}, "model.tied", "one of true, false; got 1, write one of these"),
    ({"model": {"tied": "True"}}, "model.tied", "got 'True', write true"),
    ({"model": {"mixer": 3}}, "model.mixer", "one or more of linear, softmax"),
    ({"model": {"mixer": [3]}}, "model.mixer", "names of variants"),
    ({"model": {"mixer": []}}, "model.mixer", "picks no variant"),
    ({"model": {"mixer": {"softmax": []}}}, "model.mixer.softmax", "takes a mapping"),
    ({"model": {"layers": list(range(2000))}}, "model.layers", "write a range"),
    (
        {"model": {"mixer": {"softmax": {"dropout": {"low": 0, "high": 0.1, "log": True}}}}},
        "model.mixer.softmax.dropout",
        "starts above zero",
    ),
]


@pytest.mark.parametrize(("spec", "path", "words"), BAD, ids=lambda value: str(value)[:40])
def test_a_request_outside_the_space_names_the_path_and_the_rule(spec: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(NarrowingError) as caught:
        narrow(FULL, spec)
    assert caught.value.path == path
    assert words in caught.value.message
