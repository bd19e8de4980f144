"""Looped layers: their unrolled copy, and which layers can share a block."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from blocks import cost, registry
from blocks.families import AbstractPlacement, Context, InfeasibleArchitecture, PositionModule
from blocks.model import ModelConfig

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]
TOKENS = torch.randint(48, (2, 13), generator=torch.Generator().manual_seed(0))
LINEAR_EVERY_SECOND = {
    "pattern.kind": "every_nth",
    "pattern.every_nth.every": 2,
    "pattern.every_nth.mixer.kind": "linear",
}


def loop(order: str) -> dict[str, object]:
    """Two blocks in such an order."""
    return {"residual.kind": "looped", "residual.looped.blocks": 2, "residual.looped.order": order}


@pytest.mark.parametrize(("order", "used"), [("cycle", [0, 1, 0, 1, 0]), ("repeat", [0, 0, 0, 1, 1])])
def test_a_looped_model_is_its_unrolled_copy(small: Make, order: str, used: list[int]) -> None:
    config = small({"layers": 5, **loop(order)})
    model = config.build(seed=0).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    plain = small({"layers": 5}).build(seed=0).eval()
    assert model.layer_block == used
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("layers.")}
    for layer, block in enumerate(used):
        state |= {f"layers.{layer}.{name}": tensor for name, tensor in model.layers[block].state_dict().items()}
    plain.load_state_dict(state)
    torch.testing.assert_close(model(TOKENS)[0], plain(TOKENS)[0])
    one = cost.count_layer(config, config.mixer).total
    assert cost.count_parameters(small({"layers": 5})).total - cost.count_parameters(config).total == 3 * one
    assert cost.measure(config, 16).flops_per_token == cost.measure(small({"layers": 5}), 16).flops_per_token
    assert (
        cost.measure(config, 16).state_bytes_per_token == cost.measure(small({"layers": 5}), 16).state_bytes_per_token
    )


def test_a_loop_over_the_period_of_a_pattern_is_legal(small: Make) -> None:
    config = small({"layers": 4, **loop("cycle"), **LINEAR_EVERY_SECOND})
    assert [slot.mixer.__class__.__name__ for slot in config.build(seed=0).slots] == [
        "AttentionModule", "LinearModule", "AttentionModule", "LinearModule",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual.kind": "looped", **LINEAR_EVERY_SECOND}, "one block in layers.*'softmax' and 'linear'.*period"),
        ({**loop("repeat"), "placement.kind": "mix_ln"}, "one block in layers.*'mix_ln'.*that would do: deepnorm.*pre"),
        ({**loop("cycle"), "placement.kind": "ln_scaling"}, "one block in layers.*'ln_scaling'.*that would do: deepn"),
    ],
)
def test_layers_that_differ_share_no_block(small: Make, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InfeasibleArchitecture, match=message):
        small({"layers": 4, **changes})


def test_a_loop_within_the_layers_that_a_placement_builds_alike_is_legal(small: Make) -> None:
    placement = {"placement.kind": "mix_ln", "placement.mix_ln.post_share": 0.5}
    first, second = small({"layers": 4, **placement, **loop("repeat")}).build(seed=0, device="meta").layers
    assert not isinstance(first.around_mixer.outer, nn.Identity)
    assert isinstance(second.around_mixer.outer, nn.Identity)


@pytest.mark.parametrize("kind", registry.variants(AbstractPlacement))
def test_a_placement_says_which_of_its_layers_differ(small: Make, kind: str) -> None:
    """Else two settings of it could be one model under a loop, or one layer stand for another."""
    config = small({"placement.kind": kind, "layers": 8})
    layers = config.build(seed=0).layers
    forms = [config.placement.layer_form(config.dims(), layer) for layer in range(8)]
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    for layer in layers[1:]:
        layer.load_state_dict(dict(zip(layer.state_dict(), layers[0].state_dict().values(), strict=True)))
    with torch.no_grad():
        outputs = [layer(x, PositionModule(), Context()) for layer in layers]
    for one, other in itertools.combinations(range(8), 2):
        assert torch.equal(outputs[one], outputs[other]) == (forms[one] == forms[other])
