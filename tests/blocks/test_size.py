"""The size solver: lands within tolerance, keeps the FFN's shape, refuses little, and is quick."""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from blocks import cost, registry, size
from blocks.families import (
    AbstractFFN,
    AbstractInit,
    AbstractMixer,
    AbstractNorm,
    AbstractPattern,
    AbstractPlacement,
    AbstractPosition,
    AbstractPremixer,
    AbstractResidual,
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
FAMILIES = {
    "mixer": AbstractMixer,
    "premixer": AbstractPremixer,
    "pattern": AbstractPattern,
    "position": AbstractPosition,
    "ffn": AbstractFFN,
    "norm": AbstractNorm,
    "placement": AbstractPlacement,
    "residual": AbstractResidual,
    "init": AbstractInit,
}
LAYERS = range(2, 7)


def attention_space(**changes: list[str]) -> Space:
    """Every mixer and every field of theirs, at two to six layers, but for the families whose variants are given."""
    return narrow(
        derive(ModelConfig, registry.variants),
        {
            "layers": {"low": LAYERS[0], "high": LAYERS[-1]},
            "d_model": 128,
            "premixer": list(registry.variants(AbstractPremixer)),
            "ffn": GROWING,
            **changes,
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


def is_causal(variant: Any) -> bool:
    """Whether a decoder can hold a variant; families without directions serve all."""
    return Direction.CAUSAL in getattr(variant, "directions", Direction)


def legal_draws(space: Space, rng: random.Random) -> Iterator[dict[str, Any]]:
    return filter(legal, (drawn(space, rng) for _ in itertools.count()))


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


@pytest.mark.parametrize("measure", ["params", "flops_per_token"])
@pytest.mark.parametrize("kind", ["swiglu", "moe"])
def test_the_smallest_model_serves_where_it_lands_within_tolerance(small: Make, measure: str, kind: str) -> None:
    wide = {"mixer.softmax.kv_heads": 8, "mixer.softmax.queries_per_kv": 8, "mixer.softmax.head_dim": 64}
    plain = point_of(small({**wide, "layers": 4, "ffn.kind": kind}))
    smallest = registry.decode(ModelConfig, {**plain, "d_model": size.WIDTH_STEP}, d_ff=size.NARROWEST_FFN, **CONTEXT)
    target = size.MEASURES[measure](smallest) / 1.009
    assert size.solve(plain, measure=measure, target=target, **CONTEXT) == smallest


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


def refused(point: dict[str, Any]) -> bool:
    """Whether the solver refuses a point; what it does not refuse it solves within one percent."""
    try:
        config = size.solve(point, measure="params", target=1e6, **CONTEXT)
    except InfeasibleArchitecture:
        return True
    assert abs(cost.count_parameters(config).total / 1e6 - 1) <= 0.01
    return False


WIDTHS = ("heads", "kv_heads", "queries_per_kv", "head_dim", "value_dim", "value_factor", "width")
"""Fields of mixers that decide the size of their smallest model, depth apart."""


def shaped(point: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The point with another depth and other widths."""
    kind, widths = point["mixer"]["kind"], {name: value for name, value in shape.items() if name in WIDTHS}
    layers = shape.get("layers", point["layers"])
    return {**point, "layers": layers, "mixer": {"kind": kind, kind: point["mixer"][kind] | widths}}


def axes_of(point: dict[str, Any]) -> dict[str, list[int]]:
    """The depths, and the widths of every kind, at which a point stays legal; rising."""
    fields = derive(registry.lookup(AbstractMixer, point["mixer"]["kind"]), registry.variants).fields
    axes = {"layers": LAYERS} | {name: sorted(fields[name].options) for name in WIDTHS if name in fields}
    return {name: [value for value in axes[name] if legal(shaped(point, {name: value}))] for name in axes}


def large_shapes(point: dict[str, Any], axes: dict[str, list[int]]) -> set[tuple[int, ...]]:
    """The shapes at which the rest of a point is too large, largest first: below one that fits, all do."""
    large, tried, untried = set(), set(), [tuple(values[-1] for values in axes.values())]
    while untried:
        shape = untried.pop()
        if shape in tried:
            continue
        tried.add(shape)
        if too_large(shaped(point, dict(zip(axes, shape, strict=True)))):
            large.add(shape)
            for at, values in enumerate(axes.values()):
                next_below = values[: values.index(shape[at])][-1:]
                untried += [(*shape[:at], value, *shape[at + 1 :]) for value in next_below]
    return large


def share_too_large(space: Space, draws: int) -> float:
    """The share of a space's legal points that are too large; a draw stands for all its depths and widths, counted."""
    shares = []
    for point in itertools.islice(legal_draws(space, random.Random(0)), draws):
        axes = axes_of(point)
        shares.append(len(large_shapes(point, axes)) / math.prod(map(len, axes.values())))
    return statistics.fmean(shares)


def searchable(family: str) -> list[str]:
    """The variants of a family that a decoder can hold, and whose width the solver can choose."""
    variants = registry.variants(FAMILIES[family])
    return GROWING if family == "ffn" else [kind for kind, variant in variants.items() if is_causal(variant)]


@pytest.mark.slow
def test_the_solver_refuses_what_is_too_large_and_no_more() -> None:
    for point in itertools.islice(legal_draws(attention_space(), random.Random(0)), 200):
        assert refused(point) == too_large(point), point


@pytest.mark.slow
def test_at_most_one_point_in_fifty_is_too_large() -> None:
    assert share_too_large(attention_space(), 100) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_at_most_one_point_in_twenty_of_any_variant_is_too_large(family: str) -> None:
    """Some hundred to some thousand points of each variant: all depths and widths, with the rest drawn five times."""
    shares = {kind: share_too_large(attention_space(**{family: [kind]}), 5) for kind in searchable(family)}
    assert max(shares.values()) <= 0.05, shares


@pytest.mark.slow
def test_the_solver_refuses_at_most_one_draw_in_twenty_without_an_ffn() -> None:
    """Then a model is refused, too, whose widths step over the target: each of some hundred draws is solved."""
    points = itertools.islice(legal_draws(attention_space(ffn=["none"]), random.Random(0)), 300)
    assert statistics.fmean(map(refused, points)) <= 0.05


@pytest.mark.parametrize("family", ["mixer", "position"])
def test_every_variant_can_be_solved(family: str) -> None:
    for kind in searchable(family):
        points = itertools.islice(legal_draws(attention_space(**{family: [kind]}), random.Random(1)), 1)
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
