"""Attention weights of any mixer that is linear in its values, read off by probes: no kernel has to return them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import Context
from blocks.model import AbstractLayers

TOLERANCE = 1e-2
"""Relative error up to which weights times values are what a mixer makes; bfloat16 passes, a norm does not."""


def attention_maps(model: AbstractLayers, calls: list[tuple[Any, ...]]) -> list[Float[Tensor, "B H T S"] | None]:
    """What each layer's output takes of each token's values, from the arguments its mixer was called with.

    None for a layer whose mixer makes no values by a linear map of its own, or norms what it made of them. Sinks and
    gates count: rows may sum to less than one.
    """
    maps: list[Tensor | None] = []
    for slot, mixer, (x, position, context) in zip(model.slots, model.config.layer_mixers(), calls, strict=True):
        if not (mixer.value_projection or mixer.weighs_values):
            maps.append(None)
            continue
        maps.append(_probed(slot.mixer, x, position, context, mixer.head_shape().heads))
    return maps


def _probed(
    mixer: nn.Module, x: Float[Tensor, "B T D"], position: nn.Module, context: Context, heads: int
) -> Float[Tensor, "B H T S"] | None:
    """The mixer runs with values that are one at one token per channel; each run shows as many tokens as a head has."""
    value, out = mixer.get_submodule("value"), mixer.get_submodule("out")
    assert isinstance(out, nn.Linear)
    n_tokens, width = x.shape[1], out.in_features // heads
    mixed: list[Tensor] = []
    parts = []
    own_values: list[Tensor] = []

    def run(hook: Callable[..., Tensor | None]) -> Tensor:
        handles = (
            value.register_forward_hook(hook),
            out.register_forward_pre_hook(lambda module, args: mixed.append(args[0])),
        )
        try:
            mixer(x, position, dataclasses.replace(context, losses=[], values=None))
        finally:
            for handle in handles:
                handle.remove()
        return rearrange(mixed.pop(), "B T (H K) -> B H T K", H=heads)

    exact = run(lambda module, args, own: own_values.append(own))
    groups = own_values[0].shape[-1] // width
    if heads % groups:  # Several maps share the heads, each with values of its own.
        return None
    for start in range(0, n_tokens, width):
        probe = torch.eye(n_tokens, width, device=x.device, dtype=x.dtype).roll(start, 0)
        probe[:start] = 0

        def swap(module: nn.Module, args: tuple[Tensor, ...], own: Tensor, probe: Tensor = probe) -> Tensor:
            return probe.repeat(1, own.shape[-1] // width).expand_as(own).to(own.dtype)

        parts.append(run(swap))
    weights = torch.cat(parts, dim=-1)[..., :n_tokens]
    values = rearrange(own_values[0], "B S (G K) -> B G S K", K=width)
    rebuilt = weights @ values.repeat_interleave(heads // groups, dim=1)
    return weights if (rebuilt - exact).norm() <= TOLERANCE * exact.norm() else None
