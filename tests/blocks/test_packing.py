"""Packed documents: every one gets what it would get alone, or the model says that it cannot."""

from collections.abc import Callable

import pytest
import torch
from registered_cases import MIXERS, POSITIONS, fits, label
from torch import Tensor

from blocks import registry
from blocks.families import AbstractPremixer, Hook, InfeasibleArchitecture
from blocks.model import ModelConfig
from blocks.ops.linear_attention import chunked, empty_sums, packed
from blocks.packing import IGNORED, DoesNotFit, pack, runs, segments_of

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]
LENGTHS = ([5, 1, 9, 13], [28], [1, 1, 26], [14, 14])


def packable(position: type) -> bool:
    return Hook.EMBEDDING not in position.needs and position.relative


CASES = [
    {"mixer.kind": mixer, "position.kind": position}
    for mixer, m in MIXERS.items()
    for position, p in POSITIONS.items()
    if m.packs and packable(p) and fits(m, p)
]


def stirred(config: ModelConfig) -> torch.nn.Module:
    model = config.build(seed=1)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            case, marks=[] if case["position.kind"] in ("alibi", "cope", "none", "rotary") else pytest.mark.slow
        )
        for case in CASES
    ],
    ids=label,
)
def test_packed_documents_equal_separate_ones(small: Make, changes: dict[str, object]) -> None:
    window = {"mixer.sliding_window.window": 8} if changes["mixer.kind"] == "sliding_window" else {}
    model = stirred(small({**changes, **window}))
    tokens = torch.randint(48, (4, 28), generator=torch.Generator().manual_seed(0))
    segments = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in LENGTHS])
    y, auxiliary = model(tokens, segments=segments)
    with torch.no_grad():
        for row, lengths in enumerate(LENGTHS):
            for part, own in zip(tokens[row].split(lengths), y[row].split(lengths), strict=True):
                torch.testing.assert_close(own, model(part[None])[0][0], rtol=1e-5, atol=1e-5)
    (y.square().mean() + auxiliary).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_packed_linear_attention_equals_separate_calls_for_every_chunk(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, a, b = (torch.rand(1, 29, 2, 4, generator=generator, dtype=torch.float64) for _ in range(5))
    lengths = [3, 1, 12, 13]
    segments = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    y = packed(q, k, v, a, b, segments, chunk)
    parts = zip(*(x.split(lengths, dim=1) for x in (q, k, v, a, b)), strict=True)
    sums = empty_sums(1, 2, 4, 4, q.device, q.dtype)
    torch.testing.assert_close(y, torch.cat([chunked(*part, sums)[0] for part in parts], dim=1))


def test_a_number_that_comes_up_again_is_another_document(small: Make) -> None:
    tokens = torch.randint(48, (1, 12), generator=torch.Generator().manual_seed(0))
    again = torch.tensor([[7] * 4 + [3] * 4 + [7] * 4])
    assert runs(again).tolist() == [[0] * 4 + [1] * 4 + [2] * 4]
    for mixer in ("softmax", "linear"):
        model = stirred(small({"mixer.kind": mixer}))
        with torch.no_grad():
            y = model(tokens, segments=again)[0]
            torch.testing.assert_close(y[:, 8:], model(tokens[:, 8:])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"mixer.kind": kind, "position.kind": "none"} for kind, mixer in MIXERS.items() if not mixer.packs]
    + [{"position.kind": kind} for kind, p in POSITIONS.items() if not packable(p) and fits(MIXERS["softmax"], p)]
    + [{"premixer.kind": kind} for kind, p in registry.variants(AbstractPremixer).items() if not p.packs],
    ids=label,
)
def test_what_cannot_keep_documents_apart_says_so(small: Make, changes: dict[str, object]) -> None:
    model = small(changes).build(seed=0)
    path, kind = next(iter(changes.items()))
    with pytest.raises(InfeasibleArchitecture, match=rf"model\.{path}='{kind}'.*a row of its own"):
        model(torch.zeros(1, 6, dtype=torch.int64), segments=torch.zeros(1, 6, dtype=torch.int64))


def test_packing_fills_rows_in_order_and_never_predicts_across_documents() -> None:
    rows = pack([[1, 2, 3], [4, 5, 6, 7], [8, 9], [10]], length=6, padding=0)
    assert rows.tokens.tolist() == [[1, 2, 3, 8, 9, 10], [4, 5, 6, 7, 0, 0]]
    none = IGNORED
    assert rows.targets.tolist() == [[2, 3, none, 9, none, none], [5, 6, 7, none, none, none]]
    assert rows.segments.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1]]
    assert rows.live.tolist() == [[True] * 6, [True] * 4 + [False] * 2]
    with pytest.raises(DoesNotFit, match="document 1 has 7 tokens; a row takes 1 to 6"):
        pack([[1], [0] * 7], length=6)


def test_cumulative_lengths_name_the_segments() -> None:
    expected: Tensor = torch.tensor([[0, 0, 0, 1, 2, 2, 3, 3]])
    assert torch.equal(segments_of([0, 3, 4, 6], 8), expected)
