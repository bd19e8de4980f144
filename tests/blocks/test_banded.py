"""Windows in blocks against the definition: outputs, gradients, odd lengths, padding, packed documents."""

import itertools

import pytest
import torch
from torch import Tensor

from blocks.ops.attention import reference_attention, sdpa_attention
from blocks.ops.banded import banded_attention, pays

CASES = list(itertools.product((9, 32, 45), (1, 4, 8), (True, False), ("", "live", "segments", "both")))


def drawn(length: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, length, 4, 8), (2, length, 2, 8), (2, length, 2, 6))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("length", "window", "causal", "hidden"), CASES)
def test_blocks_equal_the_definition(length: int, window: int, causal: bool, hidden: str) -> None:
    options: dict[str, object] = {"scale": 0.3, "window": window, "causal": causal}
    if hidden in ("live", "both"):
        options["live"] = torch.arange(length)[None] >= torch.tensor([[0], [length // 2]])
    if hidden in ("segments", "both"):
        options["segments"] = (torch.arange(length)[None] // torch.tensor([[5], [7]])).int()
    ours, theirs = drawn(length, 1), drawn(length, 1)
    out, expected = banded_attention(*ours, **options), reference_attention(*theirs, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((out * weights).sum(), ours),
        torch.autograd.grad((expected * weights).sum(), theirs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def saved(length: int, window: int) -> int:
    """Bytes that a pass keeps for its backward pass."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sdpa_attention(*drawn(length, 0), scale=0.3, window=window)
    return sum(storages.values())


def test_memory_grows_with_length_and_not_with_its_square() -> None:
    assert pays(512, 512, 16)
    assert saved(1024, 16) / saved(512, 16) < 2.1
