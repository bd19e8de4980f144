"""Maximal update: numbers of the rule, groups of the optimiser, and activations that move alike at every width."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from blocks.families import MATRICES, Role
from blocks.init import learning_rate_factor
from blocks.inits.maximal_update import CompleteP, Mup
from blocks.model import DecoderLM, ModelConfig
from runners.optimize import AdamW, Cosine, set_learning_rate

Make = Callable[..., ModelConfig]


def test_numbers_from_32_to_256_are_those_of_the_mup_package() -> None:
    rule = Mup(base_width=32)
    for role, fan_in, fan_out in ((Role.QUERY, 256, 256), (Role.FFN_IN, 256, 1024), (Role.FFN_OUT, 1024, 256)):
        assert 1e-3 * rule.learning_rate_factor(role, fan_in, fan_out, 2) == pytest.approx(1.25e-4)
        assert rule.std(role, fan_in, fan_out, 2) == pytest.approx(fan_in**-0.5)
    assert rule.logit_multiplier(256) == 0.125
    for role in (Role.EMBEDDING, Role.HEAD, Role.GAIN, Role.BIAS):
        assert rule.learning_rate_factor(role, 256, 256, 2) == 1.0
    assert rule.query_multiplier(64) == 1.0
    assert rule.query_multiplier(16) / 4 == pytest.approx(8 / 16)


@pytest.mark.parametrize(("exponent", "branch", "pace"), [(1.0, 0.25, 1.0), (0.5, 0.5, 0.5)])
def test_depth_divides_branches_and_paces_layers(exponent: float, branch: float, pace: float) -> None:
    rule = CompleteP(base_width=64, base_layers=2, exponent=exponent)
    assert rule.branch_multiplier(8) == pytest.approx(branch)
    assert rule.learning_rate_factor(Role.QUERY, 128, 128, 8) == pytest.approx(pace / 2)
    assert rule.learning_rate_factor(Role.GAIN, 0, 0, 8) == pytest.approx(pace)
    assert rule.learning_rate_factor(Role.EMBEDDING, 48, 128, 8) == 1.0
    at_base = rule.learning_rate_factor(Role.QUERY, 128, 128, 2)
    assert at_base == Mup(base_width=64).learning_rate_factor(Role.QUERY, 128, 128, 2)


def test_branches_and_logits_are_multiplied_and_queries_scaled(small: Make) -> None:
    config = small({"d_model": 128, "layers": 4, "init.kind": "complete_p"})
    model = config.build(seed=0).eval()
    tokens = torch.arange(20)[None]
    plain = dataclasses.replace(config, init=Mup(base_width=128)).build(seed=0).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for layer in plain.layers:
            layer.mixer.mixer.out.weight.mul_(0.5)
            layer.ffn.w_out.weight.mul_(0.5)
        torch.testing.assert_close(model(tokens)[0], plain(tokens)[0] / 2)
        decoded, _ = model.step(tokens, model.empty_state(1), 0)
        torch.testing.assert_close(decoded, model(tokens)[0])
    unscaled = dataclasses.replace(config, init=NoRule()).build(seed=0).eval()
    query = unscaled.slots[0].mixer.query
    x = torch.randn(1, 3, 128)
    weight = model.slots[0].mixer.query.weight
    torch.testing.assert_close(model.slots[0].mixer.query(x), math.sqrt(64 / 8) * (x @ weight.T))
    torch.testing.assert_close(query(x), x @ query.weight.T)


class NoRule(Mup):
    """Maximal update without its factor on queries."""

    def query_multiplier(self, head_dim: int) -> float:
        return 1.0


def test_a_tied_head_shares_the_rule_of_the_readout(small: Make) -> None:
    model = small({"d_model": 128, "tied": True, "init.kind": "mup", "init.mup.base_width": 32}).build(seed=0).eval()
    entering: list[Tensor] = []
    model.final_norm.register_forward_hook(lambda _, args, out: entering.append(out))
    with torch.no_grad():
        y, _ = model(torch.arange(20)[None])
        torch.testing.assert_close(y, entering[0] @ model.embedding.T / 4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_optimiser_paces_each_role_and_keeps_decay_per_step(small: Make, tied: bool) -> None:
    model = small({"d_model": 256, "tied": tied, "init.kind": "mup", "init.mup.base_width": 32}).build(seed=0)
    config = AdamW(learning_rate=1e-3, weight_decay=0.1)
    optimizer = config.build(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    set_learning_rate(optimizer, config, Cosine(warmup=0.5), 0.25)
    seen = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            role = model.roles[names[id(parameter)]]
            slow = role in MATRICES - {Role.HEAD}
            assert group["lr"] == pytest.approx(0.5e-3 / 8 if slow else 0.5e-3), role
            decay = 0.1 if role in MATRICES else 0.0
            assert group["lr"] * group["weight_decay"] == pytest.approx(0.5e-3 * decay)
            assert learning_rate_factor(parameter) == (0.125 if slow else 1.0)
            seen += 1
    assert seen == len(list(model.parameters()))


def test_other_rules_leave_one_rate_for_all(small: Make) -> None:
    optimizer = AdamW(learning_rate=1e-3).build(small().build(seed=0))
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}
    assert len(optimizer.param_groups) == 2


def drift(small: Make, init: str, width: int) -> dict[str, float]:
    """Root mean square of how far five steps of Adam move each layer's output and the logits."""
    heads = {"mixer.softmax.kv_heads": 4, "mixer.softmax.head_dim": width // 4} if width <= 512 else {
        "mixer.softmax.kv_heads": 8, "mixer.softmax.head_dim": 128
    }  # fmt: skip
    config = small({"d_model": width, "tied": False, "init.kind": init, **heads}, d_ff=2 * width)
    model = config.build(seed=0)
    optimizer = AdamW(learning_rate=3e-3, weight_decay=0.0).build(model)
    tokens = torch.randint(48, (4, 32), generator=torch.Generator().manual_seed(0))
    before = activations(model, tokens)
    for _ in range(5):
        y, _ = model(tokens[:, :-1])
        optimizer.zero_grad()
        nn.functional.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    after = activations(model, tokens)
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


def activations(model: DecoderLM, tokens: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, args, out, index=index: found.update({f"layer {index}": out}))
        for index, layer in enumerate(model.layers)
    ]
    with torch.no_grad():
        found["logits"] = model(tokens)[0]
    for hook in hooks:
        hook.remove()
    return found


def slopes(found: list[dict[str, float]], widths: tuple[int, ...]) -> dict[str, float]:
    """How the drift grows with the width, as a power of it."""
    x = torch.tensor([math.log(width) for width in widths])
    x = x - x.mean()
    return {
        name: float((x * torch.tensor([math.log(values[name]) for values in found])).sum() / x.square().sum())
        for name in found[0]
    }


def assert_flat(found: list[dict[str, float]], widths: tuple[int, ...]) -> None:
    """Layers move alike at every width; logits too, once the share that the first head adds at random has faded.

    That share falls as the root of the width, so the logits' fall flattens and never reaches its power of one half.
    """
    flat = slopes(found, widths)
    assert abs(flat.pop("logits")) < 0.35
    assert max(abs(slope) for slope in flat.values()) < 0.05, flat
    narrow, wide = (slopes(part, at)["logits"] for part, at in ((found[:2], widths[:2]), (found[-2:], widths[-2:])))
    assert narrow < wide < 0.05


@pytest.mark.slow
def test_activations_move_alike_at_every_width_under_maximal_update_only(small: Make) -> None:
    widths = (64, 128, 256, 512)
    assert_flat([drift(small, "mup", width) for width in widths], widths)
    rising = slopes([drift(small, "lecun", width) for width in widths[:3]], widths[:3])
    assert rising["layer 0"] > 0.5
    assert min(rising.values()) > 0.1, rising


@pytest.mark.slow
def test_activations_move_alike_up_to_a_width_of_1024(small: Make) -> None:
    widths = (64, 256, 1024)
    assert_flat([drift(small, "mup", width) for width in widths], widths)


LEARNING_RATES = tuple(2.0**-power for power in range(11, 3, -1))


def final_loss(small: Make, init: dict[str, object], width: int, learning_rate: float) -> float:
    """Mean loss of the last tenth of 120 steps of Adam on walks over a fixed random graph of bytes."""
    heads = {"mixer.softmax.kv_heads": 4, "mixer.softmax.head_dim": max(width // 4, 8)}
    model = small({"d_model": width, "tied": False, **init, **heads}, d_ff=2 * width).build(seed=0)
    optimizer = AdamW(learning_rate=learning_rate, weight_decay=0.0).build(model)
    generator = torch.Generator().manual_seed(1)
    following = torch.randint(48, (48, 48, 2), generator=generator)
    losses = []
    for _ in range(120):
        walk = [torch.randint(48, (16,), generator=generator) for _ in range(2)]
        for _ in range(30):
            turn = torch.randint(2, (16,), generator=generator)
            walk.append(following[walk[-2], walk[-1], turn])
        tokens = torch.stack(walk, 1)
        y, _ = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-12:]) / 12


def best_rates(small: Make, init: dict[str, object], widths: tuple[int, ...]) -> list[float]:
    """The base-2 logarithm of the best learning rate at each width, by a parabola through it and its neighbours."""
    found = []
    for width in widths:
        losses = [final_loss(small, init, width, rate) for rate in LEARNING_RATES]
        best = min(range(1, len(losses) - 1), key=losses.__getitem__)
        left, middle, right = losses[best - 1 : best + 2]
        found.append(math.log2(LEARNING_RATES[best]) + 0.5 * (left - right) / (left - 2 * middle + right))
    return found


@pytest.mark.slow
def test_the_best_learning_rate_stays_where_it_is_under_maximal_update_only(small: Make) -> None:
    moved = best_rates(small, {"init.kind": "mup", "init.mup.base_width": 32}, (32, 64, 128, 256))
    assert max(moved) - min(moved) <= 1.0, moved
    usual = best_rates(small, {"init.kind": "lecun"}, (32, 256))
    assert usual[0] - usual[-1] > 1.0, usual
