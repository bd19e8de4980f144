"""Generation: greedy is the argmax of full passes, draws follow the distribution, rows are independent."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocks import registry
from blocks.families import AbstractMixer, Direction
from blocks.generate import CannotGenerate, Sampling, draw, generate, generate_target, kept_probabilities
from blocks.model import DecoderLM, ModelConfig

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]
GREEDY = Sampling(temperature=0)
CAUSAL = [kind for kind, mixer in registry.variants(AbstractMixer).items() if Direction.CAUSAL in mixer.directions]
LOGITS = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))


def lively(config: ModelConfig) -> DecoderLM:
    """A model with confident predictions."""
    model = config.build(seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize(
    "mixer",
    [
        pytest.param(kind, marks=[] if kind in ("softmax", "sliding_window", "linear", "mla") else pytest.mark.slow)
        for kind in CAUSAL
    ],
)
def test_greedy_generation_is_the_argmax_of_full_passes(small: Make, mixer: str) -> None:
    window = {"mixer.sliding_window.window": 8} if mixer == "sliding_window" else {}
    config = small({"mixer.kind": mixer, "position.kind": "none", "premixer.kind": "short_conv", **window})
    model = lively(config).eval()
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    made = generate(model, prompts, new_tokens=18, sampling=GREEDY).tokens
    with torch.no_grad():
        whole = model(made)[0]
    assert made.shape == (2, 23)
    assert torch.equal(made[:, :5], torch.tensor(prompts))
    assert torch.equal(whole[:, 4:-1].argmax(-1), made[:, 5:])


def test_rows_of_any_length_get_what_they_would_alone(small: Make) -> None:
    model = lively(small())
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6]]
    for sampling in (GREEDY, Sampling(temperature=2.0, top_k=20, top_p=0.9)):
        together = generate(model, prompts, new_tokens=9, sampling=sampling, seed=4)
        assert together.length.tolist() == [14, 10, 11]
        alone = generate(model, prompts[:1], new_tokens=9, sampling=sampling, seed=4)
        assert torch.equal(together.tokens[:1], alone.tokens)
        for row, prompt in enumerate(prompts):
            assert together.tokens[row, : len(prompt)].tolist() == prompt
            assert (together.tokens[row, together.length[row] :] == 0).all()
            if sampling is GREEDY:
                one = generate(model, [prompt], new_tokens=9, sampling=sampling)
                assert torch.equal(together.tokens[row, : together.length[row]], one.tokens[0])


def test_each_row_ends_at_its_own_eos(small: Make) -> None:
    model = lively(small())
    prompts = [[row] for row in range(12)]
    hot = Sampling(temperature=3.0)
    free = generate(model, prompts, new_tokens=30, sampling=hot, seed=1)
    eos = int(free.tokens[0, 6])
    ended = generate(model, prompts, new_tokens=30, sampling=hot, seed=1, eos=eos, padding=47)
    for row in range(12):
        later = [place for place in range(1, 31) if int(free.tokens[row, place]) == eos]
        length = later[0] + 1 if later else 31
        assert int(ended.length[row]) == length
        assert torch.equal(ended.tokens[row, :length], free.tokens[row, :length])
        assert (ended.tokens[row, length:] == 47).all()
    assert len(set(ended.length.tolist())) > 1
    assert ended.tokens.shape[1] == int(ended.length.max())


def test_one_seed_gives_one_text_and_the_model_is_left_as_it_was(small: Make) -> None:
    model = lively(small({"residual_dropout": 0.5})).train()
    before = torch.get_rng_state()
    one, same, other = (generate(model, [[1], [2]], new_tokens=20, seed=seed).tokens for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5), Sampling(top_k=5), Sampling(top_p=0.6)])
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = 2 * LOGITS[:1, :12]
    uniform = (torch.arange(20000) + 0.5) / 20000
    drawn = draw(logits.expand(20000, -1), sampling, uniform)
    share = torch.bincount(drawn, minlength=12) / 20000
    expected = reference(logits[0].double(), sampling)
    torch.testing.assert_close(share.double(), expected, rtol=0, atol=1e-4)


def reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution by its definition, token by token."""
    p = (logits / sampling.temperature).softmax(-1)
    order = sorted(range(len(p)), key=lambda token: -float(p[token]))
    order = order[: sampling.top_k]
    total = sum(float(p[token]) for token in order)
    kept: list[int] = []
    while order and sum(float(p[token]) for token in kept) / total < sampling.top_p:
        kept.append(order.pop(0))
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-4)])
def test_the_ends_of_every_setting_are_greedy(sampling: Sampling) -> None:
    for number in (0.0, 0.5, 1 - 1e-7):
        assert torch.equal(draw(LOGITS, sampling, torch.full((5,), number)), LOGITS.argmax(-1))


def test_settings_that_leave_everything_in_change_nothing() -> None:
    plain = kept_probabilities(LOGITS, Sampling())
    for sampling in (Sampling(top_k=48), Sampling(top_k=1000), Sampling(top_p=1.0)):
        for one, other in zip(kept_probabilities(LOGITS, sampling), plain, strict=True):
            assert torch.equal(one, other)


def test_equal_logits_are_all_drawn_and_impossible_ones_never() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, 0.0]])
    drawn = {int(draw(logits, Sampling(), torch.tensor([number]))) for number in (0.0, 0.4, 0.7, 0.9999999)}
    assert drawn == {0, 2, 3}


def test_targets_of_an_encoder_decoder_are_those_of_its_full_pass(small: Make) -> None:
    for head in ("vocabulary", "pointer_copy"):
        config = small({"stack.kind": "encoder_decoder", "stack.encoder_decoder.head": head})
        model = lively(config).eval()
        source = torch.randint(48, (3, 7), generator=torch.Generator().manual_seed(0))
        live = torch.arange(7)[None] < torch.tensor([[7], [3], [5]])
        made = generate_target(model, source, start=1, new_tokens=12, source_live=live, sampling=GREEDY).tokens
        with torch.no_grad():
            whole = model(source, made, live)[0]
        assert torch.equal(whole[:, :-1].argmax(-1), made[:, 1:])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature must be finite and not negative; got -1.0"),
        ({"top_k": 0}, "top_k must be at least 1.*got 0"),
        ({"top_p": 0.0}, "top_p must lie above 0.*got 0.0"),
        ({"top_p": 1.5}, "top_p must lie above 0.*got 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(CannotGenerate, match=message):
        Sampling(**wrong)


def test_impossible_requests_are_refused(small: Make) -> None:
    model = small().build(seed=0)
    with pytest.raises(CannotGenerate, match=r"at least one token"):
        generate(model, [[1], []], new_tokens=3)
    with pytest.raises(CannotGenerate, match=r"2 tokens and 39 are to follow.*at most 40"):
        generate(model, [[1, 2]], new_tokens=39)
    with pytest.raises(CannotGenerate, match=r"EncoderLM.*'decoder' or 'prefix_lm'.*generate_target"):
        generate(small({"stack.kind": "encoder"}).build(seed=0), [[1]], new_tokens=3)
