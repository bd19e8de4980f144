"""Placements: equality with torch's own layers, and the equations of the others."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_table import Compare
from torch import Tensor, nn
from transformers import Gemma2Config, Olmo2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

from blocks import registry
from blocks.families import AbstractPlacement, Context, Dims, InfeasibleArchitecture, Role, linear
from blocks.ffn.moe import Moe
from blocks.ffn.none import NoFFN
from blocks.ffn.relu import Relu
from blocks.model import ModelConfig
from blocks.norms.standard import LayerNormConfig, RMSNormConfig
from blocks.placements.branches import Around, Layer
from blocks.placements.normed import Parallel, Peri, Post, Pre, Reordered, Sandwich
from blocks.placements.scaled import DeepNorm, Fixup, LayerScale, LnScaling, NoNorm, ReZero, deepnorm_constants
from blocks.placements.sphere import Ngpt
from blocks.placements.within import HybridNorm, Macaron, MixLn, NormFormer, SubLn, twin

Make = Callable[..., ModelConfig]
DIMS = Dims(d_model=16, d_ff=32, layers=2, train_len=8, max_len=8)
PLACEMENTS = registry.variants(AbstractPlacement)
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


class TorchAttention(nn.Module):
    """torch's self-attention as a mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def layer_of(placement: AbstractPlacement, dropout: float = 0.0, layer: int = 0, dims: Dims = DIMS) -> nn.Module:
    torch.manual_seed(0)
    mixer = MarkedAttention() if placement.reaches else TorchAttention()
    return placement.build(dims, layer, LayerNormConfig(), mixer, Relu().build(DIMS), nn.Dropout(dropout))


class MarkedAttention(nn.Module):
    """Attention of one head whose linear maps are marked by role."""

    def __init__(self) -> None:
        super().__init__()
        roles = (Role.QUERY, Role.KEY, Role.VALUE, Role.MIXER_OUT)
        self.query, self.key, self.value, self.out = (linear(16, 16, role) for role in roles)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.out(nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)))


@pytest.mark.parametrize(("placement", "norm_first"), [(Pre(), True), (Post(), False)], ids=["pre", "post"])
def test_pre_and_post_equal_torch(compared: Compare, placement: AbstractPlacement, norm_first: bool) -> None:
    ours = layer_of(placement)
    theirs = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    with torch.no_grad():
        theirs.self_attn.load_state_dict(ours.mixer.attention.state_dict())
        for mine, linear in ((ours.ffn.w_in, theirs.linear1), (ours.ffn.w_out, theirs.linear2)):
            linear.weight.copy_(mine.weight)
            linear.bias.zero_()
    compared(f"placement.{placement.kind}", "torch nn.TransformerEncoderLayer", ours(X), theirs.train()(X))


def test_parallel_adds_both_sublayers_of_one_norm() -> None:
    layer = layer_of(Parallel())
    normed = layer.norm(X)
    torch.testing.assert_close(layer(X), X + layer.mixer(normed) + layer.ffn(normed))
    assert sum(isinstance(module, type(layer.norm)) for module in layer.modules()) == 1


def test_parallel_without_ffn_output_is_the_mixer_half_of_pre() -> None:
    parallel, pre = layer_of(Parallel()), layer_of(Pre())
    with torch.no_grad():
        for layer in (parallel, pre):
            layer.ffn.w_out.weight.zero_()
    torch.testing.assert_close(parallel(X), pre(X))


def test_parallel_can_give_each_its_own_norm() -> None:
    layer = layer_of(Parallel(norms=2))
    with torch.no_grad():
        layer.ffn_norm.gain.fill_(2.0)
    expected = X + layer.mixer(layer.norm(X)) + layer.ffn(layer.ffn_norm(X))
    torch.testing.assert_close(layer(X), expected)
    assert registry.identity(Parallel()) == {}


class Standing(nn.Module):
    """A branch of ours where a transformers layer has its attention."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
        return self.mixer(hidden_states), None


@pytest.mark.parametrize(
    ("placement", "theirs"),
    [
        (Reordered(), Olmo2DecoderLayer(Olmo2Config(hidden_size=16, num_attention_heads=2, rms_norm_eps=1e-6), 0)),
        (Sandwich(), Gemma2DecoderLayer(Gemma2Config(hidden_size=16, num_attention_heads=2, head_dim=8), 0)),
    ],
    ids=["olmo2", "gemma2"],
)
def test_output_norm_and_sandwich_equal_transformers(
    compared: Compare, placement: AbstractPlacement, theirs: nn.Module
) -> None:
    torch.manual_seed(0)
    mixer, ffn = TorchAttention(), Relu().build(DIMS)
    ours = placement.build(DIMS, 0, RMSNormConfig(), mixer, ffn, nn.Identity())
    theirs.self_attn, theirs.mlp = Standing(mixer), ffn
    compared(
        f"placement.{placement.kind}",
        f"transformers {type(theirs).__name__}",
        ours(X),
        theirs(X, position_embeddings=None),
    )


def test_sandwich_with_zero_outer_gains_is_the_identity() -> None:
    layer = layer_of(Sandwich())
    with torch.no_grad():
        for around in (layer.around_mixer, layer.around_ffn):
            around.after.gain.zero_()
    assert torch.equal(layer(X), X)


def step(around: Around, branch: nn.Module, x: Tensor) -> Tensor:
    """x + f(n(x))."""
    return x + branch(around.before(x))


def test_post_leaves_unit_variance_in_the_residual_stream() -> None:
    for placement in (Post(), DeepNorm()):
        y = layer_of(placement)(100 * X)
        torch.testing.assert_close(y.var(-1, unbiased=False), torch.ones(2, 6), rtol=1e-3, atol=1e-3)


def test_deepnorm_scales_the_stream_by_its_constants() -> None:
    assert deepnorm_constants(dataclasses.replace(DIMS, layers=12)) == (
        pytest.approx(2.2134, abs=5e-5),
        pytest.approx(0.3195, abs=5e-5),
    )
    layer = layer_of(DeepNorm())
    alpha = math.sqrt(math.sqrt(4.0))
    x = layer.around_mixer.outer(alpha * X + layer.mixer(X))
    torch.testing.assert_close(layer(X), layer.around_ffn.outer(alpha * x + layer.ffn(x)))


def test_rezero_and_unborn_layerscale_are_the_identity_at_the_start() -> None:
    assert torch.equal(layer_of(ReZero())(X), X)
    small_scale = layer_of(LayerScale(start=1e-6))
    assert 0 < (small_scale(X) - X).abs().max() < 1e-5


def test_layerscale_scales_each_channel_of_each_branch_of_pre() -> None:
    layer = layer_of(LayerScale(start=0.1))
    x = X + 0.1 * layer.mixer(layer.around_mixer.before(X))
    torch.testing.assert_close(layer(X), x + 0.1 * layer.ffn(layer.around_ffn.before(x)))
    assert layer.around_mixer.scale.gain.shape == (16,)


def test_rezero_adds_branches_of_the_bare_stream_times_a_scalar() -> None:
    layer = layer_of(ReZero())
    with torch.no_grad():
        layer.around_mixer.scale.gain.fill_(0.5)
        layer.around_ffn.scale.gain.fill_(2.0)
    x = X + 0.5 * layer.mixer(X)
    torch.testing.assert_close(layer(X), x + 2.0 * layer.ffn(x))


def test_ln_scaling_is_pre_in_the_first_layer_and_fades_with_depth() -> None:
    torch.testing.assert_close(layer_of(LnScaling())(X), layer_of(Pre())(X))
    layer = layer_of(LnScaling(), layer=3)
    norm = layer.around_mixer.before[0]
    x = X + layer.mixer(norm(X) / 2)
    torch.testing.assert_close(layer(X), x + layer.ffn(layer.around_ffn.before[0](x) / 2))


def test_without_norms_branches_read_and_join_the_stream_as_it_is() -> None:
    layer = layer_of(NoNorm())
    x = X + layer.mixer(X)
    torch.testing.assert_close(layer(X), x + layer.ffn(x))
    fixup = layer_of(Fixup())
    torch.testing.assert_close(fixup(X), layer(X))
    with torch.no_grad():
        fixup.around_mixer.before.bias.fill_(0.3)
        fixup.around_mixer.after.gain.fill_(2.0)
        fixup.around_mixer.scale.bias.fill_(0.1)
    x = X + 2 * fixup.mixer(X + 0.3) + 0.1
    torch.testing.assert_close(fixup(X), x + fixup.ffn(x))


def without_norms_inside(layer: Layer) -> Layer:
    """The layer with every norm but those before its branches taken out."""
    for module in layer.modules():
        if isinstance(module, nn.Linear) and "input_norm" in dict(module.named_children()):
            module.input_norm = nn.Identity()
    layer.around_mixer.after = nn.Identity()
    return layer


@pytest.mark.parametrize("placement", [SubLn(), NormFormer()], ids=lambda placement: placement.kind)
def test_without_their_inner_norms_sub_ln_and_normformer_are_pre(placement: AbstractPlacement) -> None:
    layer = layer_of(placement)
    full = layer(X)
    around_mixer, around_ffn = layer.around_mixer, layer.around_ffn
    bare = without_norms_inside(layer)
    x = step(around_mixer, bare.mixer, X)
    torch.testing.assert_close(bare(X), step(around_ffn, bare.ffn, x))
    assert not torch.allclose(bare(X), full)


def test_sub_ln_norms_what_enters_both_output_maps() -> None:
    layer, seen = layer_of(SubLn()), []
    for linear_map in (layer.mixer.out, layer.ffn.w_out):
        assert isinstance(linear_map.input_norm, nn.Module)
        linear_map.input_norm.register_forward_hook(lambda _, args, y: seen.append(y))
    layer(100 * X)
    assert len(seen) == 2
    for entering in seen:
        torch.testing.assert_close(entering.mean(-1), torch.zeros(2, 6), rtol=0, atol=1e-5)
        torch.testing.assert_close(entering.var(-1, unbiased=False), torch.ones(2, 6), rtol=0, atol=0.02)


def test_inner_norms_are_refused_where_experts_have_no_one_output_map(small: Make) -> None:
    with pytest.raises(InfeasibleArchitecture, match=r"output map inside the FFN, of which model\.ffn\.kind='moe'"):
        small({"placement.kind": "sub_ln", "ffn.kind": "moe"})
    small({"placement.kind": "sub_ln", "ffn.kind": "none"})


def test_hybridnorm_norms_queries_keys_and_values_and_the_stream_before_the_ffn() -> None:
    layer = layer_of(HybridNorm())
    mixer = layer.mixer
    norm = LayerNormConfig().build(16)
    q, k, v = (norm(X @ part.weight.T) for part in (mixer.query, mixer.key, mixer.value))
    x = X + mixer.out(nn.functional.scaled_dot_product_attention(q, k, v))
    y = layer.around_ffn.entry(x)
    torch.testing.assert_close(layer(X), y + layer.ffn(y))


def test_mix_ln_is_post_first_and_pre_after(small: Make) -> None:
    dims = Dims(d_model=16, d_ff=32, layers=8, train_len=8, max_len=8)
    for layer, like in ((0, Post()), (1, Post()), (2, Pre()), (7, Pre())):
        torch.testing.assert_close(layer_of(MixLn(), layer=layer, dims=dims)(X), layer_of(like)(X))
    assert small({"placement.kind": "mix_ln", "layers": 3}).canonical().placement == Pre()


def test_macaron_is_half_an_ffn_the_mixer_and_half_an_ffn() -> None:
    layer = layer_of(Macaron())
    first, rest = layer.first, layer.rest
    x = X + 0.5 * first.branch.ffn(first.around.before(X))
    x = x + rest.mixer(rest.around_mixer.before(x))
    torch.testing.assert_close(layer(X), x + 0.5 * rest.ffn(rest.around_ffn.before(x)))
    assert first.branch.ffn.w_in.weight is not rest.ffn.w_in.weight
    assert first.branch.ffn.w_in.weight.role == Role.FFN_IN


def test_ngpt_stays_on_the_unit_sphere() -> None:
    layer = layer_of(Ngpt())
    y = layer(100 * X)
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(2, 6))
    unit = nn.functional.normalize(X, dim=-1)
    moved = nn.functional.normalize(layer.layer.mixer(unit), dim=-1)
    half = nn.functional.normalize(unit + 0.05 * (moved - unit), dim=-1)
    moved = nn.functional.normalize(layer.layer.ffn(half), dim=-1)
    torch.testing.assert_close(layer(X), nn.functional.normalize(half + 0.05 * (moved - half), dim=-1))


def test_normformer_scales_each_head_before_the_output_map(small: Make) -> None:
    """NormFormer, section 3.2: concat(gamma_1 h_1, ...) W_O, each gamma 1 at the start."""
    plain = small({"placement.kind": "normformer"}).build(seed=0).eval()
    scaled = small({"placement.kind": "normformer", "placement.normformer.scaled_heads": True}).build(seed=0).eval()
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(scaled(tokens)[0], plain(tokens)[0])
    out = scaled.layers[0].mixer.mixer.out
    gain = out.input_norm.gain
    assert len(gain) == scaled.config.mixer.head_shape().heads == 4
    x = torch.randn(2, 6, out.in_features)
    with torch.no_grad():
        gain.copy_(torch.tensor([1.0, 2.0, 0.0, -3.0]))
        torch.testing.assert_close(out(x), (x * gain.repeat_interleave(8)) @ out.weight.T)
    _, state = scaled.step(tokens[:, :7], scaled.empty_state(1), 0)
    torch.testing.assert_close(scaled.step(tokens[:, 7:], state, 7)[0], scaled(tokens)[0][:, 7:], rtol=1e-5, atol=1e-5)


def test_peri_is_sandwich_behind_a_norm_of_the_embedding(small: Make) -> None:
    torch.testing.assert_close(layer_of(Peri())(X), layer_of(Sandwich())(X))
    model = small({"placement.kind": "peri"}).build(seed=0)
    entering: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    model(torch.arange(20)[None])
    torch.testing.assert_close(entering[0].square().mean(-1), torch.ones(1, 20), rtol=0, atol=0.01)


class UnitBranch(nn.Module):
    """A random matrix that keeps the variance of what it is given."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(width, width, generator=generator) / math.sqrt(width))

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return x @ self.matrix


@pytest.mark.parametrize("layers", [4, 16])
@pytest.mark.parametrize(
    ("placement", "growth"),
    [(Pre(), 2.0), (Sandwich(), 2.0), (Peri(), 2.0), (Reordered(), 2.0), (Post(), 0.0)],
    ids=lambda value: getattr(value, "kind", None),
)
def test_the_stream_grows_by_the_variance_of_each_unit_branch(
    placement: AbstractPlacement, growth: float, layers: int
) -> None:
    dims = Dims(d_model=256, d_ff=8, layers=layers, train_len=8, max_len=8)
    x = torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(0))
    for layer in range(layers):
        branches = (UnitBranch(256, 2 * layer), UnitBranch(256, 2 * layer + 1))
        x = placement.build(dims, layer, RMSNormConfig(), *branches, nn.Identity())(x)
    assert float(x.detach().var()) == pytest.approx(growth * layers + 1, rel=0.05)


def test_what_stands_before_the_head_is_what_the_stream_needs() -> None:
    bare = {"post", "deepnorm", "rezero", "no_norm", "fixup"}
    assert {kind for kind, placement in PLACEMENTS.items() if not placement.final_norm} == bare


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_dropout_of_everything_leaves_the_residual_stream(kind: str) -> None:
    layer = layer_of(PLACEMENTS[kind](), dropout=1.0).train()
    expected = X
    if kind in ("post", "deepnorm"):
        expected = layer.around_ffn.outer(layer.around_mixer.outer(X))
    elif kind == "ngpt":
        expected = nn.functional.normalize(X, dim=-1)
    elif kind == "hybridnorm":
        expected = layer.around_ffn.entry(X)
    torch.testing.assert_close(layer(X), expected)
    if not PLACEMENTS[kind].opens_later:
        assert not torch.allclose(layer.eval()(X), expected)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_without_an_ffn_its_half_of_the_layer_is_left_out(kind: str) -> None:
    torch.manual_seed(0)
    placement = PLACEMENTS[kind]()
    mixer = MarkedAttention() if placement.reaches else TorchAttention()
    layer = placement.build(DIMS, 0, LayerNormConfig(), mixer, NoFFN(), nn.Identity())
    y = layer(X)
    assert y.shape == X.shape
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert "ffn" not in name
        assert parameter.grad is not None, name


SPLIT = [
    kind
    for kind, placement in PLACEMENTS.items()
    if placement().sublayer(DIMS, 0, LayerNormConfig(), nn.Identity(), nn.Identity()) is not None
]


def test_placements_that_need_the_whole_layer_say_so() -> None:
    assert set(PLACEMENTS) - set(SPLIT) == {"parallel", "normformer", "hybridnorm", "macaron", "ngpt"}


@pytest.mark.parametrize("kind", SPLIT)
def test_a_layer_is_its_sublayers_one_after_the_other(kind: str) -> None:
    placement = PLACEMENTS[kind]()
    layer = layer_of(placement)
    mixer, ffn = (twin(part) for part in parts_of(layer))
    for part in (mixer, ffn):
        for module in part.modules():
            module._forward_pre_hooks.clear()
    first, second = (placement.sublayer(DIMS, 0, LayerNormConfig(), branch, nn.Identity()) for branch in (mixer, ffn))
    assert first is not None
    assert second is not None
    torch.testing.assert_close(second(first(X)), layer(X))


def parts_of(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    inner = next((part for name in ("layer", "rest") for n, part in layer.named_children() if n == name), layer)
    return inner.mixer, inner.ffn


def test_experts_inside_any_layer_get_the_context_of_the_pass() -> None:
    for kind, placement in PLACEMENTS.items():
        if Role.FFN_OUT in placement.reaches:
            continue
        mixer = MarkedAttention() if placement.reaches else TorchAttention()
        layer = placement().build(DIMS, 0, LayerNormConfig(), mixer, Moe().build(DIMS), nn.Identity())
        for parameter in layer.parameters():
            nn.init.normal_(parameter, 0, 0.1)
        context = Context()
        layer(X, context)
        assert len(context.losses) == 2 * placement.ffns, kind
