"""What is legal and yet likely not what is wanted: told in words, from what blocks declare and how they behave."""

import functools

import torch
from torch import nn

from blocks import registry
from blocks.families import (
    AbstractInit,
    AbstractMixer,
    AbstractNorm,
    AbstractPlacement,
    Context,
    Dims,
    Hook,
    PositionModule,
    Role,
)
from blocks.init import role_of
from blocks.model import ModelConfig

_WIDTHS = (64, 128)
"""Two widths at which a rule is asked, to see whether it goes by width."""
_BIASES = frozenset({Hook.SCORE_BIAS, Hook.CONTENT_BIAS})
"""Hooks that only mixers with attention logits offer."""
_PROBE = Dims(d_model=16, d_ff=16, layers=2, train_len=12, max_len=12)


def cautions(config: ModelConfig) -> tuple[str, ...]:
    """What to know before training this model; empty where there is nothing."""
    found = (
        _two_schemes(config),
        _stream_without_a_scale(config),
        _unscaled_logits(config),
        _trained_gains(config),
        _short_reach(config),
    )
    return tuple(filter(None, found))


def _two_schemes(config: ModelConfig) -> str:
    """Rotation and a bias on logits at once."""
    needs = config.position.needs
    if Hook.ROTATE not in needs or not needs & _BIASES:
        return ""
    return (
        f"model.position.kind={config.position.kind!r} rotates queries and biases logits at once: each of them can "
        f"tell distances, and what either is worth cannot be told from such a model; compare with one of them alone"
    )


def _stream_without_a_scale(config: ModelConfig) -> str:
    """A norm that does not bring its input to one scale, where nothing else keeps the stream's."""
    if not config.placement.canonical(config.dims()).norms_stream or _rescales(config.norm):
        return ""
    able = [kind for kind, norm in registry.variants(AbstractNorm).items() if _rescales(norm())]
    return (
        f"model.norm.kind={config.norm.kind!r} does not bring its input to one scale, and "
        f"model.placement.kind={config.placement.kind!r} leaves it to the norm to keep that of the residual stream; "
        f"use one of {', '.join(able)}, or a placement that norms the branches alone, such as "
        f"{', '.join(_norming_branches())}"
    )


def _unscaled_logits(config: ModelConfig) -> str:
    """Logits that grow with the head width under a rule that means them not to."""
    if not _scales_queries(config.init):
        return ""
    with_logits = [mixer for mixer in dict.fromkeys(config.layer_mixers()) if mixer.offers & _BIASES]
    mixers = [mixer for mixer in with_logits if _ignores_size_of_queries(mixer)]
    if not mixers and (not with_logits or Role.QUERY not in config.placement.reaches):
        return ""
    by = f"model.mixer.kind={mixers[0].kind!r}" if mixers else f"model.placement.kind={config.placement.kind!r}"
    return (
        f"model.init.kind={config.init.kind!r} scales attention logits by 1 / head_dim through the queries, and {by} "
        f"norms queries after that: logits go by 1 / sqrt(head_dim) as usual; keep head_dim the same at every width, "
        f"or leave queries without a norm"
    )


def _trained_gains(config: ModelConfig) -> str:
    """Gains of norms under a rule of learning rates by width."""
    if not _paces_by_width(config.init) or not config.placement.uses_norm or not _has_gains(config.norm):
        return ""
    return (
        f"model.init.kind={config.init.kind!r} keeps one learning rate over widths, and trained gains in "
        f"model.norm.kind={config.norm.kind!r} were found to weaken that (Lingle 2024, arXiv:2404.05728); "
        f"where the norm has the field, set gain to false"
    )


def _short_reach(config: ModelConfig) -> str:
    """Windows in all layers and nothing but the causal mask to tell the order."""
    reaches = [mixer.reach() for mixer in config.layer_mixers()]
    seen = [reach for reach in reaches if reach is not None and reach < config.max_len]
    if len(seen) < len(reaches) or any(config.position.at_layer(layer).needs for layer in range(config.layers)):
        return ""
    return (
        f"model.position.kind={config.position.kind!r} tells order by how much of the past a token sees, and every one "
        f"of the {config.layers} layers sees a window: whatever is farther back than "
        f"{sum(reach - 1 for reach in seen) + 1} tokens reaches nothing, and inside full windows all places look "
        f"alike; use a position scheme, or model.pattern to let some layers see everything"
    )


def _norming_branches() -> list[str]:
    """Placements that norm branches and leave the stream alone."""
    variants = registry.variants(AbstractPlacement).items()
    return [kind for kind, other in variants if other.uses_norm and other.additive]


def _scales_queries(rule: AbstractInit) -> bool:
    return rule.query_multiplier(16) != rule.query_multiplier(64)


def _paces_by_width(rule: AbstractInit) -> bool:
    return len({rule.learning_rate_factor(Role.QUERY, width, width, 2) for width in _WIDTHS}) > 1


@functools.cache
def _rescales(norm: AbstractNorm) -> bool:
    """Whether four times the input gives the same output."""
    built = norm.build(16)
    x = torch.linspace(-2.0, 3.0, 16)[None, None]
    with torch.no_grad():
        return torch.allclose(built(x), built(4 * x), rtol=1e-3, atol=1e-4)


@functools.cache
def _has_gains(norm: AbstractNorm) -> bool:
    built = norm.build(16)
    return any(role_of(name, parameter) == Role.GAIN for name, parameter in built.named_parameters())


@functools.cache
def _ignores_size_of_queries(mixer: AbstractMixer) -> bool:
    """Whether queries twice as large change nothing, though there are queries."""
    dims = _PROBE
    if dims.direction not in mixer.directions:
        dims = Dims(**{**vars(dims), "direction": min(mixer.directions)})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        built = mixer.build(dims).eval()
        queries = [part.weight for part in built.modules() if isinstance(part, nn.Linear) and _is_query(part)]
        for parameter in built.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
        x = torch.randn(1, dims.train_len, dims.d_model)
        before = built(x, PositionModule(), Context())
        for weight in queries:
            weight *= 2
        return bool(queries) and torch.allclose(before, built(x, PositionModule(), Context()), rtol=1e-3, atol=1e-5)


def _is_query(part: nn.Linear) -> bool:
    return getattr(part.weight, "role", None) == Role.QUERY
