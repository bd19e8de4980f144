"""Lion and Muon against their papers' update rules, and what every optimiser owes the training loop."""

import pytest
import torch
from torch import nn

from blocks.families import MATRICES, InfeasibleArchitecture
from blocks.registry import variants
from runners.candidate import rebuild
from runners.lion import Lion
from runners.muon import HIDDEN, RMS_OF_ADAM, Muon, orthogonalised
from runners.optimize import AbstractOptimizer, AdamW
from search_space.records import Status
from tests.runners.specs import BYTES, prepare, run


def model_of(*overrides: str) -> nn.Module:
    return rebuild(prepare(*overrides).spec).model.build(0)


def given_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_lion_follows_algorithm_2() -> None:
    model = model_of()
    optimizer = Lion(learning_rate=0.01, weight_decay=0.5, beta1=0.9, beta2=0.99).build(model)
    parameter = next(parameter for parameter in model.parameters() if parameter.role in MATRICES)
    expected, momentum = parameter.detach().double(), torch.zeros_like(parameter, dtype=torch.float64)
    for step in range(4):
        given_gradients(model, step)
        gradient = parameter.grad.double()
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * gradient)
        expected = expected - 0.01 * (update + 0.5 * expected)
        momentum = 0.99 * momentum + 0.01 * gradient
        torch.testing.assert_close(parameter.double(), expected, atol=1e-6, rtol=1e-6)


def test_singular_values_end_near_one_and_directions_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 16, 48), (3, 48, 16), (24, 24)):
        matrices = torch.randn(shape, generator=generator)
        found = orthogonalised(matrices)
        u, sizes, v = torch.linalg.svd(matrices.double(), full_matrices=False)
        kept = sizes / sizes.amax(-1, keepdim=True) > 0.05
        inner = (u.mT @ found.double() @ v.mT).diagonal(dim1=-2, dim2=-1)
        assert inner[kept].min() > 0.6, "values that are not tiny come near 1"
        assert torch.linalg.svdvals(found).max() < 1.2
        across = u.mT @ found.double() @ v.mT - torch.diag_embed(inner)
        assert across.abs().max() < 1e-4, "an odd polynomial keeps the singular vectors"
    assert not orthogonalised(torch.zeros(4, 6)).any()


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_matrices_move_as_with_the_muon_of_torch(shape: tuple[int, int]) -> None:
    ours, theirs = (nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3))) for _ in range(2))
    model = nn.Module()
    model.weight = ours
    ours.role = next(iter(HIDDEN))  # type: ignore[attr-defined]
    optimizer = Muon(learning_rate=0.02, weight_decay=0.1).build(model)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        given_gradients(model, step)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    # The reference iterates in bfloat16.
    torch.testing.assert_close(ours, theirs, atol=0.02 * RMS_OF_ADAM * 5 * 0.05, rtol=0.0)


def test_what_is_no_hidden_matrix_moves_as_with_adamw() -> None:
    overrides = ("model.tied=false", "model.position=learned")
    one, other = model_of(*overrides), model_of(*overrides)
    muon, adamw = Muon(learning_rate=0.01).build(one), AdamW(learning_rate=0.01).build(other)
    for step in range(3):
        for model, optimizer in ((one, muon), (other, adamw)):
            given_gradients(model, step)
            optimizer.step()
    same = {
        name: torch.equal(p, q)
        for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True)
    }
    hidden = {name for name, parameter in one.named_parameters() if parameter.role in HIDDEN}
    assert hidden
    assert {name for name, equal in same.items() if not equal} == hidden


def test_muon_refuses_rules_that_pace_matrices_for_adam() -> None:
    with pytest.raises(InfeasibleArchitecture, match=r"model\.init\.kind='mup' .* take optimizer\.kind='adamw'"):
        prepare("optimizer=muon", "model.init=mup")
    prepare("optimizer=lion", "model.init=mup")


@pytest.mark.parametrize("kind", sorted(variants(AbstractOptimizer)))
def test_every_optimizer_learns_at_its_default_settings(kind: str) -> None:
    made = prepare(f"optimizer={kind}", text=BYTES)
    result = run(made)
    assert result.status is Status.OK
    assert result.curve[-1].loss < result.curve[0].loss - 1.0
