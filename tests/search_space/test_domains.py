"""Domains hold, draw and enumerate exactly what they declare."""

import math
import random

import pytest

from search_space import domains
from search_space.domains import Choice, Domain, FloatRange, IntRange

FINITE: list[Domain] = [
    Choice(options=("a", "b"), default="a"),
    Choice(options=(True, False), default=False),
    Choice(options=(1, 2.5), default=2.5),
    IntRange(low=3, high=3, default=3),
    IntRange(low=16, high=64, step=16, default=32),
    IntRange(low=1, high=9, log=True, default=2),
    FloatRange(low=0.5, high=0.5, default=0.5),
]
REAL: list[Domain] = [
    FloatRange(low=-1.0, high=2.0, default=0.0),
    FloatRange(low=1e-5, high=1e-1, log=True, default=1e-3),
]


@pytest.mark.parametrize("domain", FINITE, ids=domains.describe)
def test_a_finite_domain_enumerates_as_many_values_as_its_size_and_holds_each(domain: Domain) -> None:
    values = domains.values(domain)
    assert len(values) == domains.size(domain) == len(set(values))
    assert all(domains.contains(domain, value) for value in values)


@pytest.mark.parametrize("domain", FINITE, ids=domains.describe)
def test_draws_reach_every_value_of_a_finite_domain_and_no_other(domain: Domain) -> None:
    rng = random.Random(0)
    assert {domains.draw(domain, rng) for _ in range(400)} == set(domains.values(domain))


@pytest.mark.parametrize("domain", REAL, ids=domains.describe)
def test_draws_from_a_real_interval_stay_inside(domain: Domain) -> None:
    rng = random.Random(0)
    drawn = [domains.draw(domain, rng) for _ in range(400)]
    assert all(domains.contains(domain, value) for value in drawn)
    assert len(set(drawn)) == 400
    assert domains.size(domain) == math.inf


def test_log_draws_are_as_frequent_in_each_decade() -> None:
    domain = FloatRange(low=1e-4, high=1.0, log=True, default=1e-2)
    rng = random.Random(1)
    drawn = [float(domains.draw(domain, rng)) for _ in range(4000)]
    decades = [sum(10.0**k <= value < 10.0 ** (k + 1) for value in drawn) for k in range(-4, 0)]
    assert all(880 < count < 1120 for count in decades), decades


@pytest.mark.parametrize(
    ("domain", "value"),
    [
        (Choice(options=(1, 2), default=1), True),
        (Choice(options=(True, False), default=True), 1),
        (IntRange(low=0, high=4, default=0), True),
        (IntRange(low=0, high=4, default=0), 2.0),
        (IntRange(low=0, high=4, default=0), "2"),
        (IntRange(low=0, high=4, step=2, default=0), 3),
        (FloatRange(low=0.0, high=1.0, default=0.0), False),
        (FloatRange(low=0.0, high=1.0, default=0.0), math.nan),
        (FloatRange(low=0.0, high=1.0, default=0.0), math.inf),
        (FloatRange(low=0.0, high=1.0, default=0.0), 1.0000001),
    ],
)
def test_values_of_another_kind_or_outside_are_not_held(domain: Domain, value: domains.Scalar) -> None:
    assert not domains.contains(domain, value)


def test_a_whole_number_counts_as_a_real() -> None:
    assert domains.contains(FloatRange(low=0.0, high=2.0, default=1.0), 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Choice(options=(), default=1),
        lambda: Choice(options=(1, 2), default=3),
        lambda: Choice(options=(1, 2), default=True),
        lambda: IntRange(low=1, high=4, default=5),
        lambda: IntRange(low=1, high=4, step=2, default=1),
        lambda: IntRange(low=0, high=4, log=True, default=1),
        lambda: FloatRange(low=0.0, high=1.0, log=True, default=0.5),
        lambda: FloatRange(low=0.0, high=1.0, default=2.0),
        lambda: domains.choice(1, 2, default=1, help="", sizeing=True),
    ],
)
def test_a_contradictory_declaration_is_refused(build: object) -> None:
    assert callable(build)
    with pytest.raises(AssertionError):
        build()


def test_a_fixed_domain_has_its_only_value() -> None:
    assert domains.only_value(domains.fixed("x")) == "x"
    assert domains.only_value(IntRange(low=3, high=3, default=3)) == 3
    with pytest.raises(AssertionError, match="more than one value"):
        domains.only_value(Choice(options=(1, 2), default=1))


@pytest.mark.parametrize(
    ("domain", "words"),
    [
        (Choice(options=("a", "b"), default="a"), "one of 'a', 'b'"),
        (domains.fixed(3), "3"),
        (IntRange(low=16, high=64, step=16, default=32), "16 to 64, step 16"),
        (FloatRange(low=0.1, high=1.0, log=True, default=0.5), "0.1 to 1.0, log"),
    ],
)
def test_a_domain_is_described_in_the_words_of_a_file(domain: Domain, words: str) -> None:
    assert domains.describe(domain) == words
