"""Residual forms that gate or weigh what layers add: their formulas, and where they are the plain form."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocks.gated_residual import GruGate, HighwayGate
from blocks.model import DecoderLM, ModelConfig

Make = Callable[..., ModelConfig]
TOKENS = torch.arange(20)[None]


def pair(small: Make, kind: str) -> tuple[DecoderLM, DecoderLM]:
    """A model with the residual form, and a plain one with the same layers."""
    model = small({"residual.kind": kind, "layers": 3}).build(seed=0).eval()
    plain = small({"layers": 3}).build(seed=0).eval()
    plain.load_state_dict({name: w for name, w in model.state_dict().items() if not name.startswith("residual.")})
    return model, plain


def draws(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 16, generator=generator) for _ in range(count)]


def test_the_gru_gate_is_its_published_formula() -> None:
    gate, (x, y) = GruGate(16, 2.0), draws(2)
    r = torch.sigmoid(y @ gate.reset_y.weight.T + x @ gate.reset_x.weight.T)
    z = torch.sigmoid(y @ gate.update_y.weight.T + x @ gate.update_x.weight.T - 2.0)
    h = torch.tanh(y @ gate.new_y.weight.T + (r * x) @ gate.new_x.weight.T)
    torch.testing.assert_close(gate(x, y), (1 - z) * x + z * h)


def test_the_gru_gate_is_that_of_torch_where_both_reset_alike() -> None:
    """torch resets U x where the paper resets x: the same for a diagonal U, and torch's z is the share kept."""
    gate, cell, (x, y) = GruGate(16, 2.0), torch.nn.GRUCell(16, 16), draws(2)
    with torch.no_grad():
        gate.new_x.weight.copy_(torch.diag(gate.new_x.weight.diagonal()))
        cell.weight_ih.copy_(torch.cat([gate.reset_y.weight, -gate.update_y.weight, gate.new_y.weight]))
        cell.weight_hh.copy_(torch.cat([gate.reset_x.weight, -gate.update_x.weight, gate.new_x.weight]))
        cell.bias_hh.zero_()
        cell.bias_ih.zero_()
        cell.bias_ih[16:32] = 2.0
        torch.testing.assert_close(gate(x, y).flatten(0, 1), cell(y.flatten(0, 1), x.flatten(0, 1)))


def test_an_open_highway_gate_is_plain_and_a_shut_one_passes_nothing(small: Make) -> None:
    gate, (x, y) = HighwayGate(16, 2.0), draws(2)
    torch.testing.assert_close(gate(x, y), x + torch.sigmoid(x @ gate.transform.weight.T - 2.0) * y)
    model, plain = pair(small, "highway_gate")
    embedded = model.embedding[TOKENS]
    with torch.no_grad():
        for gate in model.residual.gates:
            gate.shut.fill_(-1e4)
        torch.testing.assert_close(model(TOKENS)[0], plain(TOKENS)[0])
        for gate in model.residual.gates:
            gate.shut.fill_(1e4)
        torch.testing.assert_close(model(TOKENS)[0], model.final_norm(embedded) @ model.embedding.T)


@pytest.mark.parametrize("kind", ["gru_gate", "highway_gate"])
def test_gates_start_nearer_the_identity_the_more_they_are_shut(small: Make, kind: str) -> None:
    moved = []
    for start in (0.0, 2.0):
        model = small({"residual.kind": kind, f"residual.{kind}.start": start, "d_model": 64}).build(seed=0).eval()
        x = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(0))
        gate = model.residual.gates[0]
        moved.append(float((gate(x, x.flip(1)) - x).detach().norm()))
    assert moved[1] < 0.5 * moved[0]


def test_a_highway_over_post_norm_layers_mixes_the_stream_before_and_after(small: Make) -> None:
    """Highway Networks, eq. 3: T H(x) + (1 - T) x, where H is the layer, its norm and all."""
    model = small({"residual.kind": "highway_gate", "placement.kind": "post", "layers": 1}).build(seed=0).eval()
    seen: list[Tensor] = []
    model.layers[0].register_forward_hook(lambda _, args, out: seen.extend([args[0], out]))
    logits = model(TOKENS)[0]
    x, after = seen
    transform = torch.sigmoid(x @ model.residual.gates[0].transform.weight.T - 2.0)
    torch.testing.assert_close(logits, (transform * after + (1 - transform) * x) @ model.embedding.T)


def test_the_depth_average_starts_plain_and_sums_what_it_has_seen(small: Make) -> None:
    model, plain = pair(small, "depth_average")
    torch.testing.assert_close(model(TOKENS)[0], plain(TOKENS)[0])
    seen: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, args, out: seen.extend([args[0], out]))
    with torch.no_grad():
        for weights in model.residual.weights:
            weights.copy_(torch.linspace(-0.5, 1.0, len(weights)))
        model(TOKENS)
    start, first, second_in, second = seen[:4]
    torch.testing.assert_close(second_in, -0.5 * start + 1.0 * first)
    torch.testing.assert_close(seen[4], -0.5 * start + 0.25 * first + 1.0 * second)
