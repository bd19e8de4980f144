"""Tensors that processes share out among themselves, and the whole tensors they stand for."""

from torch import Tensor
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)
"""Never shared out; told before the distributed part of torch is imported, which takes long."""


def whole(tensor: Tensor) -> Tensor:
    """The tensor as one process would hold it."""
    if type(tensor) in PLAIN:
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def laid_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor shared out as another of its shape is."""
    if type(other) in PLAIN:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)
