"""The registry: registration, near misses, round trips, identities."""

import dataclasses
import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import nn

from blocks import registry
from blocks.families import AbstractFFN, AbstractMixer, AbstractNorm, AbstractPattern
from blocks.model import ModelConfig
from search_space.domains import choice

Make = Callable[..., ModelConfig]

GOLDEN = {
    (): "38c70a92aca3",
    (("mixer.softmax.kv_heads", 1), ("tied", False)): "268ce40a3a96",
    (("norm.kind", "layernorm"), ("placement.kind", "post"), ("init.kind", "xavier")): "9f506590baef",
    (("ffn.kind", "gelu"), ("position.kind", "none")): "aa76233b3ca7",
}
"""Ids are in databases: a change here orphans every stored run."""


@pytest.mark.parametrize("changes", GOLDEN, ids=str)
def test_ids_never_change(small: Make, changes: tuple[tuple[str, object], ...]) -> None:
    assert registry.config_id(small(dict(changes)).canonical()) == GOLDEN[changes]


def test_sizing_fields_are_no_part_of_the_identity(small: Make) -> None:
    narrow, wide = small({"ffn.swiglu.expansion": 2.0}), small({"ffn.swiglu.expansion": 4.0})
    assert narrow != wide
    assert registry.config_id(narrow) == registry.config_id(wide)


def test_variants_come_in_alphabetical_order() -> None:
    assert list(registry.variants(AbstractNorm)) == ["derf", "dyt", "layernorm", "rmsnorm", "scalenorm"]
    assert list(registry.variants(AbstractPattern)) == ["every_nth", "uniform"]


def test_lookup_of_a_misspelt_kind_lists_near_matches() -> None:
    with pytest.raises(ValueError, match="did you mean 'swiglu'"):
        registry.lookup(AbstractFFN, "swigul")


def test_a_taken_kind_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twin(AbstractNorm):
        """Another norm under a taken name."""

        kind: ClassVar[str] = "rmsnorm"
        paper: ClassVar[str] = "none"

        def build(self, width: int) -> nn.Module:
            return nn.Identity()

    with pytest.raises(
        ValueError, match=r"kind 'rmsnorm' of AbstractNorm is taken by blocks\.norms\.standard\.RMSNormConfig"
    ):
        registry.register(Twin)


def test_a_variant_without_paper_or_meaning_is_refused() -> None:
    class Bare(AbstractNorm):
        kind: ClassVar[str] = "bare"

        def build(self, width: int) -> nn.Module:
            return nn.Identity()

    with pytest.raises(ValueError, match="has no paper or no docstring"):
        registry.register(Bare)


def test_decode_refuses_unknown_and_missing_fields(small: Make) -> None:
    plain = registry.encode(small())
    with pytest.raises(ValueError, match=r"ModelConfig\.dmodel is no known field; did you mean 'd_model'"):
        registry.decode(ModelConfig, {**plain, "dmodel": 32})
    del plain["ffn"]
    with pytest.raises(ValueError, match="ModelConfig lacks ffn"):
        registry.decode(ModelConfig, plain)


def test_a_field_added_later_leaves_old_ids_alone() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Before:
        width: int = choice(8, 16, default=8, help="width")

    @dataclass(frozen=True, kw_only=True)
    class After:
        width: int = choice(8, 16, default=8, help="width")
        bias: bool = choice(True, False, default=False, help="bias", neutral=False)

    assert registry.config_id(After(width=16)) == registry.config_id(Before(width=16))
    assert registry.config_id(After(width=16, bias=True)) != registry.config_id(Before(width=16))


def test_every_field_and_variant_explains_itself() -> None:
    for entry in dataclasses.fields(ModelConfig):
        marks = entry.metadata
        if "family" not in marks:
            continue
        assert marks["help"]
        for kind, variant in registry.variants(marks["family"]).items():
            assert (variant.__doc__ or "").strip(), kind
            assert variant.paper, kind
            for field in dataclasses.fields(variant):
                help_text = field.metadata["help"] if "family" in field.metadata else field.metadata["domain"].help
                assert help_text, f"{kind}.{field.name}"


def test_configs_cross_a_process_border_unchanged(small: Make) -> None:
    config = small({"pattern.kind": "every_nth"})
    assert pickle.loads(pickle.dumps(config)) == config
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(registry.encode, (config,)) == registry.encode(config)
        assert list(pool.apply(registry.variants, (AbstractMixer,))) == list(registry.variants(AbstractMixer))
