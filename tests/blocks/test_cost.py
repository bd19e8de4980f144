"""Costs: equal to what a real model has, does and keeps."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from blocks import cost, registry
from blocks.families import (
    BOTH_DIRECTIONS,
    AbstractFFN,
    AbstractNorm,
    AbstractPlacement,
    AbstractPosition,
    AbstractPremixer,
    Direction,
    Hook,
)
from blocks.model import ModelConfig

Make = Callable[..., ModelConfig]

ENTROPY = {"mixer.softmax.entropy_weight": 0.01}
"""Makes attention take its matmul-only reference, whose every product the FLOP counter sees."""
WINDOW = {"mixer.kind": "sliding_window", "mixer.sliding_window.window": 8, "mixer.sliding_window.entropy_weight": 0.01}
HYBRID = {**{f"pattern.every_nth.{path}": value for path, value in WINDOW.items()}, "pattern.kind": "every_nth"}
HYBRID |= {"pattern.every_nth.every": 2, "layers": 5}


def counted_flops(config: ModelConfig, length: int) -> float:
    model = config.build(seed=0).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64))
    return counter.get_total_flops() / length


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind", [kind for kind, ffn in registry.variants(AbstractFFN).items() if ffn.dense or not ffn.grows]
)
def test_flops_of_attention_equal_the_counted(small: Make, tied: bool, kind: str) -> None:
    config = small({**ENTROPY, "tied": tied, "ffn.kind": kind})
    assert cost.flops_per_token(config, 24, causal=False) == counted_flops(config, 24)


@pytest.mark.parametrize("length", [24, 64, 128])
def test_flops_of_linear_attention_equal_the_counted(small: Make, length: int) -> None:
    config = small({"mixer.kind": "linear"}, max_len=128)
    assert cost.flops_per_token(config, length, causal=False) == counted_flops(config, length)


def test_a_convolution_adds_its_multiply_adds_in_every_layer(small: Make) -> None:
    with_taps = small({"premixer.kind": "short_conv", "premixer.short_conv.width": 3, "layers": 3})
    added = cost.flops_per_token(with_taps, 24, causal=False) - cost.flops_per_token(
        small({"layers": 3}), 24, causal=False
    )
    assert added == 3 * 2 * 3 * 32


def test_flops_of_a_hybrid_add_up_layer_by_layer(small: Make) -> None:
    config = small({**HYBRID, **ENTROPY, "pattern.every_nth.mixer.sliding_window.window": 32})
    assert cost.flops_per_token(config, 24, causal=False) == counted_flops(config, 24)


def test_causal_flops_count_the_visible_half_of_the_scores(small: Make) -> None:
    config, length = small(), 24
    full, causal = (cost.flops_per_token(config, length, causal=causal) for causal in (False, True))
    scores = config.layers * 4 * 4 * 8 * length
    assert full - causal == pytest.approx(scores * (1 - (length + 1) / (2 * length)))


@pytest.mark.parametrize("family", [AbstractFFN, AbstractNorm, AbstractPlacement, AbstractPosition, AbstractPremixer])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_equal_those_of_a_real_model(small: Make, family: type, tied: bool) -> None:
    name = family.__name__.removeprefix("Abstract").lower()
    for kind, variant in registry.variants(family).items():
        if Direction.CAUSAL not in getattr(variant, "directions", BOTH_DIRECTIONS):
            continue
        config = small({f"{name}.kind": kind, "tied": tied})
        model = config.build(seed=0)
        sizes = {parameter: entry.numel() for parameter, entry in model.named_parameters()}
        count = cost.count_parameters(config)
        assert count.total == sum(sizes.values())
        added = family is AbstractPosition and Hook.EMBEDDING in registry.lookup(family, kind).needs
        outside = {"embedding", "head.weight"} | {entry for entry in sizes if entry.startswith("positions.") and added}
        assert count.body == sum(size for entry, size in sizes.items() if entry not in outside)


def test_parameters_of_a_hybrid_share_positions_by_head_shape(small: Make) -> None:
    other_heads = {**HYBRID, "pattern.every_nth.mixer.sliding_window.kv_heads": 1, "position.kind": "t5_bias"}
    config = small(other_heads)
    model = config.build(seed=0)
    assert len(model.positions) == 2
    assert cost.count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())
    learned = small({**other_heads, "position.kind": "learned"})
    assert len(learned.build(seed=0).positions) == 1
    assert cost.count_parameters(learned).total == sum(p.numel() for p in learned.build(seed=0).parameters())


def state_bytes(config: ModelConfig, length: int) -> int:
    model = config.build(seed=0)
    with torch.no_grad():
        _, state = model.step(torch.zeros(1, length, dtype=torch.int64), model.empty_state(1), 0)
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


@pytest.mark.parametrize(
    "changes",
    [{}, WINDOW, HYBRID, {"mixer.kind": "linear"}, {"premixer.kind": "short_conv"}],
    ids=["softmax", "window", "hybrid", "linear", "convolution"],
)
@pytest.mark.parametrize("length", [1, 4, 30])
def test_state_bytes_equal_those_of_a_real_decoding(small: Make, changes: dict[str, object], length: int) -> None:
    config = small(changes)
    assert cost.measure(config, length).state_bytes(length) == state_bytes(config, length)


def test_state_grows_with_softmax_and_stays_with_a_window_or_a_recurrence(small: Make) -> None:
    softmax = cost.measure(small(), 30)
    assert softmax.state_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert softmax.fixed_state_bytes == 0
    for changes in (WINDOW, {"mixer.kind": "linear"}):
        flat = cost.measure(small(changes), 30)
        assert flat.state_bytes_per_token == 0
        assert flat.fixed_state_bytes > 0
    hybrid = cost.measure(small(HYBRID), 30)
    assert hybrid.state_bytes_per_token == 3 * 2 * 2 * 8 * 4


def test_training_bytes_grow_with_the_micro_batch_from_four_copies_of_the_weights(small: Make) -> None:
    config = small({"d_model": 64, "layers": 4})
    bare, one, two = (cost.measure(config, 32, tokens).training_bytes for tokens in (0, 320, 640))
    assert bare == 4 * cost.measure(config, 32).weight_bytes
    assert two - one == pytest.approx(one - bare, abs=2)
    assert one > bare


def test_estimated_activations_match_what_autograd_keeps(small: Make) -> None:
    config = small({"d_model": 64, "layers": 4})
    model = config.build(seed=0)
    kept: dict[int, torch.UntypedStorage] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens = torch.zeros(10, 32, dtype=torch.int64)
        logits, _ = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert loss.isfinite()
    estimate = cost.measure(config, 32, 320).training_bytes - cost.measure(config, 32).training_bytes
    assert 0.5 < estimate / sum(storage.nbytes() for storage in kept.values()) < 2


def test_measuring_draws_no_random_numbers(small: Make) -> None:
    before = torch.get_rng_state()
    cost.measure(small(), 16, 64)
    assert torch.equal(before, torch.get_rng_state())


def test_cost_is_known_without_a_build_for_many_sizes(small: Make) -> None:
    wide = small({"d_model": 4096, "layers": 64, "mixer.softmax.head_dim": 128}, d_ff=16384)
    assert cost.measure(wide, 40).params > 10**10


@pytest.mark.parametrize(("one", "other"), [(8, 16), (16, 32)])
def test_flops_rise_with_length_where_every_pair_is_scored(small: Make, one: int, other: int) -> None:
    per_token = [cost.flops_per_token(small(), length, causal=False) for length in (one, other)]
    assert per_token[1] - per_token[0] == 2 * 4 * 4 * 8 * (other - one)


def test_positions_that_touch_the_embedding_alone_are_outside_the_body(small: Make) -> None:
    for kind, position in registry.variants(AbstractPosition).items():
        count = cost.count_parameters(small({"position.kind": kind}))
        plain = cost.count_parameters(small({"position.kind": "none"}))
        if Hook.EMBEDDING in position.needs:
            assert count.body == plain.body, kind
