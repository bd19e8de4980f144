"""Shape annotations of blocks are checked while tests run; small models are made from a few changed paths.

With ASSAY_REFUSE_SKIPS set, a test that is skipped for want of anything but a CUDA device counts as failed.
"""

import os
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

import pytest
import shape_checks
from reference_table import compared, pytest_configure

__all__ = ["compared", "pytest_configure"]

shape_checks.install("blocks")

if TYPE_CHECKING:
    from blocks.model import ModelConfig

SMALL = {"d_model": 32, "layers": 2, "kv_heads": 2, "queries_per_kv": 2, "head_dim": 8}
"""Values that keep a model small, by the last part of a path, where the path's domain holds them."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("ASSAY_REFUSE_SKIPS") and "CUDA" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr}; no skip is accepted here"
    return report


@pytest.fixture(scope="session")
def small() -> "Callable[..., ModelConfig]":
    """Makes a small ModelConfig whose paths are at their defaults but for the changes given.

    A changed path that is not live is an error, so that no test runs on another model than it names.
    """
    from blocks import registry
    from blocks.model import ModelConfig
    from search_space import domains
    from search_space.canon import unflatten
    from search_space.space import derive, walk

    space = derive(ModelConfig, registry.variants)

    def make(
        changes: Mapping[str, domains.Scalar] | None = None,
        *,
        vocab_size: int = 48,
        train_len: int = 40,
        max_len: int = 40,
        d_ff: int = 40,
    ) -> ModelConfig:
        changes = changes or {}

        def ask(path: str, domain: domains.Domain) -> domains.Scalar:
            if path in changes:
                return changes[path]
            value = SMALL.get(path.rpartition(".")[2], domain.default)
            return value if domains.contains(domain, value) else domain.default

        point = walk(space, ask)
        assert changes.keys() <= point.keys(), f"not live: {sorted(changes.keys() - point.keys())}"
        return registry.decode(
            ModelConfig, unflatten(point), vocab_size=vocab_size, train_len=train_len, max_len=max_len, d_ff=d_ff
        )

    return make
