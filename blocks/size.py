"""Sizes from a budget: d_model and d_ff are the two knobs, found so that a cost meets its target.

d_model moves in steps of 16; where d_ff cannot make up the rest, for want of an FFN or because many experts make each
of its steps large, d_model moves in finer steps.

Parameters are quadratic in d_model and affine in d_ff, so six counts pin them down; the winner is counted again in
full, and a point for which that polynomial is wrong is solved by full counts.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from blocks import cost, registry
from blocks.families import InfeasibleArchitecture
from blocks.model import ModelConfig
from search_space.space import unknown

WIDTH_STEP = 16
WIDTH_STEPS = (WIDTH_STEP, 8, 4, 2, 1)
"""The grid of d_model, coarse first."""
WIDEST = 4096
FFN_STEPS = (8, 4, 2, 1)
"""The grid of d_ff, coarse first: a finer one only where the coarser cannot land within tolerance."""
NARROWEST_FFN = 8
NEAR = math.log(1.12)
"""Distance of a d_ff from the one asked for, as a logarithm, that ends the search for a nearer one."""
NEIGHBOURS = 3
"""How many widths on either side of the ideal one are tried."""
START_WIDTH = 128

NODES = (START_WIDTH, 2 * START_WIDTH, 3 * START_WIDTH)
"""Widths at which parameters are counted to interpolate them."""

Evaluate = Callable[[int, int], float]
"""A cost as a function of d_model and d_ff."""


MEASURES: Mapping[str, Callable[[ModelConfig], float]] = {
    "params": lambda config: cost.count_parameters(config).total,
    "active_params": lambda config: cost.count_parameters(config).active,
    "body_params": lambda config: cost.count_parameters(config).body,
    "flops_per_token": lambda config: cost.flops_per_token(config, config.train_len, causal=False),
}
"""Costs that can be a target."""


def sized(model: Mapping[str, Any], *, vocab_size: int, train_len: int, max_len: int) -> ModelConfig:
    """The config with its given d_model, and d_ff by the FFN's expansion at equal parameters, rounded to 8."""
    draft = registry.decode(
        ModelConfig, model, vocab_size=vocab_size, train_len=train_len, max_len=max_len, d_ff=NARROWEST_FFN
    )
    return dataclasses.replace(draft, d_ff=_natural_d_ff(draft, draft.d_model))


def solve(
    model: Mapping[str, Any],
    *,
    measure: str,
    target: float,
    vocab_size: int,
    train_len: int,
    max_len: int,
    tolerance: float = 0.01,
) -> ModelConfig:
    """The config whose `measure` is within tolerance of the target, d_ff over d_model nearest to the FFN's expansion.

    Raises InfeasibleArchitecture when no width meets the target, or when the point is illegal.
    """
    assert "d_model" not in model, "d_model is solved for; leave it out of the point"
    if measure not in MEASURES:
        raise ValueError(f"model.size.{measure} {unknown('measure', measure, MEASURES)}")
    draft = registry.decode(
        ModelConfig,
        {**model, "d_model": START_WIDTH},
        vocab_size=vocab_size,
        train_len=train_len,
        max_len=max_len,
        d_ff=START_WIDTH,
    )
    exact = _exact(draft, measure)
    for evaluate in (_interpolated(draft, measure), exact):
        if evaluate(WIDTH_STEP, NARROWEST_FFN) > (1 + tolerance) * target:
            continue
        size = _best(draft, evaluate, target, tolerance)
        if size is not None and _misses(exact(*size), target) <= tolerance:
            return _at(draft, *size)
    smallest = exact(WIDTH_STEP, NARROWEST_FFN)
    raise InfeasibleArchitecture(
        f"model.size: no d_model in steps of {WIDTH_STEP} with a d_ff of at least {NARROWEST_FFN} brings {measure} "
        f"within {tolerance:.0%} of {target:g}; the smallest model of this point has {smallest:g}; "
        f"raise the target or use fewer layers or heads; where that is too small, use more of them"
    )


def _exact(draft: ModelConfig, measure: str) -> Evaluate:
    return lambda d_model, d_ff: MEASURES[measure](_at(draft, d_model, d_ff))


def _interpolated(draft: ModelConfig, measure: str) -> Evaluate:
    """The polynomial, quadratic in d_model and affine in d_ff, through counts at NODES."""
    exact = _exact(draft, measure)
    base = [exact(width, NARROWEST_FFN) for width in NODES]
    slope = [0.0] * len(NODES)
    if draft.ffn.grows:
        slope = [exact(width, NARROWEST_FFN + 1) - value for width, value in zip(NODES, base, strict=True)]

    def evaluate(d_model: int, d_ff: int) -> float:
        weights = _lagrange(d_model)
        pairs = zip(weights, base, slope, strict=True)
        return sum(weight * (value + rise * (d_ff - NARROWEST_FFN)) for weight, value, rise in pairs)

    return evaluate


def _lagrange(width: int) -> list[float]:
    """Weights of the three nodes in the value of a quadratic at this width."""
    weights = []
    for node in NODES:
        others = [other for other in NODES if other != node]
        weights.append(math.prod((width - other) / (node - other) for other in others))
    return weights


def _best(draft: ModelConfig, evaluate: Evaluate, target: float, tolerance: float) -> tuple[int, int] | None:
    """Among the widths around the ideal one, the (d_model, d_ff) within tolerance whose FFN is most naturally wide.

    Finer grids are tried until one holds an FFN that is nearly as wide as asked.
    """
    fits = []
    for width_step in WIDTH_STEPS:
        widths = list(_widths(draft, evaluate, target, width_step))
        for step in FFN_STEPS if draft.ffn.grows else FFN_STEPS[:1]:
            for d_model in widths:
                d_ff = _matching_d_ff(draft, evaluate, target, d_model, step)
                if _misses(evaluate(d_model, d_ff), target) <= tolerance:
                    fits.append((abs(math.log(d_ff / _natural_d_ff(draft, d_model))), d_model, d_ff))
            if fits and min(fits)[0] <= NEAR:
                return min(fits)[1:]
    return min(fits)[1:] if fits else None


def _widths(draft: ModelConfig, evaluate: Evaluate, target: float, step: int) -> Iterator[int]:
    """Legal widths around the one at which the natural model costs the target."""
    narrowest = WIDTH_STEP // step
    low, high = narrowest, WIDEST // step
    while low < high:
        middle = (low + high) // 2
        d_model = middle * step
        if evaluate(d_model, _natural_d_ff(draft, d_model)) < target:
            low = middle + 1
        else:
            high = middle
    for multiple in range(max(narrowest, low - NEIGHBOURS), min(WIDEST // step, low + NEIGHBOURS) + 1):
        if _is_legal(draft, multiple * step):
            yield multiple * step


def _is_legal(draft: ModelConfig, d_model: int) -> bool:
    try:
        _at(draft, d_model, NARROWEST_FFN)
    except InfeasibleArchitecture:
        return False
    return True


def _matching_d_ff(draft: ModelConfig, evaluate: Evaluate, target: float, d_model: int, step: int) -> int:
    """The multiple of step nearest to the d_ff that meets the target at this width, or the narrowest d_ff.

    Costs are affine in d_ff, which two evaluations pin down. Without an FFN the narrowest stands for all.
    """
    if not draft.ffn.grows:
        return NARROWEST_FFN
    base = evaluate(d_model, NARROWEST_FFN)
    slope = evaluate(d_model, NARROWEST_FFN + 1) - base
    assert slope > 0, f"model.ffn.kind={draft.ffn.kind!r} does not grow with d_ff"
    return max(NARROWEST_FFN, round((NARROWEST_FFN + (target - base) / slope) / step) * step)


def _natural_d_ff(draft: ModelConfig, d_model: int) -> int:
    ideal = draft.ffn.natural_width(d_model) / draft.placement.ffns
    return max(NARROWEST_FFN, round(ideal / 8) * 8)


def _at(draft: ModelConfig, d_model: int, d_ff: int) -> ModelConfig:
    return dataclasses.replace(draft, d_model=d_model, d_ff=d_ff)


def _misses(value: float, target: float) -> float:
    return abs(value / target - 1)
