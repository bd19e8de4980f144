"""Two drawn models of one id compute the same, two of different ids do not: no field is without an effect.

2,000 pairs from the presets `full` and `attention`, at one width so that sizes hide nothing: of five pairs with a
point, four are with neighbours that differ in one to three fields, one is with an unrelated point. Each of the 400
points is also compared with its canonical form: what that drops counts for nothing. ASSAY_DRAW_SEED draws others.
"""

import functools
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from drawn_points import TRAIN_LEN, VOCABULARY, Point, config_of, experiment
from torch import Tensor, nn

from blocks.families import InfeasibleArchitecture, RoutedFFN
from blocks.init import learning_rate_factor, role_of
from blocks.model import DecoderLM, ModelConfig
from blocks.registry import config_id
from search_space import domains
from search_space.canon import seed_from
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


Outline = dict[str, tuple[torch.Size, str]]


def outlined(model: DecoderLM) -> Outline:
    """Name, shape and role of every parameter."""
    return {name: (p.shape, role_of(name, p)) for name, p in model.named_parameters()}


@functools.lru_cache(maxsize=8)
def outline(config: ModelConfig) -> Outline:
    return outlined(config.build(seed=1, device="meta"))


@functools.lru_cache(maxsize=8)
def start(config: ModelConfig) -> dict[str, Tensor]:
    """Where parameters start and how fast they move, by name."""
    found = config.build(seed=1).named_parameters()
    return {name: torch.cat([p.detach().flatten(), torch.tensor([learning_rate_factor(p)])]) for name, p in found}


@functools.lru_cache(maxsize=8)
def numbers_off_start(config: ModelConfig) -> dict[str, Tensor]:
    """What the model computes a step of noise away from its start."""
    model = config.build(seed=1).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(seed_from(9, name))
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return numbers(model)


def numbers(model: DecoderLM) -> dict[str, Tensor]:
    """What the model computes: in training with dropout, after routers moved, on longer texts."""
    routers = [part for part in model.modules() if isinstance(part, RoutedFFN)]
    computed: list[Tensor] = []
    with torch.no_grad(), torch.random.fork_rng():
        for _ in range(2 if routers else 1):
            torch.manual_seed(0)
            computed += model.train()(TOKENS[:, :TRAIN_LEN])
            for router in routers:
                router.rebalance()
        computed += model.eval()(TOKENS[:, : model.config.max_len])
    return {str(index): tensor for index, tensor in enumerate(computed)}


def transplant(source: DecoderLM, target: DecoderLM) -> None:
    """Give target the parameters of source, where names differ and roles and shapes do not; none stays neutral."""
    kinds = [outlined(model) for model in (source, target)]
    order = [sorted(kind, key=lambda name, kind=kind: kind[name]) for kind in kinds]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for mine, theirs in zip(*order, strict=True):
            drawn = torch.randn(source.get_parameter(mine).shape, generator=generator, dtype=torch.float64)
            source.get_parameter(mine).copy_(0.2 * drawn)
            target.get_parameter(theirs).copy_(0.2 * drawn)


def same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> bool:
    """Whether both hold the same numbers of the same shapes under the same names."""
    shapes = [{name: tensor.shape for name, tensor in numbers.items()} for numbers in (one, other)]
    return shapes[0] == shapes[1] and all(
        torch.allclose(one[name], other[name], rtol=tolerance, atol=tolerance) for name in one
    )


def difference(one: ModelConfig, other: ModelConfig, tolerance: float) -> str:
    """What differs between two models that have one seed; empty where nothing does."""
    if outline(one) != outline(other):
        return "different parameters"
    if not same(start(one), start(other), 0):
        return "different starts"
    return "" if same(numbers_off_start(one), numbers_off_start(other), tolerance) else "different numbers"


def complaint(one: ModelConfig, other: ModelConfig) -> str:
    """What is wrong with a pair; empty where nothing is."""
    first, second = one.canonical(), other.canonical()
    if config_id(first) == config_id(second):
        found = difference(one, other, 1e-6)
        return found and f"one id, {found}:\n{one}\n{other}"
    if sorted(outline(first).values()) != sorted(outline(second).values()):
        return ""
    if outline(first) != outline(second):
        equal = first.init == second.init and same_once_transplanted(first, second)
    else:
        equal = not difference(first, second, 1e-9)
    return f"two ids, the same numbers:\n{first}\n{second}" if equal else ""


def same_once_transplanted(one: ModelConfig, other: ModelConfig) -> bool:
    models = [config.build(seed=1).double() for config in (one, other)]
    transplant(*models)
    return same(*map(numbers, models), 1e-9)


def with_forms(drawn: Iterable[Pair]) -> Iterator[Pair]:
    """The pairs, and each new first of a pair with its canonical form."""
    last = None
    for one, other in drawn:
        if one != last:
            yield one, one.canonical()
        yield one, other
        last = one


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ids_tell_what_models_compute(chunk: int) -> None:
    of = experiment("full" if chunk % 4 else "attention")
    max_len = LONGER if chunk % 2 else TRAIN_LEN
    drawn = itertools.islice(pairs(of, seed=1000 * SEED + chunk, max_len=max_len), IN_CHUNK)
    complaints = [text for text in itertools.starmap(complaint, with_forms(drawn)) if text]
    assert not complaints, "\n\n".join(complaints)


class Renamed(nn.Module):
    """A layer whose parameters have longer names."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Tensor:
        return self.layer(*args)


def test_a_field_without_an_effect_is_found(small: Callable[..., ModelConfig]) -> None:
    """Two models that differ in names only, as they would if no rule gave their configs one id."""
    models = [small().build(seed=seed).double() for seed in (1, 2)]
    models[1].layers = nn.ModuleList([Renamed(layer) for layer in models[1].layers])
    assert outlined(models[0]).keys() != outlined(models[1]).keys()
    assert not same(*map(numbers, models), 1e-9)
    transplant(*models)
    assert same(*map(numbers, models), 1e-9)


def test_what_a_canonical_form_must_not_drop_is_found(small: Callable[..., ModelConfig]) -> None:
    base = small()
    assert difference(base, small(d_ff=48), 1e-6) == "different parameters"
    assert difference(base, small({"init.kind": "xavier"}), 1e-6) == "different starts"
    assert difference(base, small({"position.kind": "none"}), 1e-6) == "different numbers"
    assert not difference(base, small(), 1e-6)


def test_layers_in_another_order_are_no_complaint(small: Callable[..., ModelConfig]) -> None:
    """Shapes of the same names differ, and those of both models together do not."""
    hybrid = {"layers": 3, "pattern.kind": "every_nth", "pattern.every_nth.mixer.softmax.head_dim": 16}
    one, other = (small({**hybrid, "pattern.every_nth.every": every}) for every in (2, 3))
    assert sorted(outline(one).values()) == sorted(outline(other).values())
    assert outline(one) != outline(other)
    assert complaint(one, other) == ""
