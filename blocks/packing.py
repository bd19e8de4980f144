"""Packed sequences: several documents side by side in one row, each treated as if it stood alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from search_space.errors import UserError

IGNORED = -100
"""Target of a token from which nothing is to be predicted."""


class DoesNotFit(UserError):
    """A document longer than a row."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows of documents, and what a model and a loss need to keep them apart."""

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    """The next token of the same document; IGNORED at its last token and at padding."""
    segments: Int[Tensor, "B T"]
    """The document of each token, counted from 0 in its row; padding is the last one."""
    live: Bool[Tensor, "B T"]


def pack(documents: Sequence[Sequence[int]], length: int, padding: int = 0) -> Packed:
    """The documents in rows of this length, each in the first row with room for it, in their order."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index, document in enumerate(documents):
        if not 0 < len(document) <= length:
            raise DoesNotFit(
                f"document {index} has {len(document)} tokens; a row takes 1 to {length}; split it, or use longer rows"
            )
        row = next((row for row, left in enumerate(room) if left >= len(document)), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(index)
        room[row] -= len(document)
    shape = (len(rows), length)
    tokens, targets = torch.full(shape, padding), torch.full(shape, IGNORED)
    segments, live = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for row, indices in enumerate(rows):
        start = 0
        for segment, index in enumerate(indices):
            words = torch.tensor(documents[index])
            end = start + len(words)
            tokens[row, start:end] = words
            targets[row, start : end - 1] = words[1:]
            segments[row, start:end] = segment
            live[row, start:end] = True
            start = end
        segments[row, start:] = len(indices)
    return Packed(tokens=tokens, targets=targets, segments=segments, live=live)


def segments_of(cumulative: Sequence[int], length: int) -> Int[Tensor, "1 T"]:
    """The segments of one row from the ends of its documents, 0 first (cu_seqlens); what lies behind is the last."""
    borders = torch.tensor(cumulative[1:])
    return torch.bucketize(torch.arange(length), borders, right=True)[None]


def runs(segments: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The same documents numbered from 0 in the order of the row; one whose number comes up again is another one."""
    changes = segments[:, 1:] != segments[:, :-1]
    return F.pad(changes.long().cumsum(1), (1, 0))
