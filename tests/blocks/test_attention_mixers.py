"""What the attention mixers add: the norm of queries and keys, the entropy term, dropout."""

import dataclasses

import pytest
import torch
from small_mixers import (
    DIMS,
    LENGTH,
    SMALL_SOFTMAX,
    SMALL_WINDOW,
    build,
    draw,
)
from torch import Tensor, nn

from blocks.families import AbstractMixer, Context, PositionModule
from blocks.mixers.heads import AttentionModule
from blocks.ops.attention import attention_weights, entropy
from blocks.positions.rotary import Rotary
from blocks.positions.xpos import Xpos

pytestmark = pytest.mark.slow


def attention(mixer: AbstractMixer, position: str = "none") -> tuple[AttentionModule, PositionModule]:
    module, built = build(mixer, position)
    assert isinstance(module, AttentionModule)
    return module, built


@pytest.mark.parametrize("kind", ["l2", "rms", "layer"])
def test_qk_norm_makes_the_scale_of_the_projections_irrelevant(kind: str) -> None:
    module, position = attention(dataclasses.replace(SMALL_SOFTMAX, qk_norm=kind), "rotary")
    x = draw(2, LENGTH, 24)
    before = module(x, position, Context())
    for projection in (module.query, module.key):
        projection.weight.data *= 50
    torch.testing.assert_close(module(x, position, Context()), before, rtol=1e-3, atol=1e-4)
    plain, _ = attention(SMALL_SOFTMAX)
    first = plain(x, position, Context())
    plain.query.weight.data *= 50
    assert (plain(x, position, Context()) - first).abs().max() > 0.05


@pytest.mark.parametrize(("kind", "bound"), [("l2", 11.978), ("rms", 8**0.5), ("layer", 8**0.5)])
def test_qk_norm_bounds_the_logits_at_the_start(kind: str, bound: float) -> None:
    module = dataclasses.replace(SMALL_SOFTMAX, qk_norm=kind).build(DIMS)
    assert isinstance(module, AttentionModule)
    q, k, _ = module._project(1000 * draw(4, LENGTH, 24))
    logits = module.scale * torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(2, 2))
    assert 0.7 * bound < logits.abs().max().item() <= bound * 1.0001


def test_rms_norm_commutes_with_rotation_until_its_gain_differs_over_channels() -> None:
    q = draw(1, 30, 1, 16, dtype=torch.float64)
    rotary = Rotary().build(DIMS, SMALL_SOFTMAX.head_shape())

    def gap(gain: Tensor) -> float:
        def norm(x: Tensor) -> Tensor:
            return nn.functional.rms_norm(x, (16,), gain)

        return (rotary.rotate(norm(q), q)[0] - norm(rotary.rotate(q, q)[0])).abs().max().item()

    assert gap(torch.ones(16, dtype=torch.float64)) < 1e-14
    assert gap(1 + draw(16, seed=1, dtype=torch.float64)) > 0.1


def test_norms_act_before_the_rotation() -> None:
    module, position = attention(dataclasses.replace(SMALL_SOFTMAX, qk_norm="rms"), "xpos")
    x = draw(1, LENGTH, 24)
    q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (module.query, module.key, module.value))
    q, k = module.query_norm(q), module.key_norm(k)
    q, k = Xpos().build(DIMS, module.shape).rotate(q, k)
    weights = attention_weights(q, k, scale=8**-0.5)
    mixed = torch.einsum("bhts,bshv->bthv", weights, v.repeat_interleave(2, 2)).flatten(2)
    torch.testing.assert_close(module(x, position, Context()), module.out(mixed))


@pytest.mark.parametrize("mixer", [SMALL_SOFTMAX, SMALL_WINDOW])
def test_entropy_term_is_its_weight_times_the_mean_entropy_of_live_rows(mixer: AbstractMixer) -> None:
    module, position = attention(dataclasses.replace(mixer, entropy_weight=0.05))
    assert module.backends["attention"].startswith("reference (not sdpa: ")
    x, live = draw(2, LENGTH, 24), torch.ones(2, LENGTH, dtype=torch.bool)
    live[0, 15:] = False
    context = Context(live=live)
    y = module(x, position, context)
    q, k, _ = module._project(x)
    rows = entropy(attention_weights(q, k, scale=module.scale, window=module.window)).mean(1)
    (loss,) = context.losses
    torch.testing.assert_close(loss, 0.05 * rows[live].mean())
    plain, _ = attention(mixer)
    torch.testing.assert_close(y, plain(x, position, Context(live=live)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("weight", "sign"), [(0.1, -1), (-0.1, 1)])
def test_training_on_the_entropy_term_alone_sharpens_or_spreads(weight: float, sign: int) -> None:
    module, position = attention(dataclasses.replace(SMALL_SOFTMAX, entropy_weight=weight))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    history = []
    for _ in range(10):
        context = Context()
        module(draw(2, LENGTH, 24), position, context)
        optimizer.zero_grad()
        context.losses[0].backward()
        optimizer.step()
        history.append(context.losses[0].item() / weight)
    assert (history[-1] - history[0]) * sign > 0.01


@pytest.mark.parametrize("mixer", [SMALL_SOFTMAX, SMALL_WINDOW])
def test_attention_dropout_acts_in_training_only(mixer: AbstractMixer) -> None:
    module, position = attention(dataclasses.replace(mixer, attention_dropout=0.3))
    plain, _ = attention(mixer)
    x = draw(2, LENGTH, 24)
    expected = plain(x, position, Context())
    torch.testing.assert_close(module.eval()(x, position, Context()), expected)
    torch.manual_seed(0)
    first = module.train()(x, position, Context())
    torch.manual_seed(0)
    assert module(x, position, Context()).equal(first)
    assert not module(x, position, Context()).equal(first)
