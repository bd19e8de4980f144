"""What goes on inside a model: numbers per layer, and warnings in words. Nothing here changes the model."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.attention_maps import attention_maps
from blocks.families import Role
from blocks.init import role_of
from blocks.model import AbstractTokenModel
from blocks.ops.attention import entropy

SINK = 0.9
"""A head that gives this share of its weight to the first token attends to it alone."""
SAME = 0.98
"""Cosine of two heads' maps from which one repeats the other."""
COLLAPSED = 0.05
"""Share of the dimensions below which representations have collapsed."""
GROWTH = 30.0
"""Growth of the residual stream or fall of the gradient over the depth that is worth a word."""
IDLE = 0.1
"""Share of units that never fire that is worth a word."""
ORDERLESS = 1e-3
"""Change of the last prediction under another order of the tokens before it, below which order does not reach it."""
HARD = 0.01
"""Entropy in nats below which a head looks at a single token."""
UNMOVED = 1e-6
"""Peak of a unit, as a share of the largest peak of its layer, below which it never fires."""
LARGE_LOGIT = 100.0
PENALTIES = (1e-3, 1e-1, 1e1)
"""Of the position probe, over the mean square of a representation."""
SLOW, FAST = 1e-5, 1e-1
"""Update-to-weight ratios of one step between which training moves at a usual pace."""

IGNORED = -100
"""The target of a place that no loss counts."""

Place = tuple[str, Role]
"""A layer ("layer 3", counted from 1, or "outside") and a role."""


@dataclass(frozen=True, kw_only=True)
class LayerDiagnosis:
    """One layer on one batch."""

    rms: float
    """Root mean square of the residual stream after the layer."""
    rank: float
    """Dimensions its representations use: the exponential of the entropy of their centred spectrum."""
    entropy: tuple[float, ...] = ()
    """Entropy in nats of each head's rows, 0 where a head looks at one token; none where a mixer has no weights."""
    sink_share: tuple[float, ...] = ()
    """Share of each head's weight on the first token, over the queries after it."""
    redundancy: tuple[float, ...] = ()
    """Largest cosine of each head's map with that of another head."""
    dead_units: float = 0.0
    """Share of the FFN's units that fire at no token."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A model on one batch."""

    layers: tuple[LayerDiagnosis, ...]
    d_model: int
    embedding_rms: float
    logit_rms: float
    largest_logit: float
    position_r2: float
    """How well a linear map tells a token's place from its last representation, on rows it was not fitted to."""
    order_effect: float = math.nan
    """How far the last logits move, over their own size, when the tokens before are reversed; NaN where unmeasured."""
    gradients: Mapping[Place, float] = field(default_factory=dict)
    """Norm of the loss gradient by layer and role; empty without targets."""


def diagnose(
    model: AbstractTokenModel,
    tokens: Int[Tensor, "B T"],
    *,
    targets: Int[Tensor, "B T"] | None = None,
    live: Bool[Tensor, "B T"] | None = None,
) -> Diagnosis:
    """What the model does with a batch, dropout off; its weights, gradients and mode stay as they are.

    With targets (ignored at IGNORED), gradient norms as well. Attention is read off by probes: a pass per head_dim
    tokens.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _watched(model) as seen:
            logits, _ = model(tokens, live)
        with torch.no_grad():
            order = math.nan if live is not None else order_effect(model, tokens, logits)
            maps = attention_maps(model, seen.mixers)
            layers = tuple(
                _layer(stream, map_, dead, live)
                for stream, map_, dead in zip(seen.streams[1:], maps, seen.dead, strict=True)
            )
        gradients = {} if targets is None else _loss_gradients(model, tokens, targets, live)
    finally:
        model.train(training)
    kept = logits if live is None else logits[live]
    return Diagnosis(
        layers=layers,
        d_model=model.config.d_model,
        embedding_rms=_rms(seen.streams[0], live),
        logit_rms=float(kept.float().square().mean().sqrt()),
        largest_logit=float(kept.abs().max()),
        position_r2=position_r2(seen.streams[-1]),
        order_effect=order,
        gradients=gradients,
    )


@dataclass
class _Seen:
    """What a pass went through: mixer arguments, streams before the first layer and after each, idle units."""

    mixers: list[tuple[Any, ...]] = field(default_factory=list)
    streams: list[Tensor] = field(default_factory=list)
    dead: list[float] = field(default_factory=list)


@contextmanager
def _watched(model: AbstractTokenModel) -> Iterator[_Seen]:
    """Hooks on every layer while it lasts; a block that is used several times is seen as often."""
    seen = _Seen()
    units: list[float] = []

    def entering(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not seen.streams:
            seen.streams.append(args[0])
        units.clear()

    def leaving(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen.streams.append(output)
        seen.dead.append(max(units, default=0.0))

    handles = []
    for layer in model.layers:
        handles += [layer.register_forward_pre_hook(entering), layer.register_forward_hook(leaving)]
        for part in layer.modules():
            if isinstance(part, nn.Linear) and role_of("weight", part.get_parameter("weight")) == Role.FFN_OUT:
                handles.append(part.register_forward_pre_hook(lambda m, args: units.append(dead_share(args[0]))))
    for slot in dict.fromkeys(model.slots):
        handles.append(slot.mixer.register_forward_pre_hook(lambda m, args: seen.mixers.append(args)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _layer(
    stream: Float[Tensor, "B T D"],
    weights: Float[Tensor, "B H T S"] | None,
    dead: float,
    live: Bool[Tensor, "B T"] | None,
) -> LayerDiagnosis:
    rows = stream.flatten(0, 1) if live is None else stream[live]
    plain = LayerDiagnosis(rms=_rms(stream, live), rank=effective_rank(rows), dead_units=dead)
    if weights is None or weights.min() < -1e-6:
        return plain
    weights = weights.clamp_min(0.0).float()
    return replace(
        plain,
        entropy=_listed(_mean_rows(entropy(weights), live)),
        sink_share=_listed(sink_share(weights, live)),
        redundancy=_listed(redundancy(weights)),
    )


def sink_share(weights: Float[Tensor, "B H T S"], live: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "H"]:
    """Share of each head's weight on the first token, over the queries after it; 0 of a single token."""
    if weights.shape[2] < 2:
        return weights.new_zeros(weights.shape[1])
    return _mean_rows(weights[:, :, 1:, 0], None if live is None else live[:, 1:])


def redundancy(weights: Float[Tensor, "B H T S"]) -> Float[Tensor, "H"]:
    """Largest cosine of each head's map with another head's; 0 of a single head."""
    flat = F.normalize(weights.transpose(0, 1).flatten(1), dim=-1)
    alike = einsum(flat, flat, "H A, I A -> H I").fill_diagonal_(0.0)
    return alike.amax(-1)


def effective_rank(rows: Float[Tensor, "N D"]) -> float:
    """The exponential of the entropy of the rows' normalised singular values, centred; NaN of no numbers."""
    wide = rows.double()
    if not wide.isfinite().all():
        return math.nan
    values = torch.linalg.svdvals(wide - wide.mean(0))
    total = values.sum()
    if total <= 1e-6 * wide.norm():
        return 0.0
    share = values / total
    return float(torch.special.xlogy(share, share).sum().neg().exp())


def dead_share(units: Float[Tensor, "*A F"]) -> float:
    """Share of units whose largest value over all tokens is zero beside that of the others."""
    peaks = units.flatten(0, -2).abs().amax(0)
    return float((peaks <= UNMOVED * peaks.max()).float().mean())


def order_effect(model: AbstractTokenModel, tokens: Int[Tensor, "B T"], logits: Float[Tensor, "B T V"]) -> float:
    """Change of the last logits when the tokens before are reversed, over their deviation; NaN below three."""
    if tokens.shape[1] < 3:
        return math.nan
    again, _ = model(torch.cat([tokens[:, :-1].flip(1), tokens[:, -1:]], dim=1), None)
    last, moved = logits[:, -1].float(), again[:, -1].float()
    size = (last - last.mean(-1, keepdim=True)).norm()
    return float((moved - last).norm() / size) if size > 0 else 0.0


def position_r2(rows: Float[Tensor, "B T D"]) -> float:
    """Variance of places that ridge regressions fitted to the even rows explain on the odd ones: the best of three.

    0 of one row or token, NaN of no numbers.
    """
    batch, length, width = rows.shape
    if batch < 2 or length < 2:
        return 0.0
    if not rows.isfinite().all():
        return math.nan
    x = F.pad(rows.double(), (0, 1), value=1.0)
    place = torch.linspace(-1, 1, length, dtype=torch.float64, device=rows.device)
    fit, held = x[::2].flatten(0, 1), x[1::2]
    wanted = place.repeat(x[::2].shape[0])
    size = fit.square().sum() / fit.shape[0] * torch.eye(width + 1, dtype=torch.float64, device=rows.device)
    maps = [torch.linalg.solve(fit.T @ fit + penalty * size, fit.T @ wanted) for penalty in PENALTIES]
    error = min(float((held @ map_ - place).square().mean()) for map_ in maps)
    return 1 - error / float(place.square().mean())


def gradient_norms(model: nn.Module, gradients: Mapping[str, Tensor]) -> dict[Place, float]:
    """Norms of gradients, given by parameter name, by layer and role."""
    squares: dict[Place, float] = defaultdict(float)
    for name, parameter in model.named_parameters():
        if name in gradients:
            squares[place_of(name, parameter)] += float(gradients[name].float().square().sum())
    return {place: square**0.5 for place, square in squares.items()}


def update_ratios(model: nn.Module, before: Mapping[str, Tensor]) -> dict[Place, float]:
    """Norm of the change since `before` (parameters by name) over the norm before it, by layer and role."""
    moved: dict[Place, float] = defaultdict(float)
    size: dict[Place, float] = defaultdict(float)
    for name, parameter in model.named_parameters():
        place = place_of(name, parameter)
        moved[place] += float((parameter.detach() - before[name]).float().square().sum())
        size[place] += float(before[name].float().square().sum())
    return {place: (moved[place] / size[place]) ** 0.5 for place in moved if size[place] > 0}


def place_of(name: str, parameter: nn.Parameter) -> Place:
    """Where a parameter stands."""
    parts = name.split(".")
    layer = f"layer {int(parts[parts.index('layers') + 1]) + 1}" if "layers" in parts else "outside"
    return layer, role_of(name, parameter)


def _loss_gradients(
    model: AbstractTokenModel, tokens: Tensor, targets: Tensor, live: Tensor | None
) -> dict[Place, float]:
    named = dict(model.named_parameters())
    with torch.enable_grad():
        logits, auxiliary = model(tokens, live)
        counted = (targets != IGNORED).sum().clamp_min(1)
        plain = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = plain / counted + auxiliary
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return gradient_norms(model, {n: g for n, g in zip(named, gradients, strict=True) if g is not None})


def _rms(x: Float[Tensor, "B T D"], live: Bool[Tensor, "B T"] | None) -> float:
    return float((x if live is None else x[live]).float().square().mean().sqrt())


def _mean_rows(rows: Float[Tensor, "B H T"], live: Bool[Tensor, "B T"] | None) -> Float[Tensor, "H"]:
    if live is None:
        return rows.mean((0, 2))
    kept = live[:, None].to(rows.dtype)
    return (rows * kept).sum((0, 2)) / kept.sum().clamp_min(1.0)


def _listed(values: Float[Tensor, "H"]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
