"""Rules across keys: samplers that fit their space, pruners that begin at a reading."""

import pytest
from toy_space import SMALL, faults, load

from search_space.experiment import PrunerSpec

FIXED = "model: {d_model: 64, tied: true, mixer: {softmax: {heads: 2}}, position: none, layers: %s}\n"


@pytest.mark.parametrize(
    ("model", "sampler", "words"),
    [
        (FIXED % "{low: 2, high: 8}", "gp", ""),
        (FIXED % "[2, 4]", "gp", ""),
        (FIXED % "{low: 2, high: 8}", "cmaes", ""),
        (FIXED % "[2, 4]", "cmaes", "model.layers are choices"),
        ("", "gp", "always active"),
        ("", "cmaes", "always active"),
        ("", "grid", "optimizer.adamw.learning_rate hold real intervals"),
        (FIXED % "2" + "optimizer: {adamw: {learning_rate: 1e-3}}\n", "gp", "nothing to search"),
        (FIXED % "2" + "optimizer: {adamw: {learning_rate: 1e-3}}\n", "grid", ""),
        (FIXED % "[2, 4]" + "optimizer: {adamw: {learning_rate: [1e-3, 2e-3]}}\n", "grid", ""),
        ("", "random", ""),
        ("", "tpe", ""),
    ],
)
def test_a_sampler_is_refused_where_it_does_not_fit_the_space(model: str, sampler: str, words: str) -> None:
    text = f"{SMALL}{model}search:\n  sampler: {sampler}\n"
    if not words:
        assert load(text).search.sampler == sampler
    else:
        assert words in "\n".join(faults(text))


@pytest.mark.parametrize(
    ("pruner", "expected"),
    [
        ("none", PrunerSpec()),
        ("asha", PrunerSpec(kind="asha", grace_tokens=2048)),
        ("median", PrunerSpec(kind="median", grace_tokens=2048)),
        ("{asha: {grace_tokens: 4096, factor: 4}}", PrunerSpec(kind="asha", grace_tokens=4096, factor=4)),
        ("{median: {grace_tokens: 6k}}", None),
    ],
)
def test_pruners_begin_at_a_reading(pruner: str, expected: PrunerSpec | None) -> None:
    text = f"name: p\ntask: copying\nbudget: {{tokens: 16384, eval_every: 2048}}\nsearch: {{pruner: {pruner}}}\n"
    if expected is None:
        assert "takes a multiple of budget.eval_every (2048); got 6000, write 4096 or 6144" in faults(text)[0]
    else:
        assert load(text).search.pruner == expected


def test_readings_follow_the_grace_where_the_file_gives_only_that() -> None:
    text = "name: p\ntask: copying\nbudget: {tokens: 16384}\nsearch: {pruner: {asha: {grace_tokens: 3072}}}\n"
    assert load(text).budget.eval_every == 3072


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("final: {top: 3}\n", "final.top needs a candidate to beat; name one under `baseline:`"),
        ("final: {delta: 0.01}\n", "final.top is missing, without which no candidate meets the baseline"),
        ("baseline: {model: {layers: 2}}\nfinal: {top: 6}\n", "final.top takes a whole number from 0 to 5"),
        ("baseline: {model: {layers: 2}}\nfinal: {top: 2, sweep: 4}\n", "final.sweep takes one of 0, 3, 5, 7; got 4"),
        (
            "baseline: {model: {layers: 2}}\nfinal: {top: 2, at_length: 96}\n",
            "final.at_length takes one of the task's eval_lengths",
        ),
    ],
)
def test_a_contest_needs_somebody_to_beat_and_something_to_compare(more: str, words: str) -> None:
    (fault,) = faults(SMALL + more)
    assert words in fault
