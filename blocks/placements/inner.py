"""Norms and factors inside a branch: put at the inputs or outputs of its linear maps, which are found by their role."""

from collections.abc import Callable, Iterator

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from blocks.decoding import MixerSlot
from blocks.families import HeadShape, Role, mark

ONE_HEAD = HeadShape(heads=1, kv_heads=1, head_dim=1)
"""Stands for the heads of a mixer that has none to speak of."""
BuildNorm = Callable[[int], nn.Module]
"""A norm over so many channels."""


def norm_inputs(branch: nn.Module, role: Role, build_norm: BuildNorm) -> None:
    """Give every linear map of this role in the branch a norm on its input."""
    for linear in linears(branch, role):
        linear.add_module("input_norm", build_norm(linear.in_features))
        linear.register_forward_pre_hook(_normed_input)


def norm_outputs(branch: nn.Module, role: Role, build_norm: BuildNorm) -> None:
    """Give every linear map of this role in the branch a norm on its output."""
    for linear in linears(branch, role):
        linear.add_module("output_norm", build_norm(linear.out_features))
        linear.register_forward_hook(_normed_output)


def linears(branch: nn.Module, role: Role) -> Iterator[nn.Linear]:
    """The linear maps of a role."""
    for module in list(branch.modules()):
        if isinstance(module, nn.Linear) and getattr(module.weight, "role", None) == role:
            yield module


def _normed_input(linear: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (linear.get_submodule("input_norm")(args[0]),)


def _normed_output(linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return linear.get_submodule("output_norm")(output)


class HeadScale(nn.Module):
    """A learned factor for each head of equal width, 1 at the start."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.gain = mark(nn.Parameter(torch.ones(heads)), Role.GAIN)

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        heads = rearrange(x, "B T (H V) -> B T H V", H=len(self.gain))
        return rearrange(heads * self.gain[:, None].to(x.dtype), "B T H V -> B T (H V)")


def heads_of(branch: nn.Module) -> HeadShape:
    """The heads of a mixer sublayer; of one head where it has none."""
    return branch.shape if isinstance(branch, MixerSlot) and branch.shape is not None else ONE_HEAD


def scale_heads(branch: nn.Module) -> None:
    """Give what each head of a mixer hands to its output map a learned factor."""
    heads = heads_of(branch).heads
    norm_inputs(branch, Role.MIXER_OUT, lambda width: HeadScale(heads if width % heads == 0 else 1))
