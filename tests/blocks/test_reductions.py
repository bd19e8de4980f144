"""Settings at which a block is a simpler one: each has one id with it by a declared rule, or no point can name it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from registered_cases import FAMILIES, label

from blocks import registry
from blocks.families import AbstractFFN, AbstractPlacement
from blocks.model import ModelConfig
from blocks.registry import config_id
from search_space import domains
from search_space.space import OneOf, Space, derive

Make = Callable[..., ModelConfig]
SPACE = derive(ModelConfig, registry.variants)

SHARED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Windows, blocks and selections that leave nothing out.
    ({"mixer.kind": "sliding_window", "mixer.sliding_window.window": 64}, {"mixer.kind": "softmax"}),
    ({"mixer.kind": "block_local", "mixer.block_local.block": 64, "mixer.block_local.earlier": 0}, {}),
    ({"mixer.kind": "block_local", "mixer.block_local.block": 32, "mixer.block_local.earlier": 1}, {}),
    ({"mixer.kind": "topk", "mixer.topk.kept": 64}, {}),
    ({"mixer.kind": "moba", "mixer.moba.block": 16, "mixer.moba.blocks": 3}, {}),
    ({"mixer.kind": "bigbird", "mixer.bigbird.block": 16, "mixer.bigbird.first": 1}, {}),
    (
        {"mixer.kind": "longformer", "mixer.longformer.window": 64},
        {"mixer.kind": "longformer", "mixer.longformer.window": 128},
    ),
    (
        {"mixer.kind": "nsa", "mixer.nsa.kept": 6, "mixer.nsa.window": 64},
        {"mixer.kind": "nsa", "mixer.nsa.kept": 16, "mixer.nsa.window": 128},
    ),
    # Position schemes at an end of their range.
    ({"position.kind": "rope_scaled"}, {"position.kind": "rotary"}),
    ({"position.kind": "nope_layers", "position.nope_layers.every": 3}, {"position.kind": "rotary"}),
    ({"position.kind": "learned_interp"}, {"position.kind": "learned"}),
    ({"position.kind": "learned", "position.learned.beyond": "clamp"}, {"position.kind": "learned"}),
    ({"position.kind": "shaw", "position.shaw.farthest": 64}, {"position.kind": "shaw", "position.shaw.farthest": 39}),
    ({"position.kind": "cope", "position.cope.farthest": 64}, {"position.kind": "cope", "position.cope.farthest": 40}),
    (
        {"position.kind": "disentangled", "position.disentangled.span": 64},
        {"position.kind": "disentangled", "position.disentangled.span": 40},
    ),
    # Experts.
    (
        {"ffn.kind": "moe", "ffn.moe.experts": 4, "ffn.moe.top_k": 4, "ffn.moe.renormalised": False},
        {"ffn.kind": "moe", "ffn.moe.experts": 4, "ffn.moe.top_k": 4, "ffn.moe.renormalised": True},
    ),
    (
        {"ffn.kind": "moe", "ffn.moe.experts": 4, "ffn.moe.top_k": 4, "ffn.moe.capacity": "1.0"},
        {"ffn.kind": "moe", "ffn.moe.experts": 4, "ffn.moe.top_k": 4, "ffn.moe.capacity": "unlimited"},
    ),
    # Placements, residual forms, patterns and rules that have no layer to act on, or nothing to act with.
    ({"placement.kind": "mix_ln", "placement.mix_ln.post_share": 0.25}, {"placement.kind": "pre"}),
    ({"placement.kind": "ln_scaling", "layers": 1}, {"placement.kind": "pre", "layers": 1}),
    ({"placement.kind": "parallel", "ffn.kind": "none"}, {"placement.kind": "pre", "ffn.kind": "none"}),
    ({"placement.kind": "parallel", "placement.parallel.norms": 2, "ffn.kind": "none"}, {"ffn.kind": "none"}),
    ({"placement.kind": "macaron", "ffn.kind": "none"}, {"ffn.kind": "none"}),
    (
        {"placement.kind": "parallel", "ffn.kind": "none", "norm.kind": "layernorm", "mixer.kind": "hyena"}
        | {"position.kind": "none"},
        {"placement.kind": "macaron", "ffn.kind": "none", "norm.kind": "layernorm", "mixer.kind": "hyena"}
        | {"position.kind": "none"},
    ),
    ({"placement.kind": "no_norm", "norm.kind": "layernorm"}, {"placement.kind": "no_norm"}),
    ({"residual.kind": "value_residual", "layers": 1}, {"layers": 1}),
    ({"residual.kind": "unet_skips"}, {}),
    ({"residual.kind": "stochastic_depth", "residual.stochastic_depth.rate": 0.0}, {}),
    ({"residual.kind": "looped", "residual.looped.blocks": 2}, {}),
    (
        {"residual.kind": "looped", "residual.looped.order": "repeat"},
        {"residual.kind": "looped", "residual.looped.order": "cycle"},
    ),
    ({"pattern.kind": "every_nth", "pattern.every_nth.every": 3, "pattern.every_nth.mixer.kind": "linear"}, {}),
    ({"pattern.kind": "every_nth", "pattern.every_nth.every": 2}, {}),
    ({"init.kind": "complete_p", "init.complete_p.base_layers": 2}, {"init.kind": "mup"}),
]
"""Two ways to say one function, in a model of 2 layers trained and run at 40 tokens."""

SHARED_WHEN_SHORT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"mixer.kind": "strided_sparse", "mixer.strided_sparse.stride": 32},
        {"mixer.kind": "strided_sparse", "mixer.strided_sparse.stride": 32, "mixer.strided_sparse.form": "fixed"},
    ),
]
"""The same at 24 tokens."""

OUTSIDE = {
    "mixer.longformer.first": 0,
    "mixer.multiscale_pool.levels": 1,
    "mixer.multiscale_pool.ratio": 1,
    "mixer.hgrn2.forget_floor": 1.0,
    "mixer.softmax.softcap": float("inf"),
    "mixer.talking_heads.mixes": "none",
    "premixer.short_conv.width": 1,
    "position.rope_partial.fraction": 0.0,
    "position.p_rope.kept": 0.0,
    "position.nope_layers.every": 1,
    "position.randomized.stretch": 1,
    "position.conditional.width": 1,
    "ffn.moe.top_k": 1,
    "ffn.moe_shared.shared": 0,
    "ffn.moe_shared.experts": 0,
    "norm.dyt.alpha": 0.0,
    "placement.layerscale.start": 1.0,
    "residual.value_residual.share": 1.0,
    "residual.hyper_connections.streams": 1,
    "init.truncated_normal.cut": float("inf"),
}
"""Values at which a block would be a simpler one, which its domain does not hold."""

LEARNED = {
    "mixer.forgetting": "gate",
    "mixer.talking_heads": "mix",
    "mixer.differential": "lambda",
    "mixer.gla": "gate",
    "mixer.mamba2": "decay",
    "mixer.deltanet": "strength",
    "mixer.gated_deltanet": "strength",
    "mixer.kda": "strength",
    "mixer.rwkv7": "decay",
    "mixer.hyena": "filter",
    "mixer.nsa": "gate",
    "premixer.token_shift": "mix",
    "position.kerple": "positions",
    "position.shaw": "relative_keys",
    "position.transformer_xl": "positions",
    "position.disentangled": "vectors",
    "placement.rezero": "gain",
    "placement.sandwich": "gain",
    "residual.x0_lambdas": "add",
}
"""Blocks that are simpler ones at values of a parameter, by a part of its name: training may get there, no point."""

ONE_WAY = {
    "mixer.softmax.queries_per_kv": 1,
    "mixer.softmax.gate": "none",
    "mixer.softmax.sink": "none",
    "mixer.softmax.softcap": 0.0,
    "mixer.softmax.memory": 0,
    "mixer.softmax.qk_norm": "none",
}
"""Options whose simpler form is a value of the same field: there is no second way to say it."""


def node_at(path: str) -> domains.Domain | OneOf | Space:
    node: Any = SPACE
    for part in path.split("."):
        node = node.variants[part] if isinstance(node, OneOf) else node.fields[part]
    return node


@pytest.mark.parametrize(
    ("special", "plain", "length"),
    [*((*pair, 40) for pair in SHARED), *((*pair, 24) for pair in SHARED_WHEN_SHORT)],
    ids=[label(special) for special, _ in SHARED + SHARED_WHEN_SHORT],
)
def test_a_rule_gives_both_ways_to_say_it_one_id(
    small: Make, special: dict[str, Any], plain: dict[str, Any], length: int
) -> None:
    one, other = (small(changes, train_len=length, max_len=length) for changes in (special, plain))
    assert one != other
    assert config_id(one.canonical()) == config_id(other.canonical())
    models = [config.build(seed=1).double().eval() for config in (one, other)]
    shapes, same_shapes = ({name: p.shape for name, p in model.named_parameters()} for model in models)
    assert shapes == same_shapes
    tokens = torch.arange(one.max_len)[None]
    with torch.no_grad():
        torch.testing.assert_close(models[0](tokens)[0], models[1](tokens)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("path", "value"), OUTSIDE.items())
def test_no_point_can_name_a_value_at_which_a_block_is_a_simpler_one(path: str, value: domains.Scalar) -> None:
    domain = node_at(path)
    assert isinstance(domain, domains.Choice | domains.IntRange | domains.FloatRange)
    assert not domains.contains(domain, value)


@pytest.mark.parametrize(("path", "part"), LEARNED.items())
def test_what_training_alone_may_reach_is_a_parameter(small: Make, path: str, part: str) -> None:
    family, kind = path.split(".")
    changes = {f"{family}.kind": kind} | ({"position.kind": "none"} if family == "mixer" else {})
    names = [name for name, _ in small(changes).build(seed=0, device="meta").named_parameters()]
    others = {name for name, _ in small().build(seed=0, device="meta").named_parameters()}
    assert any(part in name for name in names if name not in others), names


@pytest.mark.parametrize(("path", "value"), ONE_WAY.items())
def test_the_simpler_form_is_a_value_of_the_field_itself(small: Make, path: str, value: domains.Scalar) -> None:
    config = small({path: value})
    assert domains.contains(node_at(path), value)
    assert config.canonical() == config


def test_every_declared_rule_is_listed() -> None:
    """A rule is declared by a variant that has a canonical form of its own."""
    declared = set()
    for family, abstract in FAMILIES.items():
        for kind, config in registry.variants(abstract).items():
            own = {name for base in config.__mro__ if base not in abstract.__mro__ for name in vars(base)}
            if own & {"canonical", "without_ffn"}:
                declared.add(f"{family}.{kind}")
    rows = [changes for pair in SHARED + SHARED_WHEN_SHORT for changes in pair]
    listed = {f"{path.removesuffix('.kind')}.{kind}" for row in rows for path, kind in row.items()}
    assert not declared - listed - {".".join(path.split(".")[:2]) for path in OUTSIDE}


DEPENDS_ON_DEPTH: list[dict[str, Any]] = [
    {"placement.kind": "ln_scaling"},
    {"placement.kind": "mix_ln", "placement.mix_ln.post_share": 0.5},
    {"position.kind": "nope_layers", "position.nope_layers.every": 3},
    {"pattern.kind": "every_nth", "pattern.every_nth.every": 3, "pattern.every_nth.mixer.kind": "topk"},
    {"residual.kind": "value_residual"},
    {"residual.kind": "unet_skips"},
    {"residual.kind": "looped"},
    {"init.kind": "complete_p", "init.complete_p.base_layers": 1},
]
"""What a side of one layer does not need, and one of three does."""


@pytest.mark.parametrize("changes", DEPENDS_ON_DEPTH, ids=map(label, DEPENDS_ON_DEPTH))
def test_what_one_side_of_an_encoder_decoder_needs_is_not_dropped(small: Make, changes: dict[str, Any]) -> None:
    sides = {"stack.kind": "encoder_decoder", "layers": 1, "stack.encoder_decoder.encoder_layers": 3}
    strong = {"init.kind": "xavier"} if "init.kind" not in changes else {}
    config = small({**sides, **strong, **changes})
    assert config_id(config.canonical()) != config_id(small({**sides, **strong}).canonical())
    models = [made.build(seed=1).double().eval() for made in (config, config.canonical())]
    source, target = torch.arange(40)[None], torch.arange(40).flip(0)[None]
    with torch.no_grad():
        torch.testing.assert_close(*(model(source, target)[0] for model in models), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ffn", [kind for kind, ffn in registry.variants(AbstractFFN).items() if not ffn.grows])
def test_no_block_is_told_a_width_that_counts_for_nothing(small: Make, ffn: str) -> None:
    config = small({"ffn.kind": ffn}, d_ff=48)
    assert config.canonical().d_ff == config.dims().d_ff == 1


NORMLESS = [kind for kind, placement in registry.variants(AbstractPlacement).items() if not placement.uses_norm]


@pytest.mark.parametrize("placement", NORMLESS)
@pytest.mark.parametrize("stack", ["decoder", "encoder_decoder"])
def test_a_norm_that_is_dropped_is_built_nowhere(
    small: Make, stack: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"placement.kind": placement, "stack.kind": stack, "norm.kind": "layernorm", "init.kind": "xavier"}
    config = small(changes)
    assert config.canonical().norm.kind == "rmsnorm"

    def build(*_: object) -> None:
        raise AssertionError("the norm was built")

    monkeypatch.setattr(type(config.norm), "build", build)
    config.build(seed=0, device="meta")
