"""Mixtures of experts: equality with transformers', the reductions, losses, capacity, and load balancing."""

from collections.abc import Callable

import pytest
import torch
from reference_table import Compare
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, MixtralConfig, SwitchTransformersConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

from blocks import cost, registry
from blocks.families import AbstractFFN, Context, Dims, Direction, InfeasibleArchitecture, RoutedFFN
from blocks.ffn.moe import BiasedMoe, Moe, SharedMoe, Switch
from blocks.ffn.routing import (
    Experts,
    Routing,
    balance_loss,
    biased_route,
    rebalance,
    renormalised_route,
    routing_statistics,
    softmax_route,
    within_capacity,
    z_loss,
)
from blocks.ffn.swiglu import Swiglu
from blocks.ffn.whole_sequence import ExpertChoice, SoftMoe
from blocks.model import ModelConfig
from blocks.ops.experts import dense_experts, grouped_experts

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]
DIMS = Dims(d_model=24, d_ff=20, layers=2, train_len=16, max_len=16)
CAUSAL = {kind: ffn for kind, ffn in registry.variants(AbstractFFN).items() if Direction.CAUSAL in ffn.directions}
ROUTED = [kind for kind, ffn in CAUSAL.items() if isinstance(ffn().build(DIMS), RoutedFFN)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(module: nn.Module, std: float = 0.3) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.normal_(0, std, generator=generator)
    return module


def built(config: AbstractFFN, std: float = 0.3) -> Experts:
    module = drawn(config.build(DIMS), std)
    assert isinstance(module, Experts)
    return module


X = draw(2, 15, 24)


def test_renormalised_top_two_equals_mixtral(compared: Compare) -> None:
    ours = built(Moe(experts=4))
    config = MixtralConfig(hidden_size=24, intermediate_size=20, num_local_experts=4, num_experts_per_tok=2)
    theirs = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat([ours.w_gate, ours.w_in], dim=1))
        theirs.experts.down_proj.copy_(ours.w_out)
    compared("ffn.moe", "transformers MixtralSparseMoeBlock", ours(X), theirs(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [1, 2])
def test_shared_and_biased_experts_equal_deepseek_v3(compared: Compare, shared: int) -> None:
    ours = built(BiasedMoe(experts=8, top_k=2, shared=shared))
    ours.bias.copy_(0.5 * draw(8, seed=3))
    config = DeepseekV3Config(
        hidden_size=24, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=shared,
        n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=True,
    )  # fmt: skip
    theirs = DeepseekV3MoE(config)
    assert ours.shared is not None
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.gate.e_score_correction_bias.copy_(ours.bias)
        theirs.experts.gate_up_proj.copy_(torch.cat([ours.w_gate, ours.w_in], dim=1))
        theirs.experts.down_proj.copy_(ours.w_out)
        for name, part in (("gate_proj", ours.shared.w_gate), ("up_proj", ours.shared.w_in)):
            theirs.shared_experts.get_submodule(name).weight.copy_(part.weight)
        theirs.shared_experts.down_proj.weight.copy_(ours.shared.w_out.weight)
    compared("ffn.moe_bias", "transformers DeepseekV3MoE", ours(X), theirs(X), rtol=1e-5, atol=1e-5)


def test_switch_drops_whom_the_switch_transformer_drops(compared: Compare) -> None:
    logits = draw(3, 16, 4)
    config = SwitchTransformersConfig(hidden_size=4, num_experts=4, expert_capacity=3, router_bias=False)
    theirs = SwitchTransformersTop1Router(config).eval()
    theirs.classifier.weight.data = torch.eye(4)
    kept, gates, _ = theirs(logits)
    ours = softmax_route(logits, torch.zeros(4), 1)
    within = within_capacity(ours.experts, 4, 3, None)
    assert torch.equal(within[..., 0], kept.sum(-1).bool())
    assert not within.all()
    compared("ffn.switch", "transformers SwitchTransformersTop1Router", ours.gates, gates)


@pytest.mark.parametrize(("n_experts", "top_k"), [(4, 2), (8, 1), (8, 4), (3, 3)])
@pytest.mark.parametrize("n_tokens", [1, 7, 64])
def test_grouped_equals_dense_equals_a_loop_with_their_gradients(n_experts: int, top_k: int, n_tokens: int) -> None:
    x, gates = draw(n_tokens, 6, seed=1).double(), draw(n_tokens, top_k, seed=2).double()
    experts = draw(n_tokens, n_experts, seed=3).topk(top_k, -1).indices
    weights = [draw(n_experts, *shape, seed=seed).double() for seed, shape in ((4, (5, 6)), (5, (5, 6)), (6, (6, 5)))]

    def loop(x: Tensor, experts: Tensor, gates: Tensor, w1: Tensor, v: Tensor, w2: Tensor) -> Tensor:
        rows = []
        for row, chosen, gate in zip(x, experts, gates, strict=True):
            parts = [g * (w2[e] @ (F.silu(w1[e] @ row) * (v[e] @ row))) for e, g in zip(chosen, gate, strict=True)]
            rows.append(torch.stack(parts).sum(0))
        return torch.stack(rows)

    results = []
    for form in (loop, dense_experts, grouped_experts):
        given = [part.clone().requires_grad_() for part in (x, gates, *weights)]
        y = form(given[0], experts, given[1], *given[2:])
        y.square().sum().backward()
        results.append([y, *(part.grad for part in given)])
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_equal_experts_with_gates_that_sum_to_one_are_the_dense_network() -> None:
    ours, dense = built(Moe(experts=4)), Swiglu().build(DIMS)
    with torch.no_grad():
        for stacked, single in ((ours.w_gate, dense.w_gate), (ours.w_in, dense.w_in), (ours.w_out, dense.w_out)):
            stacked.copy_(stacked[:1].expand_as(stacked))
            single.weight.copy_(stacked[0])
    torch.testing.assert_close(ours(X), dense(X), rtol=1e-5, atol=1e-6)


def test_choosing_all_experts_is_the_soft_mixture() -> None:
    ours = built(Moe(experts=4, top_k=4, renormalised=False))
    inner = F.silu(torch.einsum("btd,efd->btef", X, ours.w_gate)) * torch.einsum("btd,efd->btef", X, ours.w_in)
    outputs = torch.einsum("btef,edf->bted", inner, ours.w_out)
    mixture = torch.einsum("bte,bted->btd", (X @ ours.router.weight.T).softmax(-1), outputs)
    torch.testing.assert_close(ours(X), mixture, rtol=1e-5, atol=1e-5)
    assert Moe(experts=4, top_k=4, renormalised=False).canonical(DIMS) == Moe(experts=4, top_k=4)


def test_without_routed_output_shared_experts_are_one_dense_network() -> None:
    ours = built(SharedMoe(shared=2))
    ours.w_out.data.zero_()
    assert ours.shared is not None
    torch.testing.assert_close(ours(X), ours.shared(X))
    assert ours.shared.w_in.out_features == 2 * DIMS.d_ff


def test_a_renormalised_single_gate_starves_the_router_and_is_refused(small: Make) -> None:
    gradients = {}
    for top_k in (1, 2):
        module = built(Moe(top_k=2))
        routing = renormalised_route(X @ module.router.weight.T, module.bias, top_k)
        routing.gates.square().sum().backward()
        gradients[top_k] = float(module.router.weight.grad.abs().max())
    assert gradients[1] < 1e-5
    assert gradients[2] > 0.1
    with pytest.raises(InfeasibleArchitecture, match=r"the router gets no gradient.*top_k to 2 or more"):
        Moe(top_k=1).check(DIMS)
    Moe(top_k=1, renormalised=False).check(DIMS)
    with pytest.raises(InfeasibleArchitecture, match="normalised gate 1"):
        BiasedMoe(top_k=1).check(DIMS)
    plain = registry.encode(small({"ffn.kind": "moe"}))
    plain["ffn"]["moe"]["top_k"] = 1
    with pytest.raises(InfeasibleArchitecture, match="renormalised"):
        registry.decode(ModelConfig, plain)


@pytest.mark.parametrize("config", [Moe(top_k=9, experts=8), SharedMoe(top_k=17), BiasedMoe(top_k=0)])
def test_more_choices_than_experts_are_refused(config: AbstractFFN) -> None:
    with pytest.raises(InfeasibleArchitecture, match=r"top_k must be from 1 to .*; got"):
        config.check(DIMS)


@pytest.mark.parametrize("kind", ["expert_choice", "soft_moe"])
def test_experts_that_see_the_whole_row_are_refused_in_a_decoder(small: Make, kind: str) -> None:
    with pytest.raises(InfeasibleArchitecture, match=f"'decoder' has causal layers, which model.ffn.kind='{kind}'"):
        small({"ffn.kind": kind})


@pytest.mark.parametrize("top_k", [1, 2])
def test_balance_loss_equals_mixtral_and_lies_between_top_k_and_the_experts(compared: Compare, top_k: int) -> None:
    logits = draw(2, 32, 8)
    ours = balance_loss(softmax_route(logits, torch.zeros(8), top_k), None)
    compared(
        "ffn.moe",
        "transformers load_balancing_loss_func of Mixtral",
        ours,
        load_balancing_loss_func((logits.flatten(0, 1),), 8, top_k),
    )
    live = torch.arange(32).expand(2, 32) < torch.tensor([[9], [32]])
    masked = balance_loss(softmax_route(logits, torch.zeros(8), top_k), live)
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), 8, top_k, live)
    compared("ffn.moe", "transformers load_balancing_loss_func of Mixtral", masked, theirs)
    even = torch.zeros(1, 8, 8)
    balanced = Routing(
        experts=torch.stack([(torch.arange(8) + shift) % 8 for shift in range(top_k)], -1)[None],
        gates=torch.ones(1, 8, top_k),
        probabilities=even.softmax(-1),
    )
    assert float(balance_loss(balanced, None)) == pytest.approx(top_k)
    collapsed = even.clone()
    collapsed[..., 0] = 50.0
    assert float(balance_loss(softmax_route(collapsed, torch.zeros(8), 1), None)) == pytest.approx(8.0)


def test_z_loss_is_the_mean_square_of_the_log_sum_exp_of_live_tokens() -> None:
    logits, live = draw(2, 5, 4), torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    expected = torch.logsumexp(logits, -1)[live].square().mean()
    torch.testing.assert_close(z_loss(logits, live), expected)


def test_losses_reach_the_context_with_their_weights() -> None:
    for config, count in ((Moe(), 2), (Moe(balance_weight=0.0), 1), (BiasedMoe(), 0), (Switch(), 2)):
        context = Context()
        built(config)(X, context)
        assert len(context.losses) == count
    context, module = Context(), built(Moe(z_weight=0.0, balance_weight=0.1))
    module(X, context)
    routing = renormalised_route(X @ module.router.weight.T, module.bias, 2)
    torch.testing.assert_close(context.losses[0], 0.1 * balance_loss(routing, None))


def test_capacity_drops_the_latest_tokens_in_training_only() -> None:
    module = built(Switch(experts=4, capacity_factor=1.0))
    module.router.weight.data.zero_()
    module.router.weight.data[0] = 5.0
    x = X.abs()
    trained, evaluated = module.train()(x), module.eval()(x)
    assert (trained[:, 4:] == 0).all(), "an expert takes 16 / 4 tokens of a row"
    torch.testing.assert_close(trained[:, :4], evaluated[:, :4])
    assert (evaluated.abs().sum(-1) > 0).all()
    found = routing_statistics(module)
    assert found["drop_rate"] == pytest.approx(11 / 15)
    assert found["load_max_over_mean"] == pytest.approx(4.0)
    assert routing_statistics(module)["drop_rate"] == 0


def test_ample_capacity_is_canonicalised_to_none() -> None:
    assert Moe(experts=4, top_k=4, capacity="1.0").canonical(DIMS).capacity == "unlimited"
    assert Moe(experts=4, top_k=2, capacity="1.5").canonical(DIMS).capacity == "1.5"


def test_padding_takes_no_capacity_and_no_share_of_the_load() -> None:
    module = built(Switch(experts=4, capacity_factor=1.0)).train()
    module.router.weight.data.zero_()
    module.router.weight.data[0] = 5.0
    live = torch.ones(2, 15, dtype=torch.bool)
    live[:, :3] = False
    y = module(X.abs(), Context(live=live))
    assert (y[:, 3:7].abs().sum(-1) > 0).all()
    assert (y[:, 7:] == 0).all()
    assert int(module.load.sum()) == 2 * 12


def test_the_bias_selects_but_does_not_weigh_and_has_no_gradient() -> None:
    logits = draw(1, 6, 8)
    plain = biased_route(logits, torch.zeros(8), 2)
    bias = torch.zeros(8)
    bias[plain.experts[0, 0]] = 0.3
    same = biased_route(logits[:, :1], bias, 2)
    assert torch.equal(same.experts.sort().values, plain.experts[:, :1].sort().values)
    torch.testing.assert_close(same.gates.sum(), plain.gates[:, :1].sum())
    torch.testing.assert_close(same.gates.max(), plain.gates[:, :1].max())
    far = torch.zeros(8)
    far[5] = 10.0
    assert (biased_route(logits, far, 2).experts == 5).any(-1).all()
    module = built(BiasedMoe())
    assert "bias" not in dict(module.named_parameters())
    assert "bias" in module.state_dict()


@pytest.mark.slow
def test_moving_the_bias_evens_out_the_load() -> None:
    module = built(BiasedMoe(experts=8, top_k=2), std=0.02).train()
    module.router.weight.data[:2] += 0.05
    x = draw(8, 16, 24, seed=7) + 1.0
    spread = []
    for _ in range(400):
        with torch.no_grad():
            module(x)
        load = module.step_load.float()
        spread.append(float(load.std() / load.mean()))
        rebalance(module)
    assert spread[-1] < 0.5 * spread[0]
    assert int(module.step_load.sum()) == 0


@pytest.mark.parametrize("kind", ROUTED)
def test_active_parameters_are_those_of_the_chosen_experts(small: Make, kind: str) -> None:
    config = small({"ffn.kind": kind})
    found = cost.measure(config, 16)
    rule = config.ffn.build(DIMS).rule
    experts = config.layers * rule.n_experts * 3 * config.d_model * config.d_ff
    assert found.active_params == found.params - experts * (rule.n_experts - rule.top_k) // rule.n_experts


@pytest.mark.parametrize("kind", ROUTED)
def test_checkpointed_layers_route_alike(small: Make, kind: str) -> None:
    config = small({"ffn.kind": kind, "init.kind": "xavier"})
    tokens = torch.randint(48, (2, 21), generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpointing in (False, True):
        model = config.build(seed=1)
        y, auxiliary = model(tokens, checkpointing=checkpointing)
        (y.square().mean() + auxiliary).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def bidirectional(config: AbstractFFN) -> RoutedFFN:
    module = drawn(config.build(DIMS))
    assert isinstance(module, RoutedFFN)
    return module


def test_expert_choice_gives_every_expert_the_same_number_of_its_best_tokens() -> None:
    module = bidirectional(ExpertChoice(experts=4, per_token=1.0))
    x = draw(2, 16, 24)
    scores = (x @ module.router.weight.T).softmax(-1)
    expected = torch.zeros_like(x)
    for row in range(2):
        for expert in range(4):
            for token in scores[row, :, expert].topk(4).indices:
                part = [weights[expert] for weights in (module.experts.w_gate, module.experts.w_in)]
                inner = F.silu(part[0] @ x[row, token]) * (part[1] @ x[row, token])
                expected[row, token] += scores[row, token, expert] * (module.experts.w_out[expert] @ inner)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


def test_soft_experts_mix_tokens_into_slots_and_slots_into_tokens() -> None:
    module = bidirectional(SoftMoe(experts=4))
    x = draw(2, 16, 24)
    logits = x @ module.router.weight.T
    dispatch, combine = logits.softmax(1), logits.softmax(2)
    torch.testing.assert_close(dispatch.sum(1), torch.ones(2, 16))
    slots = torch.einsum("bts,btd->bsd", dispatch, x).unflatten(1, (4, 4))
    y = torch.einsum("bts,bsd->btd", combine, module.experts(slots).flatten(1, 2))
    torch.testing.assert_close(module(x), y)


@pytest.mark.parametrize("config", [ExpertChoice(experts=4), SoftMoe(experts=4)], ids=lambda config: config.kind)
def test_padding_does_not_change_live_tokens_of_whole_sequence_experts(config: AbstractFFN) -> None:
    module = bidirectional(config)
    x = draw(2, 16, 24)
    live = torch.arange(16).expand(2, 16) < 10
    one, other = (module(torch.where(live[..., None], x, noise), Context(live=live)) for noise in (x, -x))
    torch.testing.assert_close(one[live], other[live])


@pytest.mark.parametrize("kind", ["expert_choice", "soft_moe", "moe"])
def test_experts_train_in_an_encoder(small: Make, kind: str) -> None:
    config = small({"stack.kind": "encoder", "ffn.kind": kind, "init.kind": "xavier"})
    model = config.build(seed=1)
    y, auxiliary = model(torch.randint(48, (2, 33), generator=torch.Generator().manual_seed(0)))
    (y.square().mean() + auxiliary).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    assert cost.count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())
