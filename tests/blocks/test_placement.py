"""Placements: equality with torch's own layers, and the equations of the others."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocks import registry
from blocks.families import AbstractPlacement, Dims
from blocks.ffn.relu import Relu
from blocks.norms.standard import LayerNormConfig
from blocks.placements.normed import Parallel, Post, Pre, Sandwich

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


def layer_of(placement: AbstractPlacement, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return placement.build(DIMS, 0, LayerNormConfig(), TorchAttention(), Relu().build(DIMS), nn.Dropout(dropout))


@pytest.mark.parametrize(("placement", "norm_first"), [(Pre(), True), (Post(), False)], ids=["pre", "post"])
def test_pre_and_post_equal_torch(placement: AbstractPlacement, norm_first: bool) -> None:
    ours = layer_of(placement)
    theirs = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    with torch.no_grad():
        theirs.self_attn.load_state_dict(ours.mixer.attention.state_dict())
        for mine, linear in ((ours.ffn.w_in, theirs.linear1), (ours.ffn.w_out, theirs.linear2)):
            linear.weight.copy_(mine.weight)
            linear.bias.zero_()
    torch.testing.assert_close(ours(X), theirs.train()(X))


def test_sandwich_norms_each_branch_on_both_sides() -> None:
    layer = layer_of(Sandwich())
    x = X + layer.mixer_out_norm(layer.mixer(layer.mixer_norm(X)))
    torch.testing.assert_close(layer(X), x + layer.ffn_out_norm(layer.ffn(layer.ffn_norm(x))))


def test_sandwich_with_zero_outer_gains_is_the_identity() -> None:
    layer = layer_of(Sandwich())
    with torch.no_grad():
        layer.mixer_out_norm.gain.zero_()
        layer.ffn_out_norm.gain.zero_()
    assert torch.equal(layer(X), X)


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


def test_post_leaves_unit_variance_in_the_residual_stream() -> None:
    y = layer_of(Post())(100 * X)
    torch.testing.assert_close(y.var(-1, unbiased=False), torch.ones(2, 6), rtol=1e-3, atol=1e-3)


def test_only_post_goes_without_a_final_norm() -> None:
    assert {kind for kind, placement in PLACEMENTS.items() if not placement.final_norm} == {"post"}


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_dropout_of_everything_leaves_the_residual_stream(kind: str) -> None:
    layer = layer_of(PLACEMENTS[kind](), dropout=1.0).train()
    expected = layer.ffn_norm(layer.mixer_norm(X)) if kind == "post" else X
    torch.testing.assert_close(layer(X), expected)
    assert not torch.allclose(layer.eval()(X), expected)
