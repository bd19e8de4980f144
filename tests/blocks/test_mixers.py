"""Mixers: reach, reductions, padding, decoding, the norm of queries and keys, entropy, dropout, state and FLOPs."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from blocks.families import AbstractMixer, AbstractPosition, Context, Dims, Hook, MixerModule, PositionModule, Role
from blocks.mixers.heads import AttentionModule
from blocks.mixers.linear import Linear
from blocks.mixers.sliding_window import SlidingWindow
from blocks.mixers.softmax import Softmax
from blocks.ops.attention import attention_weights, entropy
from blocks.ops.linear_attention import CHUNK
from blocks.positions.rotary import Rotary
from blocks.positions.xpos import Xpos
from blocks.registry import variants

CPU = torch.device("cpu")
DIMS = Dims(d_model=24, d_ff=48, layers=2, train_len=64, max_len=64)
LENGTH = 21
PLAIN = PositionModule()
SMALL_SOFTMAX = Softmax(kv_heads=2, queries_per_kv=2, head_dim=8)
SMALL_WINDOW = SlidingWindow(kv_heads=2, queries_per_kv=2, head_dim=8, window=5)
SMALL_LINEAR = Linear(heads=2, head_dim=8)
MIXERS = (
    SMALL_SOFTMAX,
    SMALL_WINDOW,
    dataclasses.replace(SMALL_SOFTMAX, qk_norm="l2"),
    dataclasses.replace(SMALL_WINDOW, qk_norm="rms"),
    SMALL_LINEAR,
    dataclasses.replace(SMALL_LINEAR, feature_map="relu_squared"),
)
KINDS = variants(AbstractPosition)
PAIRS = [(mixer, kind) for mixer, kind in itertools.product(MIXERS, KINDS) if KINDS[kind].needs <= mixer.offers]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def drawn(module: nn.Module) -> None:
    """Draw every parameter so that nothing stays at a neutral start."""
    for index, parameter in enumerate(module.parameters()):
        parameter.data = 0.3 * draw(*parameter.shape, seed=index) + (parameter.dim() == 1)


def build(mixer: AbstractMixer, position: str = "none") -> tuple[MixerModule, PositionModule]:
    built = mixer.build(DIMS), KINDS[position]().build(DIMS, mixer.head_shape())
    for module in built:
        drawn(module)
    return built


def decode(module: MixerModule, x: Tensor, position: PositionModule, cuts: tuple[int, ...]) -> Tensor:
    state, parts = module.empty_state(x.shape[0], CPU, x.dtype), []
    for start, end in zip((0, *cuts), (*cuts, x.shape[1]), strict=True):
        y, state = module.step(x[:, start:end], state, position, start)
        parts.append(y)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("mixer", "kind"), PAIRS)
@pytest.mark.parametrize("cuts", [tuple(range(1, LENGTH)), (1,), (4, 5, 11), (LENGTH - 1,)])
def test_decoding_from_any_split_equals_the_full_pass(mixer: AbstractMixer, kind: str, cuts: tuple[int, ...]) -> None:
    module, position = build(mixer, kind)
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(decode(module, x, position, cuts), module(x, position, Context()), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("mixer", "kind"), PAIRS)
def test_padding_on_either_side_changes_no_live_output(mixer: AbstractMixer, kind: str) -> None:
    """Left padding moves absolute positions, which are added to the embedding before any mixer is reached."""
    module, position = build(mixer, kind)
    x = draw(2, LENGTH, 24)
    alone = module(x, position, Context())
    padded = torch.cat([draw(2, 4, 24, seed=1), x, draw(2, 3, 24, seed=2)], dim=1)
    live = torch.zeros(2, LENGTH + 7, dtype=torch.bool)
    live[:, 4 : LENGTH + 4] = True
    y = module(padded, position, Context(live=live))
    torch.testing.assert_close(y[:, 4 : LENGTH + 4], alone, rtol=1e-4, atol=1e-5)
    assert y[:, :4].eq(0).all()
    assert y[:, LENGTH + 4 :].eq(0).all()


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_row_alone_equals_the_row_in_a_batch(mixer: AbstractMixer) -> None:
    module, position = build(mixer)
    x = draw(3, LENGTH, 24)
    torch.testing.assert_close(module(x, position, Context())[1:2], module(x[1:2], position, Context()))


@pytest.mark.parametrize("length", [1, 2, 15, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
@pytest.mark.parametrize("mixer", MIXERS)
def test_no_output_has_a_gradient_from_a_later_input(mixer: AbstractMixer, length: int) -> None:
    module, position = build(mixer, "rotary")
    x = draw(1, length, 24).requires_grad_()
    for t in {0, length // 2, length - 1}:
        (gradient,) = torch.autograd.grad(module(x, position, Context())[:, t].sum(), x)
        assert gradient[:, t + 1 :].eq(0).all()
        assert gradient[:, t].ne(0).any()


@pytest.mark.parametrize(("window", "layers"), [(3, 1), (3, 2), (4, 3), (1, 2)])
def test_windows_of_stacked_layers_reach_as_far_as_their_sum(window: int, layers: int) -> None:
    module, position = build(dataclasses.replace(SMALL_WINDOW, window=window))
    x = draw(1, LENGTH, 24).requires_grad_()
    y = x
    for _ in range(layers):
        y = y + module(y, position, Context())
    (gradient,) = torch.autograd.grad(y[:, -1].sum(), x)
    reached = gradient.abs().sum((0, 2)).ne(0).sum().item()
    assert reached == layers * (window - 1) + 1


def test_a_window_as_long_as_the_model_runs_is_plain_softmax() -> None:
    wide = dataclasses.replace(SMALL_WINDOW, window=64, qk_norm="rms", attention_dropout=0.1)
    assert wide.canonical(DIMS) == dataclasses.replace(SMALL_SOFTMAX, qk_norm="rms", attention_dropout=0.1)
    narrow = dataclasses.replace(wide, window=32)
    assert narrow.canonical(DIMS) is narrow
    x = draw(2, 64, 24)
    ours, position = build(wide, "rotary")
    plain, _ = build(wide.canonical(DIMS), "rotary")
    ours.eval(), plain.eval()
    torch.testing.assert_close(ours(x, position, Context()), plain(x, position, Context()))


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="window must be at least 1, the token itself; got 0"):
        dataclasses.replace(SMALL_WINDOW, window=0).check(DIMS)


@pytest.mark.parametrize(
    ("mixer", "after"),
    [
        (SMALL_SOFTMAX, lambda tokens: 2 * tokens * 2 * 8),
        (SMALL_WINDOW, lambda tokens: 2 * 4 * 2 * 8),
        (SMALL_LINEAR, lambda tokens: 2 * 8 * 8 + 2 * 8),
    ],
)
def test_state_holds_just_what_decoding_needs(mixer: AbstractMixer, after: object) -> None:
    module, position = build(mixer)
    state = module.empty_state(1, CPU, torch.float32)
    for start in (0, 1, 2, 3, 4, 5, 6):
        _, state = module.step(draw(1, 1, 24), state, position, start)
        assert callable(after)
        assert sum(tensor.numel() for tensor in state.values()) == after(start + 1)


def attention(mixer: AbstractMixer, position: str = "none") -> tuple[AttentionModule, PositionModule]:
    module, built = build(mixer, position)
    assert isinstance(module, AttentionModule)
    return module, built


@pytest.mark.parametrize("kind", ["l2", "rms", "layer"])
def test_qk_norm_makes_the_scale_of_the_projections_irrelevant(kind: str) -> None:
    module, position = attention(dataclasses.replace(SMALL_SOFTMAX, qk_norm=kind), "rotary")
    x = draw(2, LENGTH, 24)
    before = module(x, position, Context())
    for projection in (module.query, module.key):
        projection.weight.data *= 50
    torch.testing.assert_close(module(x, position, Context()), before, rtol=1e-3, atol=1e-4)
    plain, _ = attention(SMALL_SOFTMAX)
    first = plain(x, position, Context())
    plain.query.weight.data *= 50
    assert (plain(x, position, Context()) - first).abs().max() > 0.05


@pytest.mark.parametrize(("kind", "bound"), [("l2", 11.978), ("rms", 8**0.5), ("layer", 8**0.5)])
def test_qk_norm_bounds_the_logits_at_the_start(kind: str, bound: float) -> None:
    module = dataclasses.replace(SMALL_SOFTMAX, qk_norm=kind).build(DIMS)
    assert isinstance(module, AttentionModule)
    q, k, _ = module._project(1000 * draw(4, LENGTH, 24))
    logits = module.scale * torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(2, 2))
    assert 0.7 * bound < logits.abs().max().item() <= bound * 1.0001


def test_rms_norm_commutes_with_rotation_until_its_gain_differs_over_channels() -> None:
    q = draw(1, 30, 1, 16, dtype=torch.float64)
    rotary = Rotary().build(DIMS, SMALL_SOFTMAX.head_shape())

    def gap(gain: Tensor) -> float:
        def norm(x: Tensor) -> Tensor:
            return nn.functional.rms_norm(x, (16,), gain)

        return (rotary.rotate(norm(q), q)[0] - norm(rotary.rotate(q, q)[0])).abs().max().item()

    assert gap(torch.ones(16, dtype=torch.float64)) < 1e-14
    assert gap(1 + draw(16, seed=1, dtype=torch.float64)) > 0.1


def test_norms_act_before_the_rotation() -> None:
    module, position = attention(dataclasses.replace(SMALL_SOFTMAX, qk_norm="rms"), "xpos")
    x = draw(1, LENGTH, 24)
    q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (module.query, module.key, module.value))
    q, k = module.query_norm(q), module.key_norm(k)
    q, k = Xpos().build(DIMS, module.shape).rotate(q, k)
    weights = attention_weights(q, k, scale=8**-0.5)
    mixed = torch.einsum("bhts,bshv->bthv", weights, v.repeat_interleave(2, 2)).flatten(2)
    torch.testing.assert_close(module(x, position, Context()), module.out(mixed))


@pytest.mark.parametrize("mixer", [SMALL_SOFTMAX, SMALL_WINDOW])
def test_entropy_term_is_its_weight_times_the_mean_entropy_of_live_rows(mixer: AbstractMixer) -> None:
    module, position = attention(dataclasses.replace(mixer, entropy_weight=0.05))
    assert module.backends["attention"].startswith("reference (not sdpa: ")
    x, live = draw(2, LENGTH, 24), torch.ones(2, LENGTH, dtype=torch.bool)
    live[0, 15:] = False
    context = Context(live=live)
    y = module(x, position, context)
    q, k, _ = module._project(x)
    rows = entropy(attention_weights(q, k, scale=module.scale, window=module.window)).mean(1)
    (loss,) = context.losses
    torch.testing.assert_close(loss, 0.05 * rows[live].mean())
    plain, _ = attention(mixer)
    torch.testing.assert_close(y, plain(x, position, Context(live=live)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("weight", "sign"), [(0.1, -1), (-0.1, 1)])
def test_training_on_the_entropy_term_alone_sharpens_or_spreads(weight: float, sign: int) -> None:
    module, position = attention(dataclasses.replace(SMALL_SOFTMAX, entropy_weight=weight))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    history = []
    for _ in range(10):
        context = Context()
        module(draw(2, LENGTH, 24), position, context)
        optimizer.zero_grad()
        context.losses[0].backward()
        optimizer.step()
        history.append(context.losses[0].item() / weight)
    assert (history[-1] - history[0]) * sign > 0.01


@pytest.mark.parametrize("mixer", [SMALL_SOFTMAX, SMALL_WINDOW])
def test_attention_dropout_acts_in_training_only(mixer: AbstractMixer) -> None:
    module, position = attention(dataclasses.replace(mixer, attention_dropout=0.3))
    plain, _ = attention(mixer)
    x = draw(2, LENGTH, 24)
    expected = plain(x, position, Context())
    torch.testing.assert_close(module.eval()(x, position, Context()), expected)
    torch.manual_seed(0)
    first = module.train()(x, position, Context())
    torch.manual_seed(0)
    assert module(x, position, Context()).equal(first)
    assert not module(x, position, Context()).equal(first)


@pytest.mark.parametrize("mixer", MIXERS)
def test_bfloat16_autocast_stays_close_to_float64(mixer: AbstractMixer) -> None:
    module, position = build(mixer, "rotary")
    x = draw(2, 100, 24)
    exact = module.double()(x.double(), position, Context())
    module.float()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, position, Context())
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("mixer", [SMALL_SOFTMAX, SMALL_WINDOW, SMALL_LINEAR])
def test_huge_inputs_give_finite_outputs_and_gradients(mixer: AbstractMixer) -> None:
    module, position = build(mixer, "rotary")
    y = module(100 * draw(2, LENGTH, 24), position, Context())
    y.sum().backward()
    assert y.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


def counted_flops(module: MixerModule, length: int) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, length, 24), PLAIN, Context())
    return counter.get_total_flops() / length


@pytest.mark.parametrize("length", [CHUNK, 3 * CHUNK])
def test_declared_flops_equal_the_counted_matrix_products(length: int) -> None:
    softmax = dataclasses.replace(SMALL_SOFTMAX, entropy_weight=0.01)
    assert softmax.flops_per_token(DIMS, length, causal=False) == counted_flops(softmax.build(DIMS), length)
    assert SMALL_LINEAR.flops_per_token(DIMS, length, causal=False) == counted_flops(SMALL_LINEAR.build(DIMS), length)


@pytest.mark.parametrize(("mixer", "window"), [(SMALL_SOFTMAX, 50), (SMALL_WINDOW, 5), (SMALL_LINEAR, None)])
def test_causal_flops_count_visible_pairs_only(mixer: AbstractMixer, window: int | None) -> None:
    length = 50
    shape = mixer.head_shape()
    pairs = sum(min(t + 1, window or length) for t in range(length))
    difference = mixer.flops_per_token(DIMS, length, True) - mixer.flops_per_token(DIMS, 1, True)
    assert difference * length == pytest.approx(4 * shape.heads * shape.head_dim * (pairs - length))


def test_inner_width_is_free_of_the_model_width() -> None:
    module = Softmax(kv_heads=8, queries_per_kv=8, head_dim=128).build(DIMS)
    shapes = {parameter.role: tuple(parameter.shape) for parameter in module.parameters()}
    assert shapes == {
        Role.QUERY: (8192, 24),
        Role.KEY: (1024, 24),
        Role.VALUE: (1024, 24),
        Role.MIXER_OUT: (24, 8192),
    }


def test_linear_attention_offers_neither_bias_nor_scale() -> None:
    assert Linear.offers == {Hook.EMBEDDING, Hook.ROTATE}
    assert Softmax.offers == SlidingWindow.offers == set(Hook)


def test_linear_rotation_leaves_the_denominator_alone() -> None:
    """With every value one, the output is numerator over denominator: exactly one, unless the numerator is rotated."""
    module, position = build(SMALL_LINEAR, "rotary")
    module.value.weight.data.zero_()
    x = torch.cat([draw(1, LENGTH, 23), torch.ones(1, LENGTH, 1)], dim=-1)
    module.value.weight.data[:, -1] = 1.0
    module.out.weight.data = torch.eye(24, 16)
    plain, rotated = (module(x, scheme, Context())[..., :16] for scheme in (PLAIN, position))
    torch.testing.assert_close(plain, torch.ones(1, LENGTH, 16))
    assert (rotated[:, 1:] - 1).abs().max() > 0.3
    torch.testing.assert_close(rotated[:, 0], torch.ones(1, 16))


def test_feature_maps_are_what_they_are_called() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0])
    values = {
        name: dataclasses.replace(SMALL_LINEAR, feature_map=name).build(DIMS).features(x).tolist()
        for name in ("elu", "relu", "relu_squared")
    }
    assert values["elu"] == pytest.approx([0.135335, 1.0, 4.0], abs=1e-6)
    assert values["relu"] == [0.0, 0.0, 3.0]
    assert values["relu_squared"] == [0.0, 0.0, 9.0]


def trained_once(
    module: MixerModule, position: PositionModule, x: Tensor, live: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of its mean square for every parameter that takes part."""
    y = module(x, position, Context(live=live))
    parameters = [*module.parameters(), *(p for p in position.parameters() if p.dim() == 2 and p.shape[0] == 32)]
    return y, list(torch.autograd.grad(y.square().mean(), parameters))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("mixer", "kind"), [pair for pair in PAIRS if pair[1] not in ("learned", "sinusoidal")])
def test_a_training_pass_is_captured_as_a_cuda_graph_and_equals_the_cpu(
    mixer: AbstractMixer, kind: str, padded: bool
) -> None:
    module, position = build(mixer, kind)
    x = draw(2, LENGTH, 24)
    live = torch.ones(2, LENGTH, dtype=torch.bool)
    live[0, :3], live[1, 17:] = False, False
    y, gradients = trained_once(module, position, x, live if padded else None)
    module, position, x, live = module.cuda(), position.cuda(), x.cuda(), live.cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        trained_once(module, position, x, live if padded else None)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_gradients = trained_once(module, position, x, live if padded else None)
    graph.replay()
    torch.cuda.synchronize()
    for ours, expected in zip([captured, *captured_gradients], [y, *gradients], strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast_on_cuda_stays_close_to_float64(kind: str) -> None:
    for mixer in (mixer for mixer, other in PAIRS if other == kind):
        module, position = build(mixer, kind)
        x = draw(2, 48, 24)
        exact = module.double()(x.double(), position, Context())
        module, position = module.float().cuda(), position.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            y = module(x.cuda(), position, Context())
        assert y.dtype == torch.bfloat16
        assert (y.double().cpu() - exact).norm() / exact.norm() < 0.03
