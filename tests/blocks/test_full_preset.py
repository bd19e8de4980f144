"""Whatever the preset `full` can draw: legal points train and decode, the others are refused before anything is built.

500 of each, at a small size, in chunks that run side by side. ASSAY_DRAW_SEED draws other points.
"""

import itertools
import os
import random
import re
from collections.abc import Iterator

import pytest
import torch
from drawn_points import TRAIN_LEN, Point, config_of, draws, experiment, resolved
from torch import Tensor
from torch.nn import functional as F

from blocks import cost
from blocks.families import InfeasibleArchitecture, Role
from blocks.model import DecoderLM, ModelConfig
from runners.candidate import Resolved
from search_space.domains import values
from search_space.points import changed
from search_space.space import random_point, searched

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("ASSAY_DRAW_SEED", "0"))
CHUNKS, IN_CHUNK = 20, 25
MOST_TRIES = 20
ROWS = 8
LONGER = ("task.python_source.eval_lengths=[56]",)
"""Every second chunk is also run on longer texts than it is trained on, as schemes that stretch need."""
PATH = re.compile(r"model\.[a-z_0-9.]+")
REMEDIES = (
    "could be: ",
    "that do: ",
    "would do: ",
    "; use ",
    "; set ",
    "that have one: ",
    "; give ",
    "that can: ",
    "next token: ",
)
"""Words that a remedy follows."""


def legal(chunk: int) -> Iterator[Resolved]:
    of = experiment("full", *(LONGER if chunk % 2 else ()))
    found = (made for _, made in draws(of, seed=1000 * SEED + chunk) if isinstance(made, Resolved))
    return itertools.islice(found, IN_CHUNK)


def decoded(model: DecoderLM, tokens: Tensor, sizes: list[int]) -> Tensor:
    state, parts = model.empty_state(tokens.shape[0]), []
    for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        part, state = model.step(tokens[:, start : start + size], state, start)
        parts.append(part)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_legal_points_build_train_and_decode(chunk: int) -> None:
    """After two steps every parameter has had a gradient; what lies behind a factor of zero gets it in the second.

    Behind a head of zeros as well, as untied Fixup starts, it gets it in the third.
    """
    for index, made in enumerate(legal(chunk)):
        config = made.candidate.model
        where = f"chunk {chunk}, point {index}: {config}"
        model = config.build(seed=index)
        rng = torch.Generator().manual_seed(index)
        tokens = torch.randint(config.vocab_size, (ROWS, TRAIN_LEN + 1), generator=rng)
        train(model, made, tokens, where)
        model.eval()
        split = random.Random(f"{chunk} {index}").randrange(1, TRAIN_LEN - 3)
        sizes = [1] * TRAIN_LEN if index == 0 else [split, 1, 1, TRAIN_LEN - 2 - split]
        with torch.no_grad():
            whole = model(tokens[:2, :-1])[0]
            error = (decoded(model, tokens[:2, :-1], sizes) - whole).abs().max() / whole.abs().max()
        assert error < 1e-4, f"decoding in steps of {sizes} differs by {error:.1e}; {where}"


def train(model: DecoderLM, made: Resolved, tokens: Tensor, where: str) -> None:
    optimizer = made.candidate.optimizer.build(model.train())
    untouched = {name for name, _ in model.named_parameters()}
    torch.manual_seed(0)
    config = model.config
    shut = not config.tied and config.init.std(Role.HEAD, config.d_model, config.vocab_size, config.layers) == 0
    for step in range(3 if shut else 2):
        logits, auxiliary = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + auxiliary
        assert loss.isfinite(), f"the loss of step {step} is {loss}; {where}"
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} gets no gradient; {where}"
            assert parameter.grad.isfinite().all(), f"{name} gets a gradient that is not finite; {where}"
        untouched -= {name for name, parameter in model.named_parameters() if parameter.grad.any()}
        optimizer.step()
    assert not untouched, f"{sorted(untouched)} got gradients of zero only; {where}"


def illegal(chunk: int) -> Iterator[tuple[Point, InfeasibleArchitecture]]:
    """Refused draws, and refused neighbours of legal ones: other variants of single families, any registered."""
    of, rng = experiment("full"), random.Random(1000 * SEED + chunk)
    families = {path: domain for path, domain in searched(of.full).items() if path.count(".") == 2}
    kinds = {path: domain for path, domain in families.items() if path.startswith("model.") and path.endswith(".kind")}
    while True:
        point = random_point(of.space, rng)
        for _ in range(MOST_TRIES):
            try:
                config_of(point)
            except InfeasibleArchitecture as refusal:
                yield point, refusal
                break
            path = rng.choice(list(kinds))
            point = changed(of.full, of.space, point, {path: rng.choice(values(kinds[path]))})


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_illegal_points_are_refused_before_building_with_both_paths_and_a_remedy(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(itertools.islice(illegal(chunk), IN_CHUNK))

    def build(*_: object, **__: object) -> None:
        raise AssertionError("a refused point was built or counted")

    for module, name in ((cost, "count_parameters"), (cost, "measure"), (ModelConfig, "build")):
        monkeypatch.setattr(module, name, build)
    for point, refusal in found:
        with pytest.raises(InfeasibleArchitecture) as again:
            resolved(point, experiment("full"))
        message = str(again.value)
        assert message == str(refusal)
        families = {path.split(".")[1] for path in PATH.findall(message)}
        assert len(families) >= 2, f"names one family only: {message}"
        assert any(remedy in message for remedy in REMEDIES), f"says not what would do: {message}"
