"""The preset `attention` at one million parameters: every candidate on its budget, no candidate with dead attention."""

import random

import pytest
import torch

from blocks.families import Role
from runners.candidate import full_space, resolve
from runners.tasks import TASKS, task_from_plain
from search_space.experiment import preset_path, read
from search_space.space import random_point

DRAWS = 240


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
        logits, auxiliary = model(tokens)
        (
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + auxiliary
        ).backward()
        for name, parameter in model.named_parameters():
            if parameter.role in (Role.QUERY, Role.KEY, Role.VALUE, Role.MIXER_OUT):
                rows = parameter.grad.abs().amax(dim=1)
                mixer = resolved.candidate.model.mixer
                rectified = str(getattr(mixer, "feature_map", "")).startswith("relu")
                if rectified and parameter.role in (Role.QUERY, Role.KEY):
                    # A channel whose query or key is rectified to 0 at every token passes nothing on; its head does.
                    rows = rows.view(-1, mixer.head_dim).amax(dim=1)
                assert (rows > 0).all(), f"{name} of {mixer} has rows without a gradient"
    assert not untried
