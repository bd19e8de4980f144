"""Norms inside a branch: put at the inputs or outputs of its linear maps, which are found by their role."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from blocks.families import Role

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
