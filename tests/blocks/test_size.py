"""The size solver: lands within tolerance, keeps the FFN's shape, refuses little, and is quick."""

import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from blocks import cost, registry, size
from blocks.families import (
    AbstractFFN,
    AbstractMixer,
    AbstractPosition,
    AbstractPremixer,
    Direction,
    InfeasibleArchitecture,
)
from blocks.model import ModelConfig
from search_space.canon import unflatten
from search_space.space import Space, derive, narrow, random_point

Make = Callable[..., ModelConfig]
GROWING = [
    kind for kind, ffn in registry.variants(AbstractFFN).items() if ffn.grows and Direction.CAUSAL in ffn.directions
]
CONTEXT = {"vocab_size": 256, "train_len": 64, "max_len": 64}


def attention_space() -> Space:
    """Every mixer and every field of theirs, at two to six layers."""
    return narrow(
        derive(ModelConfig, registry.variants),
        {
            "layers": {"low": 2, "high": 6},
            "d_model": 128,
            "premixer": list(registry.variants(AbstractPremixer)),
            "ffn": GROWING,
        },
    )


def drawn(space: Space, rng: random.Random) -> dict[str, Any]:
    point = unflatten(random_point(space, rng))
    del point["d_model"]
    return point


def legal(point: dict[str, Any]) -> bool:
    try:
        size.sized({**point, "d_model": 128}, **CONTEXT)
    except InfeasibleArchitecture:
        return False
    return True


def point_of(config: ModelConfig) -> dict[str, Any]:
    plain = registry.encode(config)
    return {name: value for name, value in plain.items() if name not in {"d_model", "d_ff", *CONTEXT}}


@pytest.mark.parametrize("measure", size.MEASURES)
@pytest.mark.parametrize("target", [3e5, 1e6, 2e7])
def test_solved_sizes_land_within_one_percent(small: Make, measure: str, target: float) -> None:
    config = size.solve(point_of(small()), measure=measure, target=target, **CONTEXT)
    built = cost.measure(config, 64)
    assert abs(getattr(built, measure) / target - 1) <= 0.01
    assert config.d_model % 16 == 0
    assert sum(p.numel() for p in config.build(seed=0, device="meta").parameters()) == built.params


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("expansion", [2.0, 3.0, 4.0])
def test_solved_ffns_are_nearly_as_wide_as_asked(small: Make, kind: str, expansion: float) -> None:
    changes = {"ffn.kind": kind, f"ffn.{kind}.expansion": expansion, "layers": 4}
    config = size.solve(point_of(small(changes)), measure="params", target=2e6, **CONTEXT)
    assert config.d_ff == pytest.approx(config.ffn.natural_width(config.d_model), rel=0.15)
    assert config.ffn.expansion == expansion


def test_a_given_width_gets_the_ffn_of_equal_parameters(small: Make) -> None:
    for kind, factor in (("relu", 1.0), ("swiglu", 2 / 3)):
        plain = {**point_of(small({"ffn.kind": kind, f"ffn.{kind}.expansion": 3.0})), "d_model": 96}
        config = size.sized(plain, **CONTEXT)
        assert config.d_model == 96
        assert config.d_ff == 8 * round(3 * factor * 96 / 8)


@pytest.mark.parametrize("target", [3e5, 1e6])
def test_without_an_ffn_finer_widths_make_up_for_the_missing_knob(small: Make, target: float) -> None:
    config = size.solve(point_of(small({"ffn.kind": "none", "layers": 4})), measure="params", target=target, **CONTEXT)
    assert abs(cost.count_parameters(config).total / target - 1) <= 0.01


def test_experts_can_be_sized_by_what_a_token_uses(small: Make) -> None:
    changes = {"ffn.kind": "moe", "ffn.moe.experts": 8, "layers": 4}
    config = size.solve(point_of(small(changes)), measure="active_params", target=1e6, **CONTEXT)
    found = cost.measure(config, 64)
    assert abs(found.active_params / 1e6 - 1) <= 0.01
    experts = 3 * config.d_model * config.d_ff * config.layers
    assert found.params - found.active_params == (8 - 2) * experts


def test_a_target_below_the_smallest_model_is_refused_with_its_size(small: Make) -> None:
    with pytest.raises(InfeasibleArchitecture) as refused:
        size.solve(point_of(small({"layers": 8})), measure="params", target=1e4, **CONTEXT)
    assert "the smallest model of this point has" in str(refused.value)
    assert "raise the target" in str(refused.value)


def test_an_unknown_measure_is_refused_with_near_matches(small: Make) -> None:
    with pytest.raises(ValueError, match="did you mean 'params'"):
        size.solve(point_of(small()), measure="param", target=1e6, **CONTEXT)


def test_illegal_points_keep_their_own_message(small: Make) -> None:
    plain = point_of(small({"mixer.kind": "linear", "position.kind": "none"}))
    plain["position"] = {"kind": "alibi", "alibi": {}}
    with pytest.raises(InfeasibleArchitecture, match="needs the hook 'score_bias'"):
        size.solve(plain, measure="params", target=1e6, **CONTEXT)


def too_large(point: dict[str, Any]) -> bool:
    """Whether the smallest model of a point misses a target of a million parameters by more than one percent."""
    smallest = registry.decode(ModelConfig, {**point, "d_model": size.WIDTH_STEP}, d_ff=size.NARROWEST_FFN, **CONTEXT)
    return cost.count_parameters(smallest).total > 1.01e6


WIDTHS = ("heads", "kv_heads", "queries_per_kv", "head_dim")
"""Fields of mixers that decide the size of their smallest model, depth apart."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind, mixer in registry.variants(AbstractMixer).items() if Direction.CAUSAL in mixer.directions]
)
def test_at_most_one_point_in_twenty_of_any_mixer_is_too_large(small: Make, kind: str) -> None:
    """Counted over all numbers of layers, heads and channels: among some dozen draws chance passes any bound."""
    fields = derive(registry.lookup(AbstractMixer, kind), registry.variants).fields
    widths = [name for name in WIDTHS if name in fields]
    base = point_of(small({"mixer.kind": kind, "position.kind": "none"}))
    large = []
    for layers, *values in itertools.product(range(2, 7), *(fields[name].options for name in widths)):
        mixer = {**base["mixer"][kind], **dict(zip(widths, values, strict=True))}
        with contextlib.suppress(InfeasibleArchitecture):
            large.append(too_large({**base, "layers": layers, "mixer": {"kind": kind, kind: mixer}}))
    assert len(large) >= 5
    assert sum(large) <= 0.05 * len(large)


@pytest.mark.slow
def test_the_solver_refuses_few_draws_and_few_of_any_variant() -> None:
    space, rng = attention_space(), random.Random(0)
    drawn_by, refused_by, total = Counter[str](), Counter[str](), 0
    while total < 1200:
        point = drawn(space, rng)
        if not legal(point):
            continue
        total += 1
        names = ["all", *(f"{name}={value['kind']}" for name, value in point.items() if isinstance(value, dict))]
        drawn_by.update(names)
        try:
            config = size.solve(point, measure="params", target=1e6, **CONTEXT)
            assert abs(cost.count_parameters(config).total / 1e6 - 1) <= 0.01
        except InfeasibleArchitecture:
            refused_by.update(names)
            assert too_large(point), point
    assert refused_by["all"] / total <= 0.02, refused_by
    # A variant has some sixty draws now, of which one more or less is chance.
    often = {name: (refused_by[name], count) for name, count in drawn_by.items() if refused_by[name] > 1 + 0.05 * count}
    assert not often


@pytest.mark.parametrize(("name", "family"), [("mixer", AbstractMixer), ("position", AbstractPosition)])
def test_every_variant_can_be_solved(name: str, family: type) -> None:
    rng, space = random.Random(1), attention_space()
    for kind, variant in registry.variants(family).items():
        if Direction.CAUSAL not in variant.directions:
            continue
        narrowed = narrow(space, {name: [kind]})
        points = (point for point in (drawn(narrowed, rng) for _ in range(100)) if legal(point))
        size.solve({**next(points), "layers": 2}, measure="params", target=4e6, **CONTEXT)


def test_solving_is_quick(small: Make) -> None:
    point = point_of(small())
    size.solve(point, measure="params", target=1e6, **CONTEXT)
    seconds = []
    for _ in range(10):
        start = time.process_time()
        size.solve(point, measure="params", target=1e6, **CONTEXT)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.03
