"""Stacks: which tokens each output depends on, equality where two stacks coincide, and a training step of each."""

from collections.abc import Callable

import pytest
import torch
from reference_table import Compare
from registered_cases import fits, label
from torch import Tensor, nn
from torch.nn import functional as F

from blocks import cost, registry
from blocks.cross_attention import CrossAttention
from blocks.encoder_decoder import CrossLayer, shift_right
from blocks.families import (
    AbstractFFN,
    AbstractMixer,
    AbstractPlacement,
    AbstractPosition,
    AbstractPremixer,
    Context,
    Direction,
    HeadShape,
    InfeasibleArchitecture,
    PositionModule,
)
from blocks.model import ModelConfig
from blocks.pointer import LEAST, mixture
from blocks.stacks import EncoderLM

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]
BOTH = Direction.BIDIRECTIONAL
TOKENS = torch.randint(48, (2, 13), generator=torch.Generator().manual_seed(0))
SOURCE = torch.randint(48, (2, 9), generator=torch.Generator().manual_seed(1))
PAIRS = [
    {"mixer.kind": mixer, "position.kind": position}
    for mixer, m in registry.variants(AbstractMixer).items()
    for position, p in registry.variants(AbstractPosition).items()
    if BOTH in m.directions and BOTH in p.directions and fits(m, p)
]
PREMIXERS = [
    {"premixer.kind": kind}
    for kind, premixer in registry.variants(AbstractPremixer).items()
    if BOTH in premixer.directions
]
FFNS = [{"ffn.kind": kind} for kind, ffn in registry.variants(AbstractFFN).items() if BOTH in ffn.directions]
THREE_SUBLAYERS = ("post", "pre", "sandwich")


def stirred(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def changed(tokens: Tensor, place: int) -> Tensor:
    other = tokens.clone()
    other[:, place] = (other[:, place] + 1) % 48
    return other


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(pair, marks=[] if pair.get("position.kind", "alibi") in ("alibi", "rotary") else pytest.mark.slow)
        for pair in [*PAIRS, *FFNS, *PREMIXERS]
    ],
    ids=label,
)
def test_every_encoder_sees_both_ways_ignores_padding_and_trains(small: Make, changes: dict[str, object]) -> None:
    config = small({**changes, "stack.kind": "encoder"})
    model = stirred(config.build(seed=0))
    with torch.no_grad():
        y = model(TOKENS)[0]
        assert not torch.allclose(model(changed(TOKENS, 12))[0][:, 0], y[:, 0], atol=1e-7)
        assert not torch.allclose(model(changed(TOKENS, 0))[0][:, -1], y[:, -1], atol=1e-7)
        order = [1, 0, *range(2, 13)]
        swapped = model(TOKENS[:, order])[0][:, order]
        assert not torch.allclose(swapped, y, atol=1e-4), "an encoder must know the order of its tokens"
        live = torch.arange(20)[None].expand(2, -1) < 13
        padded = model(torch.cat([TOKENS, TOKENS[:, :7]], dim=1), live)[0][:, :13]
    torch.testing.assert_close(padded, y, rtol=1e-5, atol=1e-5)
    model = config.build(seed=0).train()
    masked = TOKENS.masked_fill(torch.arange(13) % 3 == 0, 0)
    logits, auxiliary = model(masked)
    (F.cross_entropy(logits[:, ::3].flatten(0, 1), TOKENS[:, ::3].flatten()) + auxiliary).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert cost.count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"position.kind": "none"},
        {"position.kind": "xpos"},
        {"position.kind": "cope"},
        {"mixer.kind": "retention"},
    ],
    ids=label,
)
@pytest.mark.parametrize("stack", ["encoder", "encoder_decoder"])
def test_causal_blocks_are_refused_where_layers_look_ahead(small: Make, changes: dict[str, object], stack: str) -> None:
    ((path, kind),) = changes.items()
    with pytest.raises(InfeasibleArchitecture) as refused:
        small({**changes, "stack.kind": stack})
    message = str(refused.value)
    assert f"model.stack.kind='{stack}' has bidirectional layers, which model.{path}='{kind}' cannot serve" in message
    able = message.partition("could be: ")[2].split(", ")
    assert able
    assert kind not in able


@pytest.mark.parametrize("changes", PREMIXERS, ids=label)
def test_premixers_of_an_encoder_read_padding_on_either_side_as_nothing(
    small: Make, changes: dict[str, object]
) -> None:
    model = stirred(small({**changes, "stack.kind": "encoder", "position.kind": "rotary"}).build(seed=0))
    with torch.no_grad():
        alone = model(TOKENS)[0]
        for left in (0, 1, 4, 7):
            row = torch.cat([TOKENS[:, :left], TOKENS, TOKENS[:, : 7 - left]], dim=1)
            live = (torch.arange(20) >= left) & (torch.arange(20) < left + 13)
            y = model(row, live[None].expand(2, -1))[0][:, left : left + 13]
            torch.testing.assert_close(y, alone, rtol=1e-5, atol=1e-5)


def test_a_bidirectional_window_reaches_as_far_to_either_side(small: Make) -> None:
    window = {"mixer.kind": "sliding_window", "mixer.sliding_window.window": 8, "layers": 1}
    model = stirred(small({**window, "stack.kind": "encoder"}).build(seed=0))
    tokens = TOKENS[:, :1].expand(-1, 30)
    with torch.no_grad():
        moved = (model(changed(tokens, 15))[0] - model(tokens)[0]).abs().amax((0, 2)) > 1e-6
    assert moved.nonzero().flatten().tolist() == list(range(8, 23))


@pytest.mark.parametrize("position", ["rotary", "alibi", "sinusoidal", "learned"])
@pytest.mark.parametrize("mixer", ["softmax", "sliding_window"])
def test_a_prefix_of_nothing_is_the_decoder_and_of_everything_the_encoder(
    small: Make, position: str, mixer: str
) -> None:
    changes = {"position.kind": position, "mixer.kind": mixer}
    prefix = stirred(small({**changes, "stack.kind": "prefix_lm"}).build(seed=0))
    for stack, length in (("decoder", 0), ("encoder", 13)):
        other = small({**changes, "stack.kind": stack}).build(seed=0).eval()
        other.load_state_dict(prefix.state_dict())
        torch.testing.assert_close(prefix(TOKENS, prefix=length)[0], other(TOKENS)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "position",
    [
        kind
        for kind, p in registry.variants(AbstractPosition).items()
        if BOTH in p.directions and not p.mixes_tokens and fits(registry.variants(AbstractMixer)["softmax"], p)
    ],
)
def test_a_prefix_sees_itself_and_nothing_after_it(small: Make, position: str) -> None:
    model = stirred(small({"position.kind": position, "stack.kind": "prefix_lm"}).build(seed=0))
    with torch.no_grad():
        y = model(TOKENS, prefix=5)[0]
        assert not torch.allclose(model(changed(TOKENS, 4), prefix=5)[0][:, 0], y[:, 0], atol=1e-7)
        for place in (5, 8, 12):
            after = model(changed(TOKENS, place), prefix=5)[0]
            torch.testing.assert_close(after[:, :place], y[:, :place], rtol=0, atol=1e-6)
            assert not torch.allclose(after[:, place:], y[:, place:], atol=1e-4)


def test_a_mixer_that_cannot_hold_a_prefix_is_refused(small: Make) -> None:
    able = registry.variants(AbstractMixer)
    for kind, mixer in able.items():
        if not mixer.takes_prefix:
            with pytest.raises(InfeasibleArchitecture, match=f"mixer.kind='{kind}'"):
                small({"mixer.kind": kind, "stack.kind": "prefix_lm"})


def test_positions_that_look_ahead_by_themselves_are_refused_beside_a_prefix(small: Make) -> None:
    with pytest.raises(InfeasibleArchitecture, match=r"position.kind='conditional'.*after the prefix.*rotary"):
        small({"position.kind": "conditional", "stack.kind": "prefix_lm"})


def test_prefix_models_train_on_what_follows_the_prefix(small: Make) -> None:
    model = small({"stack.kind": "prefix_lm"}).build(seed=0).train()
    logits, auxiliary = model(TOKENS, prefix=6)
    loss = F.cross_entropy(logits[:, 5:-1].flatten(0, 1), TOKENS[:, 6:].flatten()) + auxiliary
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())


def enc_dec(small: Make, changes: dict[str, object] | None = None, **fields: object) -> ModelConfig:
    stack = {f"stack.encoder_decoder.{name}": value for name, value in {"encoder_layers": 2, **fields}.items()}
    return small({"stack.kind": "encoder_decoder", **stack, **(changes or {})})


HEADS = pytest.mark.parametrize("head", ["vocabulary", "pointer_copy"])


@HEADS
@pytest.mark.parametrize("placement", THREE_SUBLAYERS)
def test_an_encoder_decoder_ignores_padding_and_never_looks_ahead(small: Make, head: str, placement: str) -> None:
    model = stirred(enc_dec(small, {"placement.kind": placement}, head=head).build(seed=0))
    with torch.no_grad():
        y = model(SOURCE, TOKENS)[0]
        for place in (0, 6, 12):
            after = model(SOURCE, changed(TOKENS, place))[0]
            torch.testing.assert_close(after[:, :place], y[:, :place], rtol=0, atol=1e-6)
            assert not torch.allclose(after[:, place], y[:, place], atol=1e-4)
        for place in (0, 8):
            assert not torch.allclose(model(changed(SOURCE, place), TOKENS)[0][:, 0], y[:, 0], atol=1e-5)
        live = torch.arange(14)[None].expand(2, -1) < 9
        one = model(torch.cat([SOURCE, TOKENS[:, :5]], dim=1), TOKENS, live)[0]
        other = model(torch.cat([SOURCE, SOURCE[:, :5]], dim=1), TOKENS, live)[0]
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    torch.testing.assert_close(one, y, rtol=1e-5, atol=1e-5)


@HEADS
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position.kind": "t5_bias"},
        {"residual.kind": "value_residual"},
        {"residual.kind": "looped"},
        {"mixer.kind": "sliding_window"},
    ],
    ids=label,
)
def test_teacher_forcing_is_decoding_step_by_step(small: Make, head: str, changes: dict[str, object]) -> None:
    model = stirred(enc_dec(small, changes, head=head).build(seed=0))
    live = torch.ones(2, 9, dtype=torch.bool)
    live[1, 6:] = False
    with torch.no_grad():
        whole, _ = model(SOURCE, TOKENS, live)
        for sizes in ([1] * 13, [5, 1, 7]):
            state, start, parts = model.state_of(SOURCE, live), 0, []
            for size in sizes:
                part, state = model.step(TOKENS[:, start : start + size], state, start)
                parts.append(part)
                start += size
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)


@HEADS
@pytest.mark.parametrize(
    "changes",
    [{"placement.kind": kind} for kind in THREE_SUBLAYERS]
    + [
        pytest.param(changes, marks=[pytest.mark.slow] if "moe" not in changes["ffn.kind"] else [])
        for changes in FFNS
        if Direction.CAUSAL in registry.lookup(AbstractFFN, changes["ffn.kind"]).directions
    ]
    + [{"position.kind": kind} for kind in ("alibi", "t5_bias", "learned", "sinusoidal", "rotary")],
    ids=label,
)
def test_an_encoder_decoder_trains_and_is_counted_right(small: Make, head: str, changes: dict[str, object]) -> None:
    config = enc_dec(small, changes, head=head)
    model = config.build(seed=0).train()
    logits, auxiliary = model(SOURCE, shift_right(TOKENS, 0), checkpointing=True)
    (F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()) + auxiliary).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert cost.count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())
    plain = small(changes)
    assert cost.flops_per_token(config, 16, True) > cost.flops_per_token(plain, 16, True)


def test_labels_are_shifted_right() -> None:
    assert shift_right(torch.tensor([[5, 6, 7]]), 1).tolist() == [[1, 5, 6]]


def test_placements_without_single_sublayers_are_refused(small: Make) -> None:
    with pytest.raises(InfeasibleArchitecture, match=r"three sublayers.*'parallel' cannot.*pre.*sandwich"):
        enc_dec(small, {"placement.kind": "parallel"})
    assert set(THREE_SUBLAYERS) <= registry.variants(AbstractPlacement).keys()


def test_cross_attention_equals_torch_and_forgets_the_order_of_its_memory(compared: Compare) -> None:
    torch.manual_seed(0)
    ours = CrossAttention(16, HeadShape(heads=4, kv_heads=4, head_dim=4))
    theirs = nn.MultiheadAttention(16, 4, bias=False, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.out_proj.weight.copy_(ours.out.weight)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    live = torch.arange(7)[None] < torch.tensor([[7], [4]])
    y = ours(x, nn.Identity(), Context(memory=memory, memory_live=live))
    compared(
        "stack.encoder_decoder",
        "torch nn.MultiheadAttention",
        y,
        theirs(x, memory, memory, key_padding_mask=~live, need_weights=False)[0],
    )
    order = torch.tensor([3, 6, 0, 2, 5, 1, 4])
    shuffled = ours(x, nn.Identity(), Context(memory=memory[:, order], memory_live=live[:, order]))
    torch.testing.assert_close(shuffled, y)
    nothing = ours(x, nn.Identity(), Context(memory=memory, memory_live=torch.zeros(2, 7, dtype=torch.bool)))
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_cross_attention_to_its_own_input_is_unmasked_attention(small: Make) -> None:
    encoder = small({"stack.kind": "encoder", "layers": 1, "position.kind": "alibi"}).build(seed=0)
    mixer = encoder.slots[0].mixer
    cross = CrossAttention(32, mixer.shape)
    cross.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    position = PositionModule()
    torch.testing.assert_close(cross(x, position, Context(memory=x)), mixer(x, position, Context()))


@pytest.mark.parametrize(("placement", "norm_first"), [("pre", True), ("post", False)])
def test_a_layer_of_the_decoder_equals_torch(compared: Compare, small: Make, placement: str, norm_first: bool) -> None:
    config = enc_dec(small, {"placement.kind": placement, "norm.kind": "layernorm", "ffn.kind": "relu",
                             "position.kind": "learned", "mixer.softmax.queries_per_kv": 1})  # fmt: skip
    ours = CrossLayer(config, config.mixer, 0)
    theirs = nn.TransformerDecoderLayer(32, 2, 40, dropout=0.0, batch_first=True, norm_first=norm_first)
    mixing, crossing, feeding = ours.sublayers
    state = theirs.state_dict()
    if config.mixer.head_shape().heads * config.mixer.head_shape().head_dim != 32:
        plain = registry.encode(config)
        plain["mixer"]["softmax"] |= {"head_dim": 16}
        config = registry.decode(ModelConfig, plain)
        ours = CrossLayer(config, config.mixer, 0)
        mixing, crossing, feeding = ours.sublayers
    named = (("self_attn", mixing.branch.mixer), ("multihead_attn", crossing.branch))
    for name, attention in named:
        state[f"{name}.in_proj_weight"] = torch.cat(
            [attention.query.weight, attention.key.weight, attention.value.weight]
        ).detach()
        state[f"{name}.in_proj_bias"] = torch.zeros(96)
        state[f"{name}.out_proj.weight"] = attention.out.weight.detach()
        state[f"{name}.out_proj.bias"] = torch.zeros(32)
    state |= {"linear1.weight": feeding.branch.w_in.weight.detach(), "linear1.bias": torch.zeros(40)}
    state |= {"linear2.weight": feeding.branch.w_out.weight.detach(), "linear2.bias": torch.zeros(32)}
    theirs.load_state_dict(state)
    x, memory = (torch.randn(2, n, 32, generator=torch.Generator().manual_seed(n)) for n in (6, 8))
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    expected = theirs(x, memory, tgt_mask=mask, tgt_is_causal=True)
    compared(
        "stack.encoder_decoder",
        "torch nn.TransformerDecoderLayer",
        ours(x, PositionModule(), Context(memory=memory)),
        expected,
        rtol=1e-5,
        atol=1e-5,
    )


def test_an_encoder_layer_equals_torch(compared: Compare, small: Make) -> None:
    plain = registry.encode(small({"stack.kind": "encoder", "norm.kind": "layernorm", "ffn.kind": "relu", "layers": 1}))
    plain["mixer"]["softmax"] |= {"head_dim": 16, "queries_per_kv": 1}
    model = registry.decode(ModelConfig, plain).build(seed=0)
    assert isinstance(model, EncoderLM)
    theirs = nn.MultiheadAttention(32, 2, bias=False, batch_first=True)
    mixer = model.slots[0].mixer
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([mixer.query.weight, mixer.key.weight, mixer.value.weight]))
        theirs.out_proj.weight.copy_(mixer.out.weight)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    compared(
        "stack.encoder",
        "torch nn.MultiheadAttention",
        mixer(x, PositionModule(), Context()),
        theirs(x, x, x, need_weights=False)[0],
    )


def some_mixture(p_gen: Tensor, attention: Tensor, copied: Tensor, extra: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(*attention.shape[:2], 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return mixture(logits, p_gen, attention, copied, extra).exp(), logits.softmax(-1)


def test_pointer_copy_is_a_distribution_with_the_right_ends() -> None:
    generator = torch.Generator().manual_seed(1)
    attention = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64).softmax(-1)
    copied = torch.tensor([[1, 7, 1, 2], [0, 6, 7, 7]])
    halves, generated = some_mixture(torch.full((2, 3, 1), 0.5).double(), attention, copied, 2)
    torch.testing.assert_close(halves.sum(-1), torch.ones(2, 3).double())
    torch.testing.assert_close(
        halves[0, :, 1], 0.5 * generated[0, :, 1] + 0.5 * (attention[0, :, 0] + attention[0, :, 2])
    )
    plain, generated = some_mixture(torch.ones(2, 3, 1).double(), attention, copied, 2)
    torch.testing.assert_close(plain[..., :6], generated)
    assert (plain[..., 6:] <= 2 * LEAST).all()
    one_hot = F.one_hot(torch.tensor([[1, 1, 3], [2, 2, 0]]), 4).double()
    copies, _ = some_mixture(torch.zeros(2, 3, 1).double(), one_hot, copied, 2)
    assert copies.argmax(-1).tolist() == [[7, 7, 2], [7, 7, 0]]
    torch.testing.assert_close(copies.amax(-1), torch.ones(2, 3).double())


def test_pointer_copy_of_an_empty_source_generates(small: Make) -> None:
    model = stirred(enc_dec(small, head="pointer_copy").build(seed=0))
    dead = torch.zeros(2, 9, dtype=torch.bool)
    with torch.no_grad():
        y, _ = model(SOURCE, TOKENS, dead)
    assert y.isfinite().all()
    torch.testing.assert_close(y.exp().sum(-1), torch.ones(2, 13))


def test_pointer_copy_names_words_outside_the_vocabulary(small: Make) -> None:
    model = stirred(enc_dec(small, head="pointer_copy").build(seed=0))
    copied = SOURCE.clone()
    copied[:, 3] = 48
    with torch.no_grad():
        y, _ = model(SOURCE, TOKENS, copied=copied, extra=2)
        state = model.state_of(SOURCE, copied=copied)
        step, _ = model.step(TOKENS, state, 0, extra=2)
    assert y.shape[-1] == 50
    torch.testing.assert_close(y.exp().sum(-1), torch.ones(2, 13))
    assert (y[..., 48].exp() > 1e-4).all()
    assert (y[..., 49].exp() <= 2 * LEAST).all()
    torch.testing.assert_close(step, y, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_an_encoder_decoder_learns_to_reverse(small: Make) -> None:
    torch.manual_seed(0)
    model = enc_dec(small, {"init.kind": "xavier"}, encoder_layers=1).build(seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        source = torch.randint(2, 8, (32, 4), generator=generator)
        labels = source.flip(1)
        logits, auxiliary = model(source, shift_right(labels, 1))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + auxiliary
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 1.0 < 2.0 < losses[0]
