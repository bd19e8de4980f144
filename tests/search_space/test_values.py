"""Single values: sizes with units, bounds, names."""

import math
from typing import Any

import pytest

from search_space import values


@pytest.mark.parametrize(
    ("written", "number"),
    [
        (200, 200),
        (1e6, 1_000_000),
        ("130k", 130_000),
        ("130K", 130_000),
        ("1M", 1_000_000),
        ("2.5M", 2_500_000),
        ("1B", 10**9),
        ("0.5T", 5 * 10**11),
        ("64KiB", 65_536),
        ("4MiB", 4_194_304),
        ("1.5GiB", 1_610_612_736),
        ("3 M", 3_000_000),
    ],
)
def test_counts_take_units(written: Any, number: int) -> None:
    assert values.count()(written) == number
    assert type(values.count()(written)) is int


@pytest.mark.parametrize(
    "written",
    ["", "M", "1m", "1kb", "1.0001k", "-1k", "1e3k", "१k", 1.5, math.nan, math.inf, True, None, [], {}, "9" * 99 + "k"],
)
def test_what_is_no_whole_number_is_no_count(written: Any) -> None:
    with pytest.raises(ValueError, match="takes a whole number"):
        values.count()(written)


def test_counts_and_reals_keep_their_bounds() -> None:
    with pytest.raises(ValueError, match="from 2 to 5; got 6"):
        values.count(low=2, high=5)(6)
    with pytest.raises(ValueError, match="from 1 up; got 0"):
        values.count()(0)
    assert values.real()(3) == 3.0
    for wrong in (-1, math.inf, math.nan, True, "1"):
        with pytest.raises(ValueError, match=r"takes a number from 0\.0"):
            values.real()(wrong)
    with pytest.raises(ValueError, match=r"above 0\.0"):
        values.real(above=True)(0)


@pytest.mark.parametrize("name", ["a", "A1", "my-run_2.b", "0", "x" * 64])
def test_names_that_can_be_file_names_are_taken(name: str) -> None:
    assert values.name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "a/b", "../a", "a b", "ä", "x" * 65, "a\n", 3, None])
def test_names_that_cannot_be_file_names_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="takes a name of letters"):
        values.name(name)


def test_a_fault_in_a_list_knows_its_entry() -> None:
    parse = values.many(values.count())
    assert parse([1, "2k"]) == (1, 2000)
    assert parse(7) == (7,)
    for wrong, item in (([1, "x"], 1), ([3, 4, 3], 2)):
        with pytest.raises(values.BadItem) as caught:
            parse(wrong)
        assert caught.value.item == item


def test_an_unknown_option_is_answered_with_near_ones() -> None:
    with pytest.raises(ValueError, match="did you mean 'random'"):
        values.one_of("sampler", ("random", "tpe"))("randm")
