"""The preset `attention` at one million parameters: every candidate on its budget, no candidate with dead attention."""

import dataclasses
import random

import pytest
import torch
from torch import Tensor, nn

from blocks import cost, size
from blocks.families import AbstractMixer, Role
from blocks.mixers.linear import Linear
from runners.candidate import full_space, resolve
from runners.tasks import TASKS, task_from_plain
from search_space.canon import unflatten
from search_space.domains import Choice, Domain, Scalar
from search_space.experiment import preset_path, read
from search_space.space import narrow, random_point, walk

DRAWS = 240


def is_rectified(mixer: AbstractMixer) -> bool:
    """True for linear attention whose queries and keys pass a rectifier."""
    return isinstance(mixer, Linear) and mixer.feature_map.startswith("relu")


def outputs_of_linear_maps(model: nn.Module) -> dict[str, Tensor]:
    """Filled by the next pass: what each linear map gave, by its name."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, y: Tensor) -> None:
        outputs[name] = y.detach()

    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda _, __, y, name=name: keep(name, y))
    return outputs


def meeting(outputs: dict[str, Tensor], layer: str) -> Tensor:
    """Channels in which some query that bears a loss is open at or after an open key.

    Elsewhere the product of both features is 0 at every pair of tokens, and so is the gradient of either.
    """
    query, key = (outputs[f"{layer}.mixer.{part}"] > 0 for part in ("query", "key"))
    return (query & key.cummax(dim=1).values.bool())[:, :-1].flatten(0, 1).any(dim=0)


def largest(_: str, domain: Domain) -> Scalar:
    """The largest number of a domain; of names, the default."""
    if isinstance(domain, Choice):
        return domain.default if isinstance(domain.default, str) else max(domain.options)
    return domain.high


@pytest.mark.slow
def test_no_mixer_is_too_large_for_the_budget_at_any_of_its_settings() -> None:
    """Models grow with every number of their mixers, so the largest of each says it for all."""
    experiment = read(preset_path("attention"), full_space=full_space, tasks=TASKS)
    context = dataclasses.asdict(task_from_plain(experiment.task).shape())
    for kind in experiment.space.fields["model"].fields["mixer"].variants:
        space = narrow(experiment.space, {"model": {"mixer": [kind]}})
        config = size.solve(
            unflatten(walk(space, largest))["model"],
            measure=experiment.size.measure,
            target=experiment.size.value,
            **context,
        )
        assert config.mixer.kind == kind
        assert abs(cost.count_parameters(config).total / 1_000_000 - 1) <= 0.01


@pytest.mark.slow
def test_every_candidate_lands_on_its_budget_and_attends() -> None:
    experiment = read(preset_path("attention"), full_space=full_space, tasks=TASKS)
    shape = task_from_plain(experiment.task).shape()
    rng = random.Random(0)
    mixers = experiment.space.fields["model"].fields["mixer"]
    tokens = torch.randint(shape.vocab_size, (2, shape.train_len), generator=torch.Generator().manual_seed(0))
    untried = set(mixers.variants)
    for draw in range(DRAWS):
        resolved = resolve(random_point(experiment.space, rng), experiment, shape)
        assert abs(resolved.cost.params / 1_000_000 - 1) <= 0.01
        if resolved.candidate.model.mixer.kind not in untried:
            continue
        untried.remove(resolved.candidate.model.mixer.kind)
        model = resolved.candidate.model.build(seed=draw)
        outputs = outputs_of_linear_maps(model)
        logits, auxiliary = model(tokens)
        (
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + auxiliary
        ).backward()
        for name, parameter in model.named_parameters():
            if parameter.role in (Role.QUERY, Role.KEY, Role.VALUE, Role.MIXER_OUT):
                rows = parameter.grad.abs().amax(dim=1)
                mixer = resolved.candidate.model.mixer
                if parameter.role in (Role.QUERY, Role.KEY) and is_rectified(mixer):
                    open_channels = meeting(outputs, name.rpartition(".mixer.")[0])
                    assert open_channels.view(mixer.heads, mixer.head_dim).any(dim=1).all(), "a head is shut"
                    rows = rows[open_channels]
                assert (rows > 0).all(), f"{name} of {mixer} has rows without a gradient"
    assert not untried
