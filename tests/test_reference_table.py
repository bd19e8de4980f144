"""docs/references.md has a row for every comparison that the tests make, and none besides."""

import ast
from pathlib import Path

import pytest
import torch
from reference_table import Compare, Comparison, merged, page, table_rows

from runners.blocktable import FAMILIES

BLOCKS = Path(__file__).parent / "blocks"


def comparing_tests() -> set[str]:
    """Names of the tests that ask for the fixture."""
    return {
        node.name
        for file in BLOCKS.glob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and "compared" in [argument.arg for argument in node.args.args]
    }


def test_the_committed_table_has_the_tests_that_compare_and_no_other() -> None:
    assert {row[2] for row in table_rows()} == comparing_tests(), "run `make docs` and commit the change"


def test_rows_name_blocks_and_stay_within_their_tolerance() -> None:
    for block, _, test, error, size, atol, rtol in table_rows():
        assert block.split(".")[0] in FAMILIES, test
        assert float(error) <= float(atol) + float(rtol) * float(size), test


def test_a_comparison_without_a_row_fails(compared: Compare) -> None:
    x = torch.ones(3)
    with pytest.raises(AssertionError, match=r"no row for mixer\.softmax against torch nothing"):
        compared("mixer.softmax", "torch nothing", x, x)


def test_values_apart_fail(compared: Compare) -> None:
    with pytest.raises(AssertionError, match="not close"):
        compared("mixer.softmax", "torch nn.MultiheadAttention", torch.ones(3), torch.ones(3) + 1e-3)


def test_a_row_holds_the_largest_error_of_its_cases() -> None:
    cases = [Comparison("mixer.linear", "torch x", "test_x", error, 1.0, 1e-5, 1e-5) for error in (1e-7, 3e-6, 2e-6)]
    (row,) = merged(cases)
    assert row.error == 3e-6
    assert "| `mixer.linear` | torch x | `test_x` | 3.0e-06 | 1 | 1e-05 | 1e-05 |" in page(cases)
