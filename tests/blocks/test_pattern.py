"""Patterns: which layer gets which mixer, and when two patterns are one."""

import random
from collections.abc import Callable

import pytest
import torch

from blocks import registry
from blocks.model import ModelConfig
from blocks.pattern import EveryNth, Uniform
from search_space import domains
from search_space.canon import unflatten
from search_space.space import derive, holds, narrow, random_point, searched

Make = Callable[..., ModelConfig]
OTHER = {"pattern.kind": "every_nth", "pattern.every_nth.every": 3, "pattern.every_nth.mixer.softmax.head_dim": 16}


def test_every_nth_counts_layers_from_one(small: Make) -> None:
    other = small().mixer
    pattern = EveryNth(every=3, mixer=other)
    assert pattern.mixers("main", 7) == ("main", "main", other, "main", "main", other, "main")
    assert Uniform().mixers("main", 2) == ("main", "main")


def test_layers_are_built_from_their_own_mixer(small: Make) -> None:
    model = small({**OTHER, "layers": 4}).build(seed=0)
    assert [slot.mixer.shape.head_dim for slot in model.slots] == [8, 8, 16, 8]


@pytest.mark.parametrize(
    ("changes", "uniform"),
    [
        ({**OTHER, "layers": 3}, False),
        ({**OTHER, "layers": 2}, True),
        ({"pattern.kind": "every_nth", "pattern.every_nth.every": 2}, True),
    ],
    ids=["different", "too few layers", "same mixer"],
)
def test_a_pattern_of_one_mixer_is_uniform(small: Make, changes: dict[str, domains.Scalar], uniform: bool) -> None:
    config = small(changes)
    canonical = config.canonical()
    assert (canonical.pattern == Uniform()) == uniform
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(config.build(seed=0)(tokens)[0], canonical.build(seed=0)(tokens)[0])
    assert canonical.canonical() == canonical


def test_patterns_are_searched_like_any_family() -> None:
    space = derive(ModelConfig, registry.variants)
    narrowed = narrow(
        space,
        {
            "layers": [2, 4],
            "d_model": 32,
            "mixer": {"softmax": {"kv_heads": 1, "queries_per_kv": 1, "head_dim": 8}},
            "pattern": {"uniform": None, "every_nth": {"every": [2, 4], "mixer": {"softmax": {"head_dim": [8, 16]}}}},
            "position": "rotary",
            "ffn": "swiglu",
            "placement": "pre",
            "init": "scaled_normal",
        },
    )
    assert {"pattern.kind", "pattern.every_nth.every", "pattern.every_nth.mixer.softmax.head_dim"} <= set(
        searched(narrowed)
    )
    kinds = set()
    for seed in range(20):
        point = random_point(narrowed, random.Random(seed))
        assert holds(narrowed, point)
        config = registry.decode(ModelConfig, unflatten(point), vocab_size=8, train_len=8, max_len=8, d_ff=8)
        assert registry.decode(ModelConfig, registry.encode(config)) == config
        kinds.add(config.pattern.kind)
    assert kinds == {"uniform", "every_nth"}


def test_an_untouched_pattern_is_uniform() -> None:
    space = narrow(derive(ModelConfig, registry.variants), {})
    assert random_point(space, random.Random(0))["pattern.kind"] == "uniform"
