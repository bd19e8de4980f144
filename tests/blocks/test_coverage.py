"""The loss on attending again to what was attended to before (See et al. 2017)."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from blocks.model import ModelConfig
from blocks.pointer import coverage_loss

Make = Callable[..., ModelConfig]
SOURCE = torch.randint(48, (2, 9), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(48, (2, 7), generator=torch.Generator().manual_seed(0))


def of_head(small: Make, head: str) -> ModelConfig:
    return small({"stack.kind": "encoder_decoder", "stack.encoder_decoder.encoder_layers": 1,
                  "stack.encoder_decoder.head": head, "layers": 1})  # fmt: skip


def test_coverage_adds_up_what_is_looked_at_again() -> None:
    attention = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    assert coverage_loss(attention[:, :1]) == 0
    expected = 0.0
    for row in attention:
        covered = torch.zeros(4, dtype=torch.float64)
        for weights in row:
            expected += float(torch.minimum(weights, covered).sum())
            covered = covered + weights
    torch.testing.assert_close(coverage_loss(attention), torch.tensor(expected / 10, dtype=torch.float64))


def test_it_is_nothing_for_new_places_and_whole_for_the_same_place() -> None:
    assert coverage_loss(torch.eye(4)[None]) == 0
    again = F.one_hot(torch.zeros(1, 4, dtype=torch.long), 4).float()
    torch.testing.assert_close(coverage_loss(again), torch.tensor(3 / 4))


def test_padding_of_the_target_counts_for_nothing() -> None:
    attention = torch.rand(2, 6, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
    live = torch.tensor([[True] * 4 + [False] * 2] * 2)
    torch.testing.assert_close(coverage_loss(attention, live), coverage_loss(attention[:, :4]))
    assert coverage_loss(attention, torch.zeros_like(live)) == 0


def test_the_head_with_coverage_adds_the_loss_to_the_auxiliary_one_and_changes_nothing_else(small: Make) -> None:
    plain, covering = (of_head(small, head).build(seed=0) for head in ("pointer_copy", "pointer_coverage"))
    (logits, none), (same, auxiliary) = plain(SOURCE, TARGET), covering(SOURCE, TARGET)
    assert torch.equal(logits, same)
    assert none == 0
    assert 0 < auxiliary < 1
    auxiliary.backward()
    gradient = covering.pointer.query.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0


@pytest.mark.slow
def test_training_with_coverage_looks_again_at_less(small: Make) -> None:
    found = {}
    for head in ("pointer_copy", "pointer_coverage"):
        model = of_head(small, head).build(seed=0)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(30):
            logits, auxiliary = model(SOURCE, TARGET)
            loss = F.nll_loss(logits.flatten(0, 1), TARGET.roll(-1, 1).flatten()) + auxiliary
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.coverage = 1.0
        found[head] = float(model(SOURCE, TARGET)[1].detach())
    assert found["pointer_coverage"] < found["pointer_copy"]
