"""What is legal but doubtful is told in words; what is not doubtful is not."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from blocks.cautions import cautions
from blocks.families import Hook
from blocks.model import ModelConfig
from blocks.positions.t5_bias import T5Bias

Make = Callable[..., ModelConfig]


def only(config: ModelConfig, *words: str) -> str:
    """The one caution of a config, which holds all of the words."""
    (caution,) = cautions(config)
    for word in words:
        assert word in caution, caution
    return caution


@dataclass(frozen=True, kw_only=True)
class TurnedBias(T5Bias):
    """A scheme that biases logits and says that it rotates as well."""

    kind: ClassVar[str] = "turned_bias"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.SCORE_BIAS, Hook.ROTATE})


def test_the_usual_models_need_no_caution(small: Make) -> None:
    for changes in ({}, {"position.kind": "t5_bias"}, {"placement.kind": "post"}, {"position.kind": "none"}):
        assert cautions(small(changes)) == ()


def test_a_scheme_that_rotates_and_biases_cannot_tell_which_of_them_helped(small: Make) -> None:
    only(dataclasses.replace(small(), position=TurnedBias()), "'turned_bias'", "one of them alone")


@pytest.mark.parametrize("placement", ["post", "deepnorm", "hybridnorm", "mix_ln"])
def test_a_norm_without_statistics_cannot_keep_the_scale_of_the_stream(small: Make, placement: str) -> None:
    deep = {"placement.kind": placement, "layers": 4}
    only(small({"norm.kind": "dyt", **deep}), "'dyt'", f"'{placement}'", "rmsnorm", "pre")
    assert cautions(small({"norm.kind": "scalenorm", **deep})) == ()


@pytest.mark.parametrize("placement", ["pre", "peri", "ngpt", "parallel"])
def test_it_may_stand_on_branches(small: Make, placement: str) -> None:
    assert cautions(small({"norm.kind": "dyt", "placement.kind": placement})) == ()


BARE = {"init.kind": "mup", "norm.rmsnorm.gain": False}


@pytest.mark.parametrize("norm", ["l2", "rms", "layer"])
def test_norms_of_queries_undo_the_scale_of_logits_under_maximal_update(small: Make, norm: str) -> None:
    assert cautions(small(BARE)) == ()
    only(small({**BARE, "mixer.softmax.qk_norm": norm}), "'mup'", "'softmax'", "1 / head_dim", "sqrt(head_dim)")
    assert cautions(small({"mixer.softmax.qk_norm": norm})) == ()


def test_a_placement_that_norms_queries_undoes_it_too(small: Make) -> None:
    only(small({**BARE, "placement.kind": "hybridnorm"}), "'mup'", "'hybridnorm'", "1 / head_dim")


def test_mixers_without_logits_have_none_to_scale(small: Make) -> None:
    assert cautions(small({**BARE, "mixer.kind": "cosformer", "position.kind": "none"})) == ()


@pytest.mark.parametrize("init", ["mup", "complete_p"])
def test_trained_gains_weaken_rules_of_learning_rates_by_width(small: Make, init: str) -> None:
    only(small({"init.kind": init}), f"'{init}'", "'rmsnorm'", "gain to false")
    assert cautions(small({"init.kind": init, "norm.kind": "scalenorm"})) == ()
    assert cautions(small({"init.kind": init, "placement.kind": "rezero"})) == ()


def test_windows_in_all_layers_reach_so_far_without_positions(small: Make) -> None:
    window = {"mixer.kind": "sliding_window", "mixer.sliding_window.window": 8, "layers": 3}
    only(small({**window, "position.kind": "none"}), "'none'", "3 layers", "22 tokens", "model.pattern")
    for position in ("rotary", "alibi", "sinusoidal"):
        assert cautions(small({**window, "position.kind": position})) == ()
    assert cautions(small({**window, "mixer.sliding_window.window": 64, "position.kind": "none"})) == ()
    mixed = {"pattern.kind": "every_nth", "pattern.every_nth.every": 3, "pattern.every_nth.mixer.kind": "softmax"}
    assert cautions(small({**window, **mixed, "position.kind": "none"})) == ()
    blocks = {"mixer.kind": "block_local", "mixer.block_local.block": 8, "mixer.block_local.earlier": 1}
    only(small({**blocks, "position.kind": "none"}), "2 layers", "31 tokens")


def test_the_stated_reach_is_that_of_the_model(small: Make) -> None:
    config = small(
        {"mixer.kind": "sliding_window", "mixer.sliding_window.window": 8, "position.kind": "none", "layers": 3}
    )
    assert "22 tokens" in only(config)
    model = config.build(seed=0).eval()
    tokens = torch.arange(40)[None] % 48
    with torch.no_grad():
        last = model(tokens)[0][:, -1]
        for back, changes in ((21, True), (22, False)):
            other = tokens.clone()
            other[:, -1 - back] += 1
            assert bool((model(other)[0][:, -1] != last).any()) == changes
