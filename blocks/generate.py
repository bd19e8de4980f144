"""Generation: tokens drawn one after another from a model's decoding step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from blocks.encoder_decoder import EncoderDecoderLM
from blocks.families import State
from blocks.model import DecoderLM
from blocks.ops.running_sum import running_sum
from blocks.stacks import PrefixLM
from search_space.canon import seed_from
from search_space.errors import UserError

Step = Callable[[Tensor, State, int], tuple[Tensor, State]]
"""Logits of further tokens, given those tokens, the state before them, and the position of the first."""


class CannotGenerate(UserError):
    """A request that no tokens can be generated for; the message names the setting, the rule and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits: temperature first, then top_k, then top_p."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """So many of the likeliest tokens remain; None: all."""
    top_p: float = 1.0
    """The fewest likeliest tokens that together have at least this probability remain."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise CannotGenerate(f"temperature must be finite and not negative; got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise CannotGenerate(f"top_k must be at least 1, or None for all tokens; got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise CannotGenerate(f"top_p must lie above 0 and at most at 1; got {self.top_p}")


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The prompts and what follows them."""

    tokens: Int[Tensor, "B L"]
    """From `length` on, each row holds the padding token."""
    length: Int[Tensor, "B"]
    """Tokens of each row, its prompt and the token that ended it included."""


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    sampling: Sampling = Sampling(),
    eos: int | None = None,
    padding: int = 0,
    seed: int = 0,
) -> Generated:
    """Each prompt, continued by up to `new_tokens` tokens, or to the first `eos` of its row.

    Prompts may differ in length; a prefix model reads each as its prefix. Every row has a random stream of its own:
    what it gets does not depend on the others.
    """
    if isinstance(model, PrefixLM):
        return _after_prefixes(model, prompts, new_tokens, sampling, eos, padding, seed)
    if not isinstance(model, DecoderLM):
        raise CannotGenerate(
            f"generate continues the text of a decoder; got a {type(model).__name__}, which has no decoding step of "
            f"that kind; set model.stack to 'decoder' or 'prefix_lm', or use generate_target for an encoder-decoder"
        )
    state = model.empty_state(len(prompts))
    rows = _Rows.of(prompts, new_tokens, model.config.max_len, padding, model.embedding.device)
    return _generate(model, model.step, state, rows, sampling, eos, seed)


def _after_prefixes(
    model: PrefixLM,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling,
    eos: int | None,
    padding: int,
    seed: int,
) -> Generated:
    """Rows whose prefixes are equally long walk together: a prefix is read whole, in one call."""
    rows = _Rows.of(prompts, new_tokens, model.config.max_len, padding, model.embedding.device)
    tokens, ended = rows.tokens.clone(), rows.limit.clone()

    def step(tokens: Tensor, state: State, start: int) -> tuple[Tensor, State]:
        return model.step(tokens, state, start) if start else model.begin(tokens, state)

    for length in sorted({len(prompt) for prompt in prompts}):
        alike = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
        part = rows.some(alike, length)
        made = _generate(model, step, model.empty_state(len(alike)), part, sampling, eos, seed)
        tokens[alike, : made.tokens.shape[1]], ended[alike] = made.tokens, made.length
    return Generated(tokens=tokens[:, : int(ended.max())], length=ended)


def generate_target(
    model: EncoderDecoderLM,
    source: Int[Tensor, "B M"],
    *,
    start: int,
    new_tokens: int,
    source_live: Bool[Tensor, "B M"] | None = None,
    sampling: Sampling = Sampling(),
    eos: int | None = None,
    padding: int = 0,
    seed: int = 0,
) -> Generated:
    """A target for each source, begun with the token `start`; tokens of the vocabulary only."""
    with torch.no_grad():
        state = model.state_of(source, source_live)
    prompts = [[start]] * source.shape[0]
    rows = _Rows.of(prompts, new_tokens, model.config.max_len, padding, source.device)
    return _generate(model, model.step, state, rows, sampling, eos, seed)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Prompts side by side, room for what follows, and how far each row may go."""

    tokens: Tensor
    prompt: Tensor
    limit: Tensor
    shortest: int
    names: Sequence[int]
    """The number of each row, which its random stream goes by."""

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], new_tokens: int, max_len: int, padding: int, device: torch.device
    ) -> "_Rows":
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or min(lengths) < 1:
            raise CannotGenerate("every prompt must hold at least one token; give a start token to an empty one")
        if new_tokens < 0 or max(lengths) + new_tokens > max_len:
            raise CannotGenerate(
                f"the longest prompt has {max(lengths)} tokens and {new_tokens} are to follow, and the model runs on "
                f"at most {max_len}; shorten the prompt, ask for fewer, or raise model.max_len"
            )
        tokens = torch.full((len(prompts), max(lengths) + new_tokens), padding, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        prompt_lengths = torch.tensor(lengths, device=device)
        return cls(
            tokens=tokens.to(device),
            prompt=prompt_lengths,
            limit=prompt_lengths + new_tokens,
            shortest=min(lengths),
            names=range(len(lengths)),
        )

    def some(self, alike: Sequence[int], length: int) -> "_Rows":
        """Those of the rows, whose prompts all have this length."""
        limit = self.limit[alike]
        return _Rows(
            tokens=self.tokens[alike, : int(limit.max())],
            prompt=self.prompt[alike],
            limit=limit,
            shortest=length,
            names=alike,
        )


def _generate(
    model: nn.Module, step: Step, state: State, rows: _Rows, sampling: Sampling, eos: int | None, seed: int
) -> Generated:
    """All rows walk together; a row that is still inside its prompt takes the next token from there."""
    tokens, ended = rows.tokens.clone(), rows.limit.clone()
    streams = [torch.Generator().manual_seed(seed_from(seed, f"row {row}")) for row in rows.names]
    training = model.training
    model.eval()
    with torch.no_grad():
        start, here = 0, rows.shortest
        while here < tokens.shape[1] and bool((ended > here).any()):
            logits, state = step(tokens[:, start:here], state, start)
            writes = (here >= rows.prompt) & (here < ended)
            draws = [
                float(torch.rand((), generator=stream)) if writing else 0.0
                for stream, writing in zip(streams, writes.tolist(), strict=True)
            ]
            drawn = draw(logits[:, -1], sampling, torch.tensor(draws, device=logits.device))
            tokens[:, here] = torch.where(writes, drawn, tokens[:, here])
            if eos is not None:
                ended = torch.where(writes & (drawn == eos), here + 1, ended)
            start, here = here, here + 1
    model.train(training)
    length = torch.minimum(ended, rows.limit)
    return Generated(tokens=tokens[:, : int(length.max())], length=length)


def draw(logits: Float[Tensor, "B V"], sampling: Sampling, uniform: Float[Tensor, "B"]) -> Int[Tensor, "B"]:
    """One token per row: that at which the summed probabilities, likeliest first, pass the uniform number in [0, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities, order = kept_probabilities(logits, sampling)
    below = running_sum(probabilities) <= uniform[:, None].double()
    last = (probabilities > 0).sum(-1) - 1
    return order.gather(-1, torch.minimum(below.sum(-1), last)[:, None])[:, 0]


def kept_probabilities(
    logits: Float[Tensor, "B V"], sampling: Sampling
) -> tuple[Float[Tensor, "B V"], Int[Tensor, "B V"]]:
    """Probabilities of the tokens, likeliest first, zero where top_k or top_p leave one out; and the tokens."""
    ordered, order = (logits.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        beyond = torch.arange(ordered.shape[-1], device=logits.device) >= sampling.top_k
        ordered = ordered.masked_fill(beyond, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    if sampling.top_p < 1:
        before = running_sum(probabilities) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities, order
