"""Nested values of tensors and plain data, taken apart into what safetensors and JSON can hold, and put together."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON data, its tensors put aside under their names; TypeError for what is neither."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": [name, value.device.type]}
    if isinstance(value, Mapping):
        return {"dict": [[key, pack(child, f"{name}/{key}", tensors)] for key, child in value.items()]}
    if isinstance(value, list | tuple):
        parts = [pack(child, f"{name}/{index}", tensors) for index, child in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{name} is a {type(value).__name__}; checkpoints hold tensors, numbers, texts and lists of them")


def unpack(packed: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of pack; every tensor on the device it was on."""
    ((kind, value),) = packed.items()
    if kind == "tensor":
        name, device = value
        return tensors[name].to(device)
    if kind == "dict":
        return {key: unpack(child, tensors) for key, child in value}
    if kind in ("list", "tuple"):
        parts = [unpack(child, tensors) for child in value]
        return tuple(parts) if kind == "tuple" else parts
    return value


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with memory of their own each, as safetensors wants them."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        own = tensor.contiguous()
        place = own.untyped_storage().data_ptr()
        found[name] = own.clone() if place in seen else own
        seen.add(place)
    return found
