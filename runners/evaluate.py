"""Evaluation: loss in nats per token on fixed windows, without dropout or label smoothing."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional as F

from blocks.model import DecoderLM
from runners.group import ALONE, Group
from runners.tasks.data import IGNORED, Batch


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One reading of one split."""

    loss: float
    """May be NaN or infinite."""
    accuracy: float
    """Share of counted positions whose likeliest token is the target."""
    sequences: tuple[tuple[float, int], ...] = ()
    """Summed loss and counted targets of each sequence in turn, where they were asked for."""


def evaluate(
    model: DecoderLM,
    batches: Iterable[Batch],
    device: str,
    dtype: str,
    group: Group = ALONE,
    *,
    by_sequence: bool = False,
) -> Evaluation:
    """Mean loss and accuracy over all counted targets; the model is left in the mode it was in.

    The processes of a group share the batches out, and then know only their own sequences.
    """
    was_training = model.training
    model.eval()
    losses, hits, counted = [], [], 0
    sequences: list[tuple[float, int]] = []
    with torch.no_grad():
        for inputs, targets in group.shared(batches):
            counted += int((targets != IGNORED).sum())
            inputs, targets = to_device(inputs, device), to_device(targets, device)
            with autocast(device, dtype):
                logits, _ = model(inputs)
            losses.append(summed_loss(logits, targets).double())
            hits.append((logits.argmax(dim=-1) == targets).sum())
            if by_sequence:
                rows = row_losses(logits, targets)
                sequences += zip(rows.tolist(), (targets != IGNORED).sum(dim=1).tolist(), strict=True)
    model.train(was_training)
    sums = torch.stack(losses).sum().item(), torch.stack(hits).sum().item(), counted
    loss, hit, count = group.total(sums, device)
    assert count, "an evaluation counts at least one target"
    return Evaluation(loss=loss / count, accuracy=hit / count, sequences=tuple(sequences))


def summed_loss(logits: Tensor, targets: Int64[Tensor, "B T"], label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy summed over the counted targets, in float32."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def row_losses(logits: Tensor, targets: Int64[Tensor, "B T"]) -> Tensor:
    """Cross-entropy summed over the counted targets of each sequence, in float64."""
    each = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).double()
    return each.unflatten(0, targets.shape).sum(dim=1)


def autocast(device: str, dtype: str) -> torch.autocast:
    """Mixed precision where the dtype asks for it, nothing otherwise."""
    return torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def to_device(batch: Tensor, device: str) -> Tensor:
    """The tensor on the device; towards cuda from pinned memory, so that the copy overlaps work."""
    return batch.pin_memory().to(device, non_blocking=True) if device == "cuda" else batch
