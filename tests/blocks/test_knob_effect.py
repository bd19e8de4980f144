"""Two drawn models of one id compute the same, two of different ids do not: no field is without an effect.

2,000 pairs from the presets `full` and `attention`, at one width so that sizes hide nothing: of five pairs with a
point, four are with neighbours that differ in one to three fields, one is with an unrelated point.
ASSAY_DRAW_SEED draws others.
"""

import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from drawn_points import TRAIN_LEN, VOCABULARY, Point, config_of, experiment
from torch import Tensor

from blocks.families import InfeasibleArchitecture, RoutedFFN
from blocks.init import learning_rate_factor, role_of
from blocks.model import DecoderLM, ModelConfig
from blocks.registry import config_id
from search_space import domains
from search_space.experiment import Experiment
from search_space.points import changed
from search_space.space import random_point, searched

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("ASSAY_DRAW_SEED", "0"))
CHUNKS, IN_CHUNK = 20, 100
NEIGHBOURS = 4
LONGER = TRAIN_LEN + 16
TOKENS = torch.randint(VOCABULARY, (2, LONGER), generator=torch.Generator().manual_seed(0))

Pair = tuple[ModelConfig, ModelConfig]


def legal(point: Point, max_len: int) -> ModelConfig | None:
    try:
        return config_of(point, max_len)
    except InfeasibleArchitecture:
        return None


def pairs(of: Experiment, seed: int, max_len: int) -> Iterator[Pair]:
    """Pairs of legal configs without end."""
    rng = random.Random(seed)
    fields = {path: domain for path, domain in searched(of.space).items() if path.startswith("model.")}
    before = None
    while True:
        point = random_point(of.space, rng)
        config = legal(point, max_len)
        if config is None:
            continue
        if before is not None:
            yield before, config
        before, found = config, 0
        while found < NEIGHBOURS:
            paths = rng.sample([path for path in fields if path in point], rng.choice((1, 1, 1, 2, 3)))
            change = {path: domains.draw(fields[path], rng) for path in paths}
            neighbour = legal(changed(of.space, of.space, point, change), max_len)
            if neighbour is not None and neighbour != config:
                found += 1
                yield config, neighbour


@functools.lru_cache(maxsize=4)
def outline(config: ModelConfig) -> dict[str, tuple[torch.Size, str]]:
    """Name, shape and role of every parameter."""
    model = config.build(seed=1, device="meta")
    return {name: (p.shape, role_of(name, p)) for name, p in model.named_parameters()}


def start(config: ModelConfig) -> tuple[DecoderLM, list[Tensor]]:
    """The model in float64, and where its parameters start and how fast they move."""
    model = config.build(seed=1).double()
    paces = torch.tensor([learning_rate_factor(parameter) for parameter in model.parameters()])
    return model, [paces, *(parameter.detach().clone() for parameter in model.parameters())]


def numbers(model: DecoderLM, stirred: bool = True) -> list[Tensor]:
    """What the model computes off its start: in training with dropout, after routers moved, on longer texts."""
    generator, computed = torch.Generator().manual_seed(9), []
    longest = model.config.max_len
    with torch.no_grad(), torch.random.fork_rng():
        if stirred:
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for _ in range(2):
            torch.manual_seed(0)
            computed += model.train()(TOKENS[:, :TRAIN_LEN])
            for part in model.modules():
                if isinstance(part, RoutedFFN):
                    part.rebalance()
        computed += model.eval()(TOKENS[:, :longest])
    return computed


def transplant(source: DecoderLM, target: DecoderLM) -> None:
    """Give target the parameters of source, where names differ and roles and shapes do not; none stays neutral."""
    kinds = [outline(model.config) for model in (source, target)]
    order = [sorted(kind, key=lambda name, kind=kind: kind[name]) for kind in kinds]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for mine, theirs in zip(*order, strict=True):
            drawn = torch.randn(source.get_parameter(mine).shape, generator=generator, dtype=torch.float64)
            source.get_parameter(mine).copy_(0.2 * drawn)
            target.get_parameter(theirs).copy_(0.2 * drawn)


def same(one: list[Tensor], other: list[Tensor], tolerance: float) -> bool:
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(one, other, strict=True))


def complaint(one: ModelConfig, other: ModelConfig) -> str:
    """What is wrong with a pair; empty where nothing is."""
    first, second = one.canonical(), other.canonical()
    if config_id(first) == config_id(second):
        alike = same(numbers(start(one)[0]), numbers(start(other)[0]), 1e-6)
        return "" if alike else f"one id, different numbers:\n{one}\n{other}"
    if sorted(outline(first).values()) != sorted(outline(second).values()):
        return ""
    (a, a_start), (b, b_start) = start(first), start(second)
    renamed = outline(first).keys() != outline(second).keys()
    if renamed:
        if first.init != second.init:
            return ""
        transplant(a, b)
    elif not same(a_start, b_start, 0):
        return ""
    if not same(numbers(a, not renamed), numbers(b, not renamed), 1e-9):
        return ""
    return f"two ids, the same numbers:\n{first}\n{second}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ids_tell_what_models_compute(chunk: int) -> None:
    of = experiment("full" if chunk % 4 else "attention")
    max_len = LONGER if chunk % 2 else TRAIN_LEN
    found = itertools.islice(pairs(of, seed=1000 * SEED + chunk, max_len=max_len), IN_CHUNK)
    complaints = [text for text in itertools.starmap(complaint, found) if text]
    assert not complaints, "\n\n".join(complaints)


def test_a_field_without_an_effect_is_found(small: Callable[..., ModelConfig]) -> None:
    """Two configs that differ in name only, as they would if no rule gave them one id."""
    parallel, pre = (small({"placement.kind": kind, "ffn.kind": "none"}) for kind in ("parallel", "pre"))
    models = [config.build(seed=1).double() for config in (parallel, pre)]
    transplant(*models)
    assert same(*(numbers(model, stirred=False) for model in models), 1e-9)
    shaped = [sorted(outline(config).values()) for config in (parallel, pre)]
    assert shaped[0] == shaped[1]
