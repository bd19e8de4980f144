import math

import pytest
import torch

from blocks.families import MATRICES, Role
from runners.candidate import rebuild
from runners.optimize import AdamW, Cosine, WarmupStableDecay, parameter_groups, set_learning_rate
from tests.runners.specs import prepare

SCHEDULES = [Cosine(), Cosine(warmup=0.0, final=0.0), WarmupStableDecay(), WarmupStableDecay(warmup=0.0, decay=0.0)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_factors_stay_between_zero_and_one(schedule: Cosine | WarmupStableDecay) -> None:
    factors = [schedule.factor(step / 1000) for step in range(1001)]
    assert all(0.0 <= factor <= 1.0 for factor in factors)
    assert max(factors) == pytest.approx(1.0, abs=1e-3)


def test_cosine_warms_up_linearly_and_ends_at_its_final_share() -> None:
    schedule = Cosine(warmup=0.2, final=0.1)
    assert schedule.factor(0.05) == pytest.approx(0.25)
    assert schedule.factor(0.2) == pytest.approx(1.0)
    assert schedule.factor(0.6) == pytest.approx(0.1 + 0.9 / 2)
    assert schedule.factor(1.0) == pytest.approx(0.1)


def test_no_warmup_starts_at_the_peak() -> None:
    assert Cosine(warmup=0.0).factor(0.0) == 1.0
    assert WarmupStableDecay(warmup=0.0).factor(0.0) == 1.0


def test_wsd_holds_the_peak_and_decays_linearly_to_zero() -> None:
    schedule = WarmupStableDecay(warmup=0.1, decay=0.4)
    assert schedule.factor(0.05) == pytest.approx(0.5)
    assert schedule.factor(0.1) == schedule.factor(0.35) == schedule.factor(0.6) == 1.0
    assert schedule.factor(0.8) == pytest.approx(0.5)
    assert schedule.factor(1.0) == pytest.approx(0.0)


def test_every_group_gets_the_learning_rate_of_the_progress() -> None:
    model = rebuild(prepare().spec).model.build(0)
    config = AdamW(learning_rate=0.02)
    optimizer = config.build(model)
    assert set_learning_rate(optimizer, config, Cosine(warmup=0.5), 0.25) == pytest.approx(0.01)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.01])


def test_exactly_the_matrices_decay() -> None:
    model = rebuild(prepare("model.tied=false", "model.position=learned").spec).model.build(0)
    roles = {id(parameter): model.roles[name] for name, parameter in model.named_parameters()}
    decayed, kept = ([roles[id(parameter)] for parameter in group] for group in parameter_groups(model))
    assert set(decayed) == {
        Role.QUERY, Role.KEY, Role.VALUE, Role.MIXER_OUT, Role.FFN_IN, Role.FFN_OUT, Role.HEAD,
    }  # fmt: skip
    assert set(kept) >= {Role.EMBEDDING, Role.POSITION, Role.GAIN, Role.BIAS}
    assert not set(kept) & MATRICES
    assert len(decayed) + len(kept) == len(list(model.parameters()))


def test_decay_shrinks_matrices_by_its_share_of_the_learning_rate_and_leaves_the_rest() -> None:
    model = rebuild(prepare().spec).model.build(0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = AdamW(learning_rate=0.1, weight_decay=0.5).build(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        share = 0.95 if model.roles[name] in MATRICES else 1.0
        torch.testing.assert_close(parameter, before[name] * share)


def test_a_step_follows_the_update_rule_of_the_paper() -> None:
    model = rebuild(prepare().spec).model.build(0)
    config = AdamW(learning_rate=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8)
    optimizer = config.build(model)
    name, parameter = next((n, p) for n, p in model.named_parameters() if model.roles[n] in MATRICES)
    start = parameter.detach().double().clone()
    expected, mean, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 4):
        gradient = torch.randn(parameter.shape, generator=generator)
        for other in model.parameters():
            other.grad = torch.zeros_like(other)
        parameter.grad = gradient.clone()
        optimizer.step()
        wide = gradient.double()
        mean, square = 0.9 * mean + 0.1 * wide, 0.95 * square + 0.05 * wide**2
        update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        expected = expected - 0.01 * (update + 0.1 * expected)
    torch.testing.assert_close(parameter.double(), expected, atol=1e-6, rtol=1e-5, msg=name)
    assert not math.isclose(float(start.norm()), float(expected.norm()))
