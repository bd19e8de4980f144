"""Residual forms: the setting at which each is the plain form, and the equation of each elsewhere."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from blocks import cost, registry
from blocks.families import RESIDUAL_OUTPUTS, AbstractPlacement, AbstractResidual, Context, Dims, InfeasibleArchitecture
from blocks.hyper_connections import HyperConnections
from blocks.model import DecoderLM, ModelConfig
from blocks.residual import StochasticDepth, UnetSkips

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]
TOKENS = torch.randint(48, (2, 13), generator=torch.Generator().manual_seed(0))
FORMS = registry.variants(AbstractResidual)


def stirred(model: DecoderLM) -> DecoderLM:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def made(small: Make, kind: str, **fields: object) -> ModelConfig:
    changes = {f"residual.{kind}.{name}": value for name, value in fields.items()}
    return small({"layers": 5, "residual.kind": kind, **changes})


def beside_plain(small: Make, kind: str, **fields: object) -> tuple[DecoderLM, DecoderLM]:
    """A model of a residual form, and the plain model with the same layers."""
    model, plain = stirred(made(small, kind, **fields).build(seed=0)), small({"layers": 5}).build(seed=0).eval()
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in plain.state_dict()})
    return model, plain


def set_residual(model: DecoderLM, **values: float) -> None:
    with torch.no_grad():
        for name, value in values.items():
            model.residual.get_parameter(name).fill_(value)


@pytest.mark.parametrize(
    ("kind", "neutral"),
    [
        ("value_residual", {"share": 1.0}),
        ("x0_lambdas", {"keep": 1.0, "add": 0.0}),
        ("unet_skips", {"weight": 0.0}),
        ("stochastic_depth", {}),
    ],
)
def test_each_form_has_a_setting_that_is_the_plain_form(small: Make, kind: str, neutral: dict[str, float]) -> None:
    model, plain = beside_plain(small, kind)
    set_residual(model, **neutral)
    torch.testing.assert_close(model(TOKENS)[0], plain(TOKENS)[0], rtol=0, atol=1e-6)
    set_residual(model, **{name: value - 0.5 for name, value in neutral.items()})
    assert not neutral or not torch.allclose(model(TOKENS)[0], plain(TOKENS)[0], atol=1e-3)


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("placement", ["pre", "parallel"])
def test_hyper_connections_start_as_the_plain_form(small: Make, streams: int, dynamic: bool, placement: str) -> None:
    changes = {"layers": 5, "placement.kind": placement}
    hyper = {
        "residual.kind": "hyper_connections",
        "residual.hyper_connections.streams": streams,
        "residual.hyper_connections.dynamic": dynamic,
    }
    model, plain = small({**changes, **hyper}).build(seed=0).eval(), small(changes).build(seed=0).eval()
    torch.testing.assert_close(model(TOKENS)[0], plain(TOKENS)[0], rtol=0, atol=1e-6)


def test_hyper_connections_follow_their_equations() -> None:
    dims = Dims(d_model=6, d_ff=8, layers=1, train_len=4, max_len=4)
    module = HyperConnections(dims, streams=3, dynamic=True).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    (connection,) = module.connections
    x, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((1, 1, 6), (6, 6)))
    y = module(x, [lambda h, values: h + F.linear(h, weight)])
    streams = x[0, 0].repeat(3, 1)
    normed = streams / (streams.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    width = connection.read + torch.tanh(normed @ connection.read_map.T)
    depth = connection.write + torch.tanh(normed @ connection.write_map.T)[:, 0]
    branch = F.linear(width[:, 0] @ streams, weight)
    expected = width[:, 1:].T @ streams + depth[:, None] * branch
    torch.testing.assert_close(y[0, 0], expected.mean(0))


def test_value_residual_mixes_in_the_values_of_the_first_layer(small: Make) -> None:
    model, _ = beside_plain(small, "value_residual")
    seen: dict[int, Tensor] = {}
    used: dict[int, Tensor] = {}
    for index, slot in enumerate(model.slots):
        attend = slot.mixer.attend

        def spy(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *,
            index: int = index,
            attend: Callable[..., Tensor] = attend,
            **rest: object,
        ) -> Tensor:
            used[index] = v.flatten(2)
            return attend(q, k, v, **rest)

        slot.mixer.attend = spy
        slot.mixer.value.register_forward_hook(lambda m, a, y, index=index: seen.__setitem__(index, y.clone()))
    model(TOKENS)
    torch.testing.assert_close(used[0], seen[0])
    for index in range(1, 5):
        share = model.residual.share[index - 1]
        torch.testing.assert_close(used[index], share * seen[index] + (1 - share) * seen[0])


def test_value_residual_of_nothing_but_the_first_layer_passes_no_gradient_to_later_values(small: Make) -> None:
    model, _ = beside_plain(small, "value_residual")
    set_residual(model, share=0.0)
    model(TOKENS)[0].square().mean().backward()
    gradients = [slot.mixer.value.weight.grad.abs().max() for slot in model.slots]
    assert gradients[0] > 0
    assert all(gradient == 0 for gradient in gradients[1:])


def test_a_fixed_share_has_no_parameter(small: Make) -> None:
    fixed, learned = (made(small, "value_residual", learned=learned) for learned in (False, True))
    assert cost.count_parameters(learned).total - cost.count_parameters(fixed).total == 4
    torch.testing.assert_close(fixed.build(seed=0)(TOKENS)[0], learned.build(seed=0)(TOKENS)[0])


@pytest.mark.parametrize(("layers", "pairs"), [(1, {}), (2, {}), (3, {2: 0}), (5, {4: 0, 3: 1}), (6, {5: 0, 4: 1})])
def test_skips_join_mirrored_layers_that_are_no_neighbours(layers: int, pairs: dict[int, int]) -> None:
    module = UnetSkips(layers, start=1.0)
    inputs: list[Tensor] = []

    def layer(x: Tensor, values: object) -> Tensor:
        inputs.append(x)
        return x + 10.0 ** len(inputs)

    module(torch.zeros(1, 1, 1), [layer] * layers)
    outputs = [x + 10.0 ** (index + 1) for index, x in enumerate(inputs)]
    for index in range(1, layers):
        added = outputs[pairs[index]] if index in pairs else 0.0
        assert torch.equal(inputs[index], outputs[index - 1] + added)


@pytest.mark.parametrize("unit", ["row", "element"])
def test_the_last_layer_reaches_its_target_rate_and_the_mean_is_kept(unit: str) -> None:
    module = StochasticDepth(4, rate=0.4, unit=unit)
    assert module.rates == pytest.approx((0.1, 0.2, 0.3, 0.4))
    torch.manual_seed(0)
    rows = torch.zeros(20000, 1, 4)
    shares = []
    for layer in range(4):
        calls = [lambda x, values, own=own: x + 1.0 if own else x for own in (index == layer for index in range(4))]
        added = module(rows, calls)
        shares.append(float((added == 0).float().mean()))
        assert float(added.mean()) == pytest.approx(1.0, abs=0.03)
        whole_rows = (added == 0).all(-1) | (added > 0).all(-1)
        assert bool(whole_rows.all()) == (unit == "row")
    assert shares == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.015)


def test_no_layer_is_dropped_in_evaluation(small: Make) -> None:
    model, plain = beside_plain(small, "stochastic_depth", rate=0.5)
    assert torch.equal(model(TOKENS)[0], plain(TOKENS)[0])
    assert not torch.equal(model.train()(TOKENS)[0], plain(TOKENS)[0])


def test_reductions_are_canonicalised(small: Make) -> None:
    for changes in (
        {"residual.kind": "looped", "residual.looped.blocks": 2},
        {"residual.kind": "unet_skips"},
        {"residual.kind": "stochastic_depth", "residual.stochastic_depth.rate": 0.0},
        {"residual.kind": "value_residual", "layers": 1},
    ):
        assert small(changes).canonical().residual.kind == "plain", changes
    one = {"layers": 4, "residual.kind": "looped", "residual.looped.order": "repeat"}
    assert small(one).canonical().residual.order == "cycle"


@pytest.mark.parametrize("kind", FORMS)
def test_forms_decode_checkpoint_and_copy(small: Make, kind: str) -> None:
    model = stirred(made(small, kind).build(seed=0))
    with torch.no_grad():
        whole, _ = model(TOKENS)
        state, parts = model.empty_state(2), []
        for start, end in ((0, 6), (6, 7), (7, 13)):
            part, state = model.step(TOKENS[:, start:end], state, start)
            parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)
    twin = copy.deepcopy(model)
    gradients = []
    for each, checkpointing in ((model, False), (twin, True)):
        each(TOKENS, checkpointing=checkpointing)[0].square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in each.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual.kind": "value_residual", "pattern.kind": "every_nth", "pattern.every_nth.every": 2,
          "pattern.every_nth.mixer.kind": "sliding_window"}, "same kind.*'softmax'.*'sliding_window'.*uniform"),
        ({"residual.kind": "value_residual", "pattern.kind": "every_nth", "pattern.every_nth.every": 2,
          "pattern.every_nth.mixer.softmax.kv_heads": 1}, "same heads.*kv_heads"),
        ({"residual.kind": "hyper_connections", "placement.kind": "post"}, "placement.kind='post'.*pre"),
        ({"residual.kind": "stochastic_depth", "placement.kind": "post"}, "placement.kind='post'.*pre"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(small: Make, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InfeasibleArchitecture, match=message):
        small({"layers": 4, **changes})


@pytest.mark.parametrize("kind", registry.variants(AbstractPlacement))
def test_additive_placements_are_those_that_leave_the_stream_alone(small: Make, kind: str) -> None:
    model = small({"placement.kind": kind, "layers": 8}).build(seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.role in RESIDUAL_OUTPUTS:
                parameter.zero_()
    x = 3 * torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0)) + 1

    with torch.no_grad():
        y = model.through_layers(x, Context, False)[0]
    assert model.config.placement.additive == torch.allclose(y, x, atol=1e-5)
