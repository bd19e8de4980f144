"""The placement on the unit sphere with its weights there too."""

import math
from collections.abc import Callable

import torch
from torch import nn

from blocks.families import Role
from blocks.model import ModelConfig

Make = Callable[..., ModelConfig]
UNIT = {"placement.kind": "ngpt", "placement.ngpt.weights": "unit"}


def assert_unit(model: nn.Module) -> None:
    """Every row of a map that reads the stream, every column of one that writes it, has length 1."""
    checked = set()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            written = parameter.role in (Role.MIXER_OUT, Role.FFN_OUT)
            lengths = parameter.norm(dim=0 if written else 1)
            torch.testing.assert_close(lengths, torch.ones_like(lengths), msg=name)
            checked.add(parameter.role)
    assert checked >= {Role.EMBEDDING, Role.QUERY, Role.KEY, Role.VALUE, Role.MIXER_OUT, Role.FFN_IN, Role.FFN_OUT}


def test_ngpt_keeps_weights_at_unit_length_through_training(small: Make) -> None:
    model = small(UNIT).build(seed=0)
    assert_unit(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tokens = torch.arange(20)[None]
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(tokens)[0][0, :-1], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(float(model.embedding.detach().norm(dim=1).mean()) - 1) > 1e-6
        model.after_step()
        assert_unit(model)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5


def test_ngpt_brings_heads_to_unit_length_and_scales_what_unit_maps_return(small: Make) -> None:
    model = small({**UNIT, "ffn.kind": "swiglu"}).build(seed=0)
    mixer, ffn = model.layers[0].layer.mixer.mixer, model.layers[0].layer.ffn
    x = nn.functional.normalize(torch.randn(2, 6, 32), dim=-1)
    for project, length in ((mixer.query, 8.0), (mixer.key, 1.0)):
        heads = project(x).unflatten(-1, (-1, 8))
        torch.testing.assert_close(heads.norm(dim=-1), torch.full(heads.shape[:-1], length))
    torch.testing.assert_close(ffn.w_gate(x), math.sqrt(32) * (x @ ffn.w_gate.weight.T))
    torch.testing.assert_close(ffn.w_in(x), x @ ffn.w_in.weight.T)
    without_gate = small({**UNIT, "ffn.kind": "gelu"}).build(seed=0).layers[0].layer.ffn
    torch.testing.assert_close(without_gate.w_in(x), math.sqrt(32) * (x @ without_gate.w_in.weight.T))


def test_other_placements_leave_weights_alone_after_a_step(small: Make) -> None:
    for changes in ({}, {"placement.kind": "ngpt"}):
        model = small(changes).build(seed=0)
        before = [parameter.clone() for parameter in model.parameters()]
        model.after_step()
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
