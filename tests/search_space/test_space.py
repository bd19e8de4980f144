"""Walking, drawing, enumerating, counting and holding speak of the same set of points."""

import math
import random

import pytest
from toy_space import AbstractMixer, EveryNth, toy_space

from search_space.canon import unflatten
from search_space.domains import Choice, IntRange
from search_space.space import (
    OneOf,
    Space,
    conditional,
    default_point,
    derive,
    enumerate_all,
    holds,
    narrow,
    random_point,
    searched,
    size,
    walk,
)

FULL = toy_space()
FINITE = narrow(
    FULL,
    {
        "model": {
            "d_model": [64, 128],
            "layers": {"low": 2, "high": 6, "step": 2},
            "pattern": {"uniform": None, "every_nth": {"every": [2, 3], "mixer": ["linear", "softmax"]}},
        },
        "optimizer": {"adamw": {"learning_rate": [1e-3, 1e-2]}},
    },
)


def test_golden_space_ids_never_change() -> None:
    assert FULL.id == "0633dc8decb9"
    assert FINITE.id == "cb16d55c5148"


def test_a_finite_space_enumerates_as_many_distinct_points_as_its_size_and_holds_each() -> None:
    points = list(enumerate_all(FINITE))
    assert len(points) == size(FINITE) == len({tuple(sorted(point.items())) for point in points})
    assert all(holds(FINITE, point) for point in points)
    # widths x depths x tied x mixers x (uniform + periods x other mixers) x positions x rates
    assert len(points) == 2 * 3 * 2 * (3 + 2) * (1 + 2 * (2 + 3)) * (1 + 2) * 2


def test_random_points_are_in_the_space_and_reach_every_variant() -> None:
    rng = random.Random(0)
    points = [random_point(FINITE, rng) for _ in range(300)]
    assert all(holds(FINITE, point) and holds(toy_space(), point) for point in points)
    assert {point["model.pattern.kind"] for point in points} == {"uniform", "every_nth"}
    assert {point.get("model.pattern.every_nth.mixer.kind") for point in points} == {None, "linear", "softmax"}


def test_walking_a_stored_point_gives_it_back_and_asks_only_what_is_open() -> None:
    point = random_point(FINITE, random.Random(3))
    asked: list[str] = []

    def ask(path: str, domain: object) -> object:
        asked.append(path)
        return point[path]

    assert walk(FINITE, ask) == point  # type: ignore[arg-type]
    assert set(asked) <= set(searched(FINITE))
    assert "model.mixer.softmax.dropout" not in asked


def test_the_default_point_takes_every_declared_default() -> None:
    assert default_point(narrow(FULL, {})) == {
        "model.d_model": 128,
        "model.layers": 4,
        "model.tied": True,
        "model.mixer.kind": "softmax",
        "model.mixer.softmax.heads": 2,
        "model.mixer.softmax.dropout": 0.0,
        "model.pattern.kind": "uniform",
        "model.position.kind": "rotary",
        "model.position.rotary.base": 10000.0,
        "optimizer.kind": "adamw",
        "optimizer.adamw.learning_rate": 3e-3,
    }


def test_a_point_with_a_dead_missing_or_foreign_value_is_not_held() -> None:
    point = default_point(FINITE)
    assert holds(FINITE, point)
    assert not holds(FINITE, {**point, "model.mixer.linear.feature_map": "elu"})
    assert not holds(FINITE, {path: value for path, value in point.items() if path != "model.layers"})
    assert not holds(FINITE, {**point, "model.layers": 3})
    assert not holds(FINITE, {**point, "model.tied": 1})
    assert not holds(FINITE, {**point, "model.mixer.kind": "conv"})
    assert not holds(narrow(FULL, {"model": {"layers": 2}}), point | {"model.layers": 3})


def test_fields_without_a_domain_are_left_out_of_the_space() -> None:
    model = FULL.fields["model"]
    assert isinstance(model, Space)
    assert "vocab_size" not in model.fields


def test_searched_and_conditional_paths() -> None:
    narrowed = narrow(FULL, {"model": {"d_model": 64, "layers": 2, "position": "none", "tied": True}})
    assert set(searched(narrowed)) == {
        "model.mixer.kind",
        "model.mixer.linear.feature_map",
        "model.mixer.softmax.heads",
        "optimizer.adamw.learning_rate",
    }
    assert conditional(narrowed) == {"model.mixer.linear.feature_map", "model.mixer.softmax.heads"}
    assert conditional(narrow(narrowed, {"model": {"mixer": "softmax"}})) == set()


def test_a_choice_of_variants_inside_a_searched_variant_is_conditional() -> None:
    assert "model.pattern.every_nth.mixer.kind" in conditional(FINITE)


def test_the_size_of_a_space_with_a_real_interval_is_infinite_and_it_is_not_enumerated() -> None:
    assert size(FULL) == math.inf
    with pytest.raises(AssertionError, match="real interval"):
        next(enumerate_all(FULL))


def test_defaults_and_help_do_not_change_the_id_but_every_domain_does() -> None:
    first = Space(fields={"a": IntRange(low=1, high=3, default=1, help="x")}, help="y")
    assert first.id == Space(fields={"a": IntRange(low=1, high=3, default=2)}).id
    assert first.id != Space(fields={"a": IntRange(low=1, high=4, default=1)}).id
    assert first.id != Space(fields={"b": IntRange(low=1, high=3, default=1)}).id
    assert first.id != Space(fields={"a": Choice(options=(1, 2, 3), default=1)}).id


def test_the_last_field_moves_fastest_in_an_enumeration() -> None:
    space = Space(
        fields={"a": Choice(options=(1, 2), default=1), "b": Choice(options=("x", "y"), default="x")},
    )
    assert [tuple(point.values()) for point in enumerate_all(space)] == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]


def test_a_family_inside_a_family_is_derived() -> None:
    space = derive(EveryNth, lambda abstract: {"softmax": EveryNth} if abstract is not AbstractMixer else {})
    mixer = space.fields["mixer"]
    assert isinstance(mixer, OneOf)
    pattern = FULL.fields["model"].fields["pattern"]  # type: ignore[union-attr]
    assert isinstance(pattern, OneOf)
    assert isinstance(pattern.variants["every_nth"].fields["mixer"], OneOf)


def test_a_point_unflattens_to_kinds_with_their_fields() -> None:
    nested = unflatten(default_point(FINITE))
    assert nested["model"]["mixer"] == {"kind": "softmax", "softmax": {"heads": 2, "dropout": 0.0}}
    assert nested["model"]["pattern"] == {"kind": "uniform"}
