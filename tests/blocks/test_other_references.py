"""Blocks against mup and torchscale, whose requirements contradict ours: references.txt has them installed alone."""

import torch
from einops import rearrange
from mup import MuAdam, MuReadout, set_base_shapes
from reference_table import Compare
from torch import Tensor, nn
from torchscale.component.xpos_relative_position import XPOS

from blocks.families import Dims, HeadShape, Role
from blocks.inits.maximal_update import Mup
from blocks.positions.xpos import Xpos

LENGTH = 63
DIMS = Dims(d_model=48, d_ff=96, layers=1, train_len=64, max_len=64)


def halves(x: Tensor) -> Tensor:
    """Channels 0, 2, ..., 1, 3, ...: interleaved pairs brought to half-split order."""
    return rearrange(x, "... (pair two) -> ... (two pair)", two=2)


def test_xpos_scores_equal_torchscale(compared: Compare) -> None:
    q, k = torch.randn(2, 4, LENGTH, 16), torch.randn(2, 4, LENGTH, 16)
    theirs = XPOS(16)
    their_q, their_k = (
        theirs(x.flatten(0, 1), downscale=downscale).unflatten(0, (2, 4)) for x, downscale in ((q, False), (k, True))
    )
    position = Xpos().build(DIMS, HeadShape(heads=4, kv_heads=4, head_dim=16))
    our_q, our_k = position.rotate(halves(q).transpose(1, 2), halves(k).transpose(1, 2))
    ours = torch.einsum("bthk,bshk->bhts", our_q, our_k)
    compared("position.xpos", "torchscale XPOS", ours, their_q @ their_k.transpose(-1, -2), rtol=1e-4, atol=1e-4)


class Widths(nn.Module):
    """A model of every kind of parameter that maximal update tells apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.query = nn.Linear(width, width, bias=False)
        self.ffn_in = nn.Linear(width, 4 * width)
        self.ffn_out = nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.readout = MuReadout(width, 40, bias=False)


def test_learning_rates_and_the_readout_are_those_of_mup(compared: Compare) -> None:
    roles = {
        "embedding.weight": (Role.EMBEDDING, 40, 256), "query.weight": (Role.QUERY, 256, 256),
        "ffn_in.weight": (Role.FFN_IN, 256, 1024), "ffn_in.bias": (Role.BIAS, 0, 0),
        "ffn_out.weight": (Role.FFN_OUT, 1024, 256), "norm.weight": (Role.GAIN, 0, 0),
        "norm.bias": (Role.BIAS, 0, 0), "readout.weight": (Role.HEAD, 256, 40),
    }  # fmt: skip
    model = set_base_shapes(Widths(256), Widths(32), delta=Widths(64))
    optimizer = MuAdam(model.parameters(), lr=1.0)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    names = dict(model.named_parameters())
    assert names.keys() == roles.keys()
    rule = Mup(base_width=32)
    ours = torch.tensor([rule.learning_rate_factor(*role, 2) for role in roles.values()])
    theirs = torch.tensor([rates[id(names[name])] for name in roles])
    compared("init.mup", "mup MuAdam: learning rates at 8 times the base width", ours, theirs, rtol=1e-6, atol=0)
    multiplier = torch.tensor([rule.logit_multiplier(256)])
    width = torch.tensor([1 / model.readout.width_mult()])
    compared("init.mup", "mup MuReadout: factor on the logits", multiplier, width, rtol=1e-6, atol=0)
