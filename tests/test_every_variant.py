"""What every registered block must do, checked over the registry: a new variant is tested unasked.

Cases: every variant of every family, legal mixer x position pairs, and every option of every field; most pairs and
options are in the slow tier. What rounding would blur is compared in float64.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from registered_cases import (
    BUILT,
    FAMILIES,
    MIXERS,
    OPTION_CASES,
    OPTIONS,
    PAIRS,
    POSITIONS,
    Changes,
    changed_path,
    fits,
    in_the_third,
    is_first,
    label,
    pairs,
    slow,
    tiered,
    with_placement,
)
from torch import Tensor

from blocks import cost, registry
from blocks.families import (
    BOTH_DIRECTIONS,
    AbstractFFN,
    AbstractInit,
    AbstractMixer,
    AbstractNorm,
    AbstractPlacement,
    AbstractPosition,
    AbstractResidual,
    Context,
    Direction,
    Hook,
    InfeasibleArchitecture,
)
from blocks.model import DecoderLM, ModelConfig

Make = Callable[..., ModelConfig]

LENGTH = 37
cases = pytest.mark.parametrize("changes", tiered(BUILT), ids=label)
option_cases = pytest.mark.parametrize("changes", OPTION_CASES, ids=label)


def tokens_for(config: ModelConfig, batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def stirred(config: ModelConfig) -> DecoderLM:
    """A model moved off its init, where no tap, table or gain hides at a neutral value."""
    model = config.build(seed=1)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def logits(model: DecoderLM, tokens: Tensor, live: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model.eval()(tokens, live)[0]


@pytest.mark.parametrize("changes", [*tiered(BUILT), *slow(OPTIONS)], ids=label)
def test_builds_trains_and_keeps_its_identity(small: Make, changes: Changes) -> None:
    config = small(changes)
    model = config.build(seed=1)
    torch.manual_seed(0)
    y, auxiliary = model(tokens_for(config))
    assert y.shape == (2, LENGTH, config.vocab_size)
    assert auxiliary.shape == ()
    assert y.isfinite().all()
    assert y.abs().max() > 0
    if config.init.opens_later or config.placement.opens_later:
        model = stirred(config)
        y, auxiliary = model(tokens_for(config))
    (torch.nn.functional.cross_entropy(y.flatten(0, 1), tokens_for(config, seed=1).flatten()) + auxiliary).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} gets no gradient"
        assert parameter.grad.isfinite().all(), f"{name} gets a gradient that is not finite"
        assert parameter.grad.abs().max() > 0, f"{name} gets a gradient of zero"
    plain = registry.encode(config)
    assert registry.decode(ModelConfig, plain) == config
    assert registry.config_id(registry.decode(ModelConfig, plain)) == registry.config_id(config)
    on_meta = sum(parameter.numel() for parameter in config.build(seed=1, device="meta").parameters())
    real = sum(parameter.numel() for parameter in model.parameters())
    assert cost.count_parameters(config).total == on_meta == real


LEAST = {
    "mixer": (AbstractMixer, 30),
    "position": (AbstractPosition, 20),
    "ffn": (AbstractFFN, 16),
    "init": (AbstractInit, 12),
}


def test_the_registry_is_as_wide_as_it_claims() -> None:
    for name, (family, least) in LEAST.items():
        assert len(registry.variants(family)) >= least, name
    forms = sum(len(registry.variants(family)) for family in (AbstractNorm, AbstractPlacement, AbstractResidual))
    assert forms >= 15


def every_block() -> list[Any]:
    """Every registered variant once, in a decoder where it can look back only, else in an encoder."""
    found = []
    for name, family in FAMILIES.items():
        for kind, config in registry.variants(family).items():
            changes: Changes = {f"{name}.kind": kind}
            directions = getattr(config, "directions", BOTH_DIRECTIONS)
            encoder = Direction.CAUSAL not in directions
            if name == "mixer":
                changes["position.kind"] = "sinusoidal"
            if encoder and name != "stack":
                changes["stack.kind"] = "encoder"
            quick = encoder or name == "stack"
            found.append(pytest.param(with_placement(changes), marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize("changes", every_block(), ids=label)
def test_every_registered_block_trains_in_its_stack(small: Make, changes: Changes) -> None:
    """Twenty steps on one batch lower its loss by a tenth."""
    config = small(changes)
    model = config.build(seed=1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    tokens = tokens_for(config)
    inputs = (tokens.flip(1), tokens[:, :-1]) if config.stack.kind == "encoder_decoder" else (tokens[:, :-1],)
    for step in range(21):
        torch.manual_seed(step)
        y, auxiliary = model(*inputs)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + auxiliary).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses


@cases
def test_future_tokens_do_not_change_the_past(small: Make, changes: Changes) -> None:
    config = small(changes)
    model = stirred(config).double()
    for length in (1, 2, LENGTH):
        places = sorted({0, length // 2, length - 1})
        tokens = tokens_for(config, batch=1, length=length).repeat(1 + len(places), 1)
        for row, place in enumerate(places, start=1):
            tokens[row, place] = (tokens[row, place] + 1) % config.vocab_size
        before, *after = logits(model, tokens)
        for place, changed in zip(places, after, strict=True):
            torch.testing.assert_close(changed[:place], before[:place], rtol=0, atol=1e-11)
            assert (changed[place] - before[place]).abs().max() > 1e-9


@pytest.mark.slow
@cases
def test_gradients_flow_from_no_future_token(small: Make, changes: Changes) -> None:
    config = small({**changes, "tied": False, "init.kind": changes.get("init.kind", "xavier")})
    model = stirred(config)
    tokens = torch.arange(LENGTH)[None]
    y, _ = model(tokens)
    for row in (0, 1, LENGTH // 2, LENGTH - 1):
        (gradient,) = torch.autograd.grad(y[0, row].square().sum(), model.embedding, retain_graph=True)
        by_token = gradient.abs().sum(-1)
        assert (by_token[row + 1 :] == 0).all()
        assert by_token[row] > 0


@cases
def test_decoding_equals_the_full_pass(small: Make, changes: Changes) -> None:
    config = small(changes)
    model = stirred(config).double()
    tokens = tokens_for(config)
    whole = logits(model, tokens)
    for sizes in ([1, 1, 6, 1, 8, 1, LENGTH - 18], [LENGTH - 1, 1]):
        torch.testing.assert_close(decoded(model, tokens, sizes), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [*filter(is_first, BUILT)], ids=label)
def test_decoding_equals_the_full_pass_from_every_split(small: Make, changes: Changes) -> None:
    config = small(changes)
    model = stirred(config).double()
    tokens = tokens_for(config)
    whole = logits(model, tokens)
    for sizes in ([1] * LENGTH, *([first, LENGTH - first] for first in range(1, LENGTH))):
        torch.testing.assert_close(decoded(model, tokens, sizes), whole, rtol=1e-9, atol=1e-9)


def decoded(model: DecoderLM, tokens: Tensor, sizes: list[int]) -> Tensor:
    """Logits of decoding in steps of these sizes."""
    state, start, parts = model.empty_state(tokens.shape[0]), 0, []
    for size in sizes:
        with torch.no_grad():
            part, state = model.step(tokens[:, start : start + size], state, start)
        parts.append(part)
        start += size
    return torch.cat(parts, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [c for c in PAIRS if is_first(c) or in_the_third(c)], ids=label)
def test_long_sequences_are_causal_and_decode_across_chunks_and_windows(small: Make, changes: Changes) -> None:
    length = 131
    config = small({**changes, "premixer.kind": "short_conv"}, train_len=length, max_len=length)
    model = stirred(config)
    tokens = tokens_for(config, length=length)
    whole = logits(model, tokens)
    for changed in (63, 64, 65, 127, 128, 130):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % config.vocab_size
        torch.testing.assert_close(logits(model, other)[:, :changed], whole[:, :changed], rtol=0, atol=1e-6)
    model = model.double()
    exact = logits(model, tokens)
    for sizes in ([1] * length, [64, 67], [63, 1, 1, 66], [100, 31]):
        torch.testing.assert_close(decoded(model, tokens, sizes), exact, rtol=1e-9, atol=1e-9)


@cases
def test_rows_do_not_see_each_other_or_padding(small: Make, changes: Changes) -> None:
    config = small(changes)
    model = stirred(config)
    tokens = tokens_for(config, batch=3, length=20)
    alone = logits(model, tokens[1:2])
    torch.testing.assert_close(logits(model, tokens)[1:2], alone, rtol=1e-5, atol=1e-5)
    live = torch.ones(3, LENGTH, dtype=torch.bool)
    live[:, 20:] = False
    right = logits(model, torch.cat([tokens, tokens[:, : LENGTH - 20]], dim=1), live)
    torch.testing.assert_close(right[1:2, :20], alone, rtol=1e-5, atol=1e-5)
    if Hook.EMBEDDING not in config.position.needs:
        left = logits(model, torch.cat([tokens[:, : LENGTH - 20], tokens], dim=1), live.flip(1))
        torch.testing.assert_close(left[1:2, LENGTH - 20 :], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@cases
def test_padding_leaves_everything_finite(small: Make, changes: Changes) -> None:
    config = small(changes)
    model = stirred(config).train()
    live = torch.ones(4, LENGTH, dtype=torch.bool)
    live[0], live[1, :20], live[2, 20:] = False, False, False
    y, auxiliary = model(tokens_for(config, batch=4), live)
    assert y.isfinite().all()
    (y[live].square().sum() + auxiliary).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def relative_error(config: ModelConfig, x: Tensor) -> float:
    """How far the mixers' bfloat16 output lies from their float64 output, relative to its size."""
    outputs = {}
    for dtype in (torch.float64, torch.bfloat16):
        model = config.build(seed=1).to(dtype)
        with torch.no_grad():
            outputs[dtype] = model.slots[0](x.to(dtype), model.positions[0], Context()).double()
    exact = outputs[torch.float64]
    return float((outputs[torch.bfloat16] - exact).norm() / exact.norm())


@pytest.mark.slow
@pytest.mark.parametrize("changes", tiered(PAIRS), ids=label)
def test_bfloat16_is_about_as_exact_as_plain_attention(small: Make, changes: Changes) -> None:
    x = torch.randn(4, LENGTH, 32, generator=torch.Generator().manual_seed(0))
    plain = relative_error(small({"mixer.kind": "softmax", "position.kind": "none", "init.kind": "xavier"}), x)
    assert relative_error(small({**changes, "init.kind": "xavier"}), x) <= 3 * plain


@pytest.mark.slow
@pytest.mark.parametrize("changes", tiered(PAIRS), ids=label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_logits_stay_finite(small: Make, changes: Changes, dtype: torch.dtype) -> None:
    model = small({**changes, "init.kind": "xavier"}).build(seed=1).to(dtype)
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = (100 * x).requires_grad_()
    y = model.slots[0](x, model.positions[0], Context())
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def numbers(config: ModelConfig) -> tuple[dict[str, torch.Size], Tensor]:
    """The parameter set, and everything a training pass computes, dropout included."""
    model = config.build(seed=1).double().train()
    tokens = tokens_for(config)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        y, auxiliary = model(tokens)
    return {n: p.shape for n, p in model.named_parameters()}, torch.cat([y.flatten(), auxiliary.flatten()])


@option_cases
def test_every_option_has_an_effect_or_is_canonicalised_away(small: Make, changes: Changes) -> None:
    changed = changed_path(changes)
    # Some options tell layers apart; a mixer's, an FFN's or a norm's are seen in any layer.
    layers = 2 if changed.startswith(("mixer.", "ffn.", "norm.")) else 8
    strong: Changes = {"init.kind": "xavier"} if "init.kind" not in changes else {}
    config = small({**strong, **changes, "layers": layers})
    base = small({**strong, **{path: value for path, value in changes.items() if path != changed}, "layers": layers})
    parameters, y = numbers(config)
    if config.canonical() == base.canonical():
        assert registry.config_id(config.canonical()) == registry.config_id(base.canonical())
        torch.testing.assert_close(numbers(base.canonical())[1], y, rtol=1e-6, atol=1e-6)
        return
    other_parameters, other_y = numbers(base)
    assert parameters != other_parameters or (y - other_y).abs().max() > 1e-9
    if config.canonical() == config:
        return
    canonical_parameters, canonical_y = numbers(config.canonical())
    assert canonical_parameters == parameters
    torch.testing.assert_close(canonical_y, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [[], pytest.param(OPTIONS, marks=pytest.mark.slow)], ids=["variants", "options"])
def test_any_two_variants_differ(small: Make, options: list[Changes]) -> None:
    tried = [*filter(is_first, BUILT), *options]
    # Weights of a usual size, at which a cap or a norm has something to act on.
    configs = (small({"init.kind": "xavier", **changes}) for changes in tried)
    by_id = {registry.config_id(config.canonical()): config for config in configs}
    computed = {config_id: numbers(config) for config_id, config in by_id.items()}
    for (one, (parameters, y)), (other, (other_parameters, other_y)) in itertools.combinations(computed.items(), 2):
        same = parameters == other_parameters and (y - other_y).abs().max() <= 1e-9
        assert not same, f"{by_id[one]} and {by_id[other]} compute the same"


@cases
def test_one_seed_gives_one_set_of_numbers(small: Make, changes: Changes) -> None:
    config = small(changes)
    before = torch.get_rng_state()
    one, same, other = config.build(seed=1), config.build(seed=1), config.build(seed=2)
    assert torch.equal(before, torch.get_rng_state()), "building must leave the global generator alone"
    tokens = tokens_for(config)
    assert torch.equal(logits(one, tokens), logits(same, tokens))
    assert not torch.equal(one.embedding, other.embedding)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@cases
def test_a_cuda_model_is_the_cpu_model(small: Make, changes: Changes) -> None:
    config = small(changes)
    here, there = config.build(seed=1), config.build(seed=1, device="cuda")
    for name, parameter in there.named_parameters():
        assert torch.equal(parameter.cpu(), dict(here.named_parameters())[name]), name
    tokens = tokens_for(config)
    torch.testing.assert_close(logits(there, tokens.cuda()).cpu(), logits(here, tokens), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        decoded(there, tokens.cuda(), [5, 1, LENGTH - 6]), logits(there, tokens.cuda()), rtol=1e-4, atol=1e-4
    )
    there.train()
    # Some forms draw positions or drop layers at random in training; here both models shall do the same.
    for drawing in (there.positions, there.residual):
        drawing.eval()
    for checkpointing in (False, True):
        there.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y, auxiliary = there(tokens.cuda(), checkpointing=checkpointing)
        (y.float().square().mean() + auxiliary).backward()
        assert (y.float().cpu() - logits(here, tokens)).norm() < 0.05 * y.float().norm()
        for name, parameter in there.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("changes", pairs(legal=False), ids=label)
def test_a_refused_pair_names_both_paths_and_what_would_do(small: Make, changes: Changes) -> None:
    with pytest.raises(InfeasibleArchitecture) as refused:
        small(changes)
    message = str(refused.value)
    mixer, position = changes["mixer.kind"], changes["position.kind"]
    assert f"model.mixer.kind={mixer!r}" in message
    assert f"model.position.kind={position!r}" in message
    capable = message.partition("mixers that do: ")[2].split(", ")
    assert capable == [kind for kind, config in MIXERS.items() if fits(config, POSITIONS[str(position)])]
