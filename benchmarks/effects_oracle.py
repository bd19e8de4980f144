"""Least squares that is told which effects there are: the yardstick of benchmarks/effects.py.

With normal noise its variances are the bound of Cramér and Rao for all unbiased estimates from the same trials (the
likelihood is the same whether a sampler chose them in view of earlier losses or not). What separates an estimate from
these is what it takes to find out what is there.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from analysis.factors import FEWEST, Factor, Level, crossed

Informed = tuple[tuple[Factor, ...], tuple[Level, ...], float, float]
"""The factors and levels of an effect, one each or two; its estimate and the deviation of that, of noise of 1."""


def informed(factors: Sequence[Factor], pairs: Sequence[tuple[str, str]], losses: np.ndarray) -> Iterator[Informed]:
    """Every main effect of the factors, and every interaction of the pairs of paths, where trials are enough."""
    by_path = {entry.path: entry for entry in factors}
    terms: list[tuple[Factor, ...]] = [(entry,) for entry in factors]
    terms += [(by_path[one], by_path[other]) for one, other in pairs if {one, other} <= by_path.keys()]
    blocks = [_columns(term) for term in terms]
    design = np.column_stack([np.ones(len(losses)), *blocks])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return
    inverse = np.linalg.inv(design.T @ design)
    found = inverse @ (design.T @ losses)
    first = 1
    for term, block in zip(terms, blocks, strict=True):
        part = slice(first, first + block.shape[1])
        first = part.stop
        for levels, weights in _levels(term):
            deviation = float(weights @ inverse[part, part] @ weights) ** 0.5
            yield term, levels, float(weights @ found[part]), deviation


def _columns(term: tuple[Factor, ...]) -> np.ndarray:
    if len(term) == 1:
        return term[0].columns
    columns = crossed(*term)
    assert columns is not None, f"{term[0].path} and {term[1].path} never meet"
    return columns


def _levels(term: tuple[Factor, ...]) -> Iterator[tuple[tuple[Level, ...], np.ndarray]]:
    """The levels, or pairs of levels, that enough trials hold, with their weights."""
    if len(term) == 1:
        yield from (((level,), level.weights) for level in term[0].levels if level.enough)
        return
    for one in term[0].levels:
        for other in term[1].levels:
            sides = [(a, b) for a in (one.inside, one.outside) for b in (other.inside, other.outside)]
            if min(int((a & b).sum()) for a, b in sides) >= FEWEST:
                yield (one, other), np.kron(one.weights, other.weights)
