"""Comparisons of blocks with other people's implementations, and docs/references.md, the table of what was measured.

A test compares through the fixture `compared`, and every comparison must have its row in the table. With
ASSAY_WRITE_DOCS set (`make docs`) only the tests that compare run, and the table is written anew from what they found.
Measurements travel in test reports, so that it makes no difference how many processes run the tests.
"""

import functools
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TABLE = Path(__file__).parents[1] / "docs" / "references.md"
LIBRARIES = {
    "torch": "torch",
    "transformers": "transformers",
    "x-transformers": "x-transformers",
    "flash-linear-attention": "fla-core",
    "torchscale": "torchscale",
    "mup": "mup",
}
"""Package by the first word of a reference."""
Compare = Callable[..., None]


@dataclass(frozen=True)
class Comparison:
    """What one test measured of one block against one reference."""

    block: str
    """'family.kind'."""
    reference: str
    """Library and what of it: 'torch nn.MultiheadAttention'."""
    test: str
    error: float
    """Largest absolute difference."""
    size: float
    """Largest absolute value of the reference."""
    rtol: float
    atol: float


def writing() -> bool:
    """Whether this run writes the table."""
    return bool(os.environ.get("ASSAY_WRITE_DOCS"))


@pytest.fixture
def compared(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Compare:
    """torch.testing.assert_close(ours, theirs) for a block and a named reference, measured and recorded.

    Draws of torch are seeded before the test, so that the table comes out the same again.
    """
    torch.manual_seed(0)
    test = request.node.originalname

    def compare(
        block: str, reference: str, ours: Tensor, theirs: Tensor, *, rtol: float = 1.3e-6, atol: float = 1e-5
    ) -> None:
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        assert reference.split()[0] in LIBRARIES, f"{reference!r} begins with none of {', '.join(LIBRARIES)}"
        finite = theirs.isfinite()
        gap = largest(ours[finite].double() - theirs[finite].double())
        record_property("compared", [block, reference, test, gap, largest(theirs[finite].double()), rtol, atol])
        assert writing() or [block, reference, test] in [row[:3] for row in table_rows()], (
            f"{TABLE.name} has no row for {block} against {reference} in {test}; run `make docs` and commit the change"
        )

    return compare


def largest(values: Tensor) -> float:
    """Largest absolute value; 0 where there is none."""
    return values.detach().abs().max().item() if values.numel() else 0.0


@functools.cache
def table_rows() -> list[list[str]]:
    """The cells of each row of the table, without their code marks."""
    rows = re.findall(r"^\| `(.*) \|$", TABLE.read_text(), re.MULTILINE)
    return [[cell.strip("` ") for cell in row.split(" | ")] for row in rows]


def merged(measured: Iterable[Comparison]) -> list[Comparison]:
    """One comparison per block, reference and test: the one with the largest error, sorted."""
    worst: dict[tuple[str, str, str], Comparison] = {}
    for found in measured:
        key = (found.block, found.reference, found.test)
        if key not in worst or found.error > worst[key].error:
            worst[key] = found
    return [worst[key] for key in sorted(worst)]


def page(measured: Iterable[Comparison]) -> str:
    """docs/references.md."""
    versions = ", ".join(f"{name} {version(package).split('+')[0]}" for name, package in LIBRARIES.items())
    lines = [
        "# Blocks against published implementations",
        "",
        "Written by `make docs`, which runs every test that compares a block with somebody else's code on the same",
        "weights and inputs. *Error* is the largest absolute difference over all cases of the test, *size* the largest",
        "absolute value of the reference in that case; beyond absolute tolerance + relative tolerance x value a test",
        "fails.",
        "",
        f"Measured with {versions}, on a CPU.",
        "",
        "| block | reference | test | error | size | absolute tolerance | relative tolerance |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in merged(measured):
        numbers = f"{row.error:.1e} | {row.size:.2g} | {row.atol:g} | {row.rtol:g}"
        lines.append(f"| `{row.block}` | {row.reference} | `{row.test}` | {numbers} |")
    return "\n".join(lines) + "\n"


class Recorder:
    """Pytest plugin of the process that sees every report: keeps what was compared, and writes the table at the end."""

    def __init__(self) -> None:
        self.measured: list[Comparison] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        compare = [item for item in items if "compared" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in compare])
        items[:] = compare

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            values: list[Any] = [value for name, value in report.user_properties if name == "compared"]
            self.measured += [Comparison(*value) for value in values]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == 0 and "PYTEST_XDIST_WORKER" not in os.environ:
            TABLE.write_text(page(self.measured))


def pytest_configure(config: pytest.Config) -> None:
    """With ASSAY_WRITE_DOCS set, run what compares and write the table."""
    if writing():
        config.pluginmanager.register(Recorder())
