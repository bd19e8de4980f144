"""Constants that go by depth on either side of an encoder-decoder: each side by its own depth, or by both."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from blocks.families import Direction, Role
from blocks.inits.standard import ScaledNormal
from blocks.model import ModelConfig
from blocks.placements.scaled import deepnorm_constants

Make = Callable[..., ModelConfig]
N, M = 6, 3


def two_sided(small: Make, **changes: object) -> ModelConfig:
    """An encoder of N layers before a decoder of M."""
    stack = {"stack.kind": "encoder_decoder", "stack.encoder_decoder.encoder_layers": N, "layers": M}
    return small({**stack, "d_model": 64, **{name.replace("__", "."): value for name, value in changes.items()}})


def test_deepnorm_has_the_published_constants_on_each_side(small: Make) -> None:
    config = two_sided(small, placement__kind="deepnorm", init__kind="deepnorm")
    encoder, decoder = config.stack.sides(config).values()
    assert (encoder.layers, encoder.direction) == (N, Direction.BIDIRECTIONAL)
    both = (N**4 * M) ** (1 / 16)
    assert deepnorm_constants(encoder) == (pytest.approx(0.81 * both), pytest.approx(0.87 / both))
    assert deepnorm_constants(decoder) == (pytest.approx((3 * M) ** 0.25), pytest.approx((12 * M) ** -0.25))
    model = config.build(seed=0)
    assert model.encoder.layers[0].around_mixer.skip == pytest.approx(0.81 * both)
    assert [layer.around.skip for layer in model.decoder.layers[0].sublayers] == [pytest.approx((3 * M) ** 0.25)] * 3
    assert small({"placement.kind": "deepnorm", "layers": 4}).build(seed=0).layers[0].around_mixer.skip == 8**0.25


def test_weights_are_drawn_by_the_constants_of_their_side(small: Make) -> None:
    plain = two_sided(small, placement__kind="deepnorm", init__kind="xavier").build(seed=0)
    scaled = two_sided(small, placement__kind="deepnorm", init__kind="deepnorm").build(seed=0)
    seen = set()
    for (name, weight), (_, base) in zip(scaled.named_parameters(), plain.named_parameters(), strict=True):
        side = name.partition(".")[0]
        if side not in ("encoder", "decoder") or weight.dim() != 2:
            continue
        beta = 0.87 * (N**4 * M) ** (-1 / 16) if side == "encoder" else (12 * M) ** -0.25
        factor = 1.0 if weight.role in (Role.QUERY, Role.KEY) else beta
        torch.testing.assert_close(weight, factor * base, msg=name)
        seen.add((side, weight.role))
    assert {(side, role) for side in ("encoder", "decoder") for role in (Role.QUERY, Role.VALUE, Role.FFN_OUT)} <= seen


def test_t_fixup_scales_encoders_decoders_and_embeddings_as_published(small: Make) -> None:
    model = two_sided(small, placement__kind="no_norm", init__kind="t_fixup", tied=False).build(seed=0)
    for weight, factor in (
        (model.encoder.layers[0].mixer.mixer.value.weight, 0.67 * N**-0.25),
        (model.decoder.layers[0].sublayers[1].branch.value.weight, (9 * M) ** -0.25),
        (model.decoder.layers[2].sublayers[2].branch.w_out.weight, (9 * M) ** -0.25),
        (model.embedding, (9 * M) ** -0.25),
        (model.encoder.layers[0].mixer.mixer.query.weight, 1.0),
    ):
        fan_in, fan_out = weight.fans
        xavier = 64**-0.5 if weight is model.embedding else (2 / (fan_in + fan_out)) ** 0.5
        assert float(weight.detach().std()) == pytest.approx(factor * xavier, rel=0.06)


def test_rules_that_go_by_depth_go_by_that_of_the_side(small: Make) -> None:
    model = two_sided(small, init__kind="scaled_normal").build(seed=0)
    for side, layers in ((model.encoder, N), (model.decoder, M)):
        outputs = [p for p in side.parameters() if getattr(p, "role", None) in (Role.MIXER_OUT, Role.FFN_OUT)]
        std = torch.cat([weight.detach().flatten() for weight in outputs]).std()
        assert float(std) == pytest.approx(ScaledNormal().std(Role.FFN_OUT, 64, 64, layers), rel=0.05)


@pytest.mark.slow
def test_an_encoder_decoder_under_deepnorm_learns(small: Make) -> None:
    model = two_sided(small, placement__kind="deepnorm", init__kind="deepnorm").build(seed=0)
    source = torch.randint(48, (8, 7), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(30):
        logits, _ = model(source, source)
        loss = F.cross_entropy(logits.flatten(0, 1), source.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
