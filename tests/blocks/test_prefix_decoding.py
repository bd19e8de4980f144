"""Decoding behind a prefix: prefill and steps equal the whole pass, and each prefix is continued as if alone."""

from collections.abc import Callable

import pytest
import torch
from registered_cases import fits, label
from torch import Tensor

from blocks import registry
from blocks.families import AbstractMixer, AbstractPosition, AbstractPremixer, AbstractResidual, Direction
from blocks.generate import CannotGenerate, Sampling, generate
from blocks.model import ModelConfig
from blocks.stacks import PrefixLM

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]
LENGTH = 23
TOKENS = torch.randint(48, (2, LENGTH), generator=torch.Generator().manual_seed(0))
TAKING = {kind: mixer for kind, mixer in registry.variants(AbstractMixer).items() if mixer.takes_prefix}
PAIRS = [
    {"mixer.kind": mixer, "position.kind": position}
    for mixer, m in TAKING.items()
    for position, p in registry.variants(AbstractPosition).items()
    if Direction.BIDIRECTIONAL in p.directions and not p.mixes_tokens and fits(m, p)
]
OTHERS = [
    *({"premixer.kind": kind} for kind in registry.variants(AbstractPremixer)),
    *({"residual.kind": kind} for kind in registry.variants(AbstractResidual)),
    {"mixer.softmax.qk_norm": "l2", "mixer.softmax.sink": "learned", "mixer.softmax.gate": "channel"},
]


def built(small: Make, changes: dict[str, object]) -> PrefixLM:
    window = {"mixer.sliding_window.window": 8} if changes.get("mixer.kind") == "sliding_window" else {}
    model = small({**window, **changes, "stack.kind": "prefix_lm"}).build(seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    assert isinstance(model, PrefixLM)
    return model.eval()


def decoded(model: PrefixLM, tokens: Tensor, prefix: int, sizes: list[int]) -> Tensor:
    with torch.no_grad():
        part, state = model.begin(tokens[:, :prefix], model.empty_state(tokens.shape[0]))
        parts, start = [part], prefix
        for size in sizes:
            part, state = model.step(tokens[:, start : start + size], state, start)
            parts.append(part)
            start += size
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("changes", [*PAIRS, *OTHERS], ids=label)
def test_prefill_and_steps_equal_the_whole_pass(small: Make, changes: dict[str, object]) -> None:
    model = built(small, changes).double()
    for prefix in (1, 11, LENGTH - 1):
        with torch.no_grad():
            whole = model(TOKENS, prefix=prefix)[0]
        rest = LENGTH - prefix
        for sizes in ([1] * rest, [rest]):
            torch.testing.assert_close(decoded(model, TOKENS, prefix, sizes), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mixer", TAKING)
def test_prefill_and_steps_equal_the_whole_pass_for_every_prefix(small: Make, mixer: str) -> None:
    model = built(small, {"mixer.kind": mixer}).double()
    for prefix in range(1, LENGTH, 2):
        with torch.no_grad():
            whole = model(TOKENS, prefix=prefix)[0]
        torch.testing.assert_close(decoded(model, TOKENS, prefix, [1] * (LENGTH - prefix)), whole, rtol=1e-9, atol=1e-9)


def test_the_first_logits_know_the_whole_prefix(small: Make) -> None:
    model = built(small, {})
    other = TOKENS.clone()
    other[:, 4] = (other[:, 4] + 1) % 48
    with torch.no_grad():
        one, two = (model.begin(tokens[:, :5], model.empty_state(2))[0] for tokens in (TOKENS, other))
    assert (one[:, 0] - two[:, 0]).abs().max() > 1e-4


@pytest.mark.parametrize("mixer", TAKING)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=9)])
def test_generation_continues_each_prefix_as_the_whole_pass_would(small: Make, mixer: str, sampling: Sampling) -> None:
    model = built(small, {"mixer.kind": mixer})
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3, 5, 8]]
    made = generate(model, prompts, new_tokens=9, sampling=sampling, seed=7)
    assert made.length.tolist() == [12, 15, 12]
    for row, prompt in enumerate(prompts):
        line = made.tokens[row, : made.length[row]]
        assert line[: len(prompt)].tolist() == prompt
        assert made.tokens[row, made.length[row] :].eq(0).all()
        with torch.no_grad():
            logits = model(line[None], prefix=len(prompt))[0][0]
        ranks = logits[len(prompt) - 1 : -1].argsort(descending=True)
        place = (ranks == line[len(prompt) :, None]).int().argmax(-1)
        assert (place < (sampling.top_k or 1)).all()
    alone = generate(model, prompts[:1], new_tokens=9, sampling=sampling, seed=7)
    assert alone.tokens[0].equal(made.tokens[0, :12])


def test_a_row_that_ends_early_is_padded_and_requests_beyond_the_model_are_refused(small: Make) -> None:
    model = built(small, {})
    greedy = Sampling(temperature=0)
    free = generate(model, [[3, 1, 4], [1, 5]], new_tokens=6, sampling=greedy)
    eos = int(free.tokens[0, 4])
    made = generate(model, [[3, 1, 4], [1, 5]], new_tokens=6, sampling=greedy, eos=eos, padding=47)
    end = int((free.tokens[0, 3:] == eos).int().argmax()) + 4
    assert int(made.length[0]) == end
    assert made.tokens[0, :end].equal(free.tokens[0, :end])
    assert made.tokens[0, end:].eq(47).all()
    with pytest.raises(CannotGenerate, match=r"2 tokens and 39 are to follow.*at most 40"):
        generate(model, [[1, 2]], new_tokens=39)
    with pytest.raises(CannotGenerate, match="at least one token"):
        generate(model, [[1], []], new_tokens=2)
