"""Which points are likely to break: a classifier of the trials so far, and the veto it casts on proposals.

The classifier averages over tables: for every searched field and every pair of fields, at several resolutions, the
share of broken trials in each cell. A table's weight is its marginal likelihood (Cooper and Herskovits 1992, A Bayesian
Method for the Induction of Probabilistic Networks from Data, equation 5, with prior counts of 1/2), so a fine table
must earn its cells. Pairs see what single fields cannot, such as a rate that is too high for a depth. Failures that one
average does not explain are put to the next: causes that act each on their own are found one after another.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from runners.history import Fate, Told
from search_space import domains
from search_space.canon import seed_from
from search_space.domains import Choice, Domain, IntRange, Scalar
from search_space.space import Space, random_point, searched

MOST_VETOES = 200
"""Draws that may be vetoed for one trial; after them every draw passes."""
LIKELY, CERTAIN = 0.3, 0.75
"""Chances to break above which a draw is vetoed: for most trials, and for those that look again."""
LOOKS_AGAIN = 10
"""One trial in so many is spared all but certain vetoes, so that a failure that was bad luck is found out."""
_REFERENCE, _OPEN = 128, 8
"""Of so many random points of the space, at least so many are never vetoed."""
_RESOLUTIONS = (2, 4, 8, 16)
_MOST_FIELDS = 32
"""Fields that are paired; those that are live in most trials come first."""
_MOST_TABLES = 64
_CAUSES = 4
_EXPECTED = 0.5
_PRIOR = 0.5

Flags = NDArray[np.bool_]
Codes = NDArray[np.int64]
Chances = NDArray[np.float64]
Point = Mapping[str, Scalar]


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The chance to break in each cell of one or two fields at a resolution, and the table's share of the average."""

    resolution: int
    columns: tuple[int, ...]
    sizes: tuple[int, ...]
    weight: float
    chances: Chances


class Foresight:
    """Judges points of a space by the trials so far; what it says depends on its arguments and the seed alone."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._seed = seed
        self._domains = searched(space)

    @cached_property
    def _reference(self) -> list[dict[str, Scalar]]:
        rng = random.Random(seed_from(self._seed, "feasibility"))
        return [random_point(self._space, rng) for _ in range(_REFERENCE)]

    def veto(self, number: int, history: Sequence[Told]) -> Callable[[Point], bool]:
        """Says of a point whether trial `number` should not try it: it is likely to break, and not all others are."""
        ended = [told for told in history if told.fate is not Fate.RUNNING]
        broken = np.array([told.fate is Fate.BROKEN for told in ended], dtype=np.bool_)
        if not broken.any():
            return no_veto
        fields = self._fields([told.point for told in ended])
        causes = _causes(fields, [told.point for told in ended], broken)
        limit = CERTAIN if seed_from(self._seed, "looks again", number) % LOOKS_AGAIN == 0 else LIKELY
        floor = np.sort(_chances(causes, fields, self._reference))[_OPEN - 1]
        bound = max(limit, float(floor))
        return lambda point: float(_chances(causes, fields, [point])[0]) > bound

    def _fields(self, points: Sequence[Point]) -> dict[str, Domain]:
        """The fields worth a look: those with more than one value in the history, the most often live ones first."""
        varied = {
            path: sum(path in point for point in points)
            for path in self._domains
            if len({point.get(path) for point in points}) > 1
        }
        chosen = sorted(varied, key=lambda path: -varied[path])[:_MOST_FIELDS]
        return {path: self._domains[path] for path in chosen}


def no_veto(point: Point) -> bool:
    """Every point may be tried."""
    return False


class Vetted(Iterator[dict[str, Scalar]]):
    """The draws that are not vetoed; `vetoed` counts the others."""

    def __init__(self, draws: Iterator[dict[str, Scalar]], veto: Callable[[Point], bool]) -> None:
        self.vetoed = 0
        self._draws = draws
        self._veto = veto

    def __next__(self) -> dict[str, Scalar]:
        for point in self._draws:
            if self.vetoed >= MOST_VETOES or not self._veto(point):
                return point
            self.vetoed += 1
        raise StopIteration

    def counted(self) -> dict[str, int]:
        """The count of vetoed draws beside those of other reasons to draw again; empty for none."""
        return {"vetoed": self.vetoed} if self.vetoed else {}

    def rather(self, points: Callable[[], Iterable[dict[str, Scalar]]]) -> Iterator[dict[str, Scalar]]:
        """All points: those that are not vetoed, then the others; `points` is gone through twice."""
        yield from (point for point in points() if not self._veto(point))
        yield from (point for point in points() if self._veto(point))


def _causes(fields: Mapping[str, Domain], points: Sequence[Point], broken: Flags) -> list[list[_Table]]:
    """Averages of tables, each made from the trials that those before it do not expect to break."""
    codes = {resolution: _codes(fields, points, resolution) for resolution in _RESOLUTIONS}
    left = np.ones(len(points), dtype=np.bool_)
    found: list[list[_Table]] = []
    while len(found) < _CAUSES and broken[left].any():
        tables = _tables(fields, {resolution: code[left] for resolution, code in codes.items()}, broken[left])
        found.append(tables)
        explained = _average(tables, codes) > _EXPECTED
        if not (left & explained).any():
            break
        left &= ~explained
    return found


def _chances(causes: Sequence[Sequence[_Table]], fields: Mapping[str, Domain], points: Sequence[Point]) -> Chances:
    """How likely each point is to break: by the first cause that expects it to, else by what the last one says."""
    codes = {resolution: _codes(fields, points, resolution) for resolution in _RESOLUTIONS}
    found = np.zeros(len(points))
    for tables in causes:
        found = np.where(found > _EXPECTED, found, _average(tables, codes))
    return found


def _average(tables: Sequence[_Table], codes: Mapping[int, Codes]) -> Chances:
    total = np.zeros(len(codes[_RESOLUTIONS[0]]))
    for table in tables:
        total += table.weight * table.chances[_cells(codes[table.resolution], table.columns, table.sizes)]
    return total


def _tables(fields: Mapping[str, Domain], codes: Mapping[int, Codes], broken: Flags) -> list[_Table]:
    """The tables that weigh most; those of no field, of one and of two have the same weight before any trial."""
    found: list[tuple[float, int, tuple[int, ...], tuple[int, ...], Chances]] = []
    for resolution, code in codes.items():
        sizes = [_cell_count(domain, resolution) for domain in fields.values()]
        for order in range(3) if resolution == _RESOLUTIONS[0] else (1, 2):
            chosen = list(itertools.combinations(range(len(sizes)), order))
            prior = -math.log(max(1, len(chosen)) * (len(_RESOLUTIONS) if order else 1))
            for columns in chosen:
                shape = tuple(sizes[column] for column in columns)
                evidence, chances = _fitted(_cells(code, columns, shape), math.prod(shape), broken)
                found.append((prior + evidence, resolution, columns, shape, chances))
    found.sort(key=lambda each: -each[0])
    best = found[:_MOST_TABLES]
    weights = np.exp(np.array([each[0] for each in best]) - best[0][0])
    weights /= weights.sum()
    return [
        _Table(resolution=resolution, columns=columns, sizes=shape, weight=float(weight), chances=chances)
        for weight, (_, resolution, columns, shape, chances) in zip(weights, best, strict=True)
    ]


def _fitted(cells: Codes, count: int, broken: Flags) -> tuple[float, Chances]:
    """The logarithm of a table's marginal likelihood, and the chance to break in each of its cells."""
    bad = np.bincount(cells[broken], minlength=count)
    good = np.bincount(cells[~broken], minlength=count)
    both = bad + good
    top = int(both.max()) + 1
    half, whole = _rising(_PRIOR, top), _rising(2 * _PRIOR, top)
    return float((half[bad] + half[good] - whole[both]).sum()), (bad + _PRIOR) / (both + 2 * _PRIOR)


def _rising(start: float, count: int) -> Chances:
    """Logarithms of the rising factorials start (start + 1) ... for 0 to `count` factors."""
    return np.concatenate([[0.0], np.cumsum(np.log(start + np.arange(count)))])


def _cells(codes: Codes, columns: Sequence[int], sizes: Sequence[int]) -> Codes:
    """The number of the cell in which each row lies."""
    cell = np.zeros(len(codes), dtype=np.int64)
    for column, size in zip(columns, sizes, strict=True):
        cell = cell * size + codes[:, column]
    return cell


def _codes(fields: Mapping[str, Domain], points: Sequence[Point], resolution: int) -> Codes:
    """One row for each point, one column for each field: the share of the domain it lies in; 0 where it is not live."""
    rows = [
        [1 + _share(domain, point[path], resolution) if path in point else 0 for path, domain in fields.items()]
        for point in points
    ]
    return np.array(rows, dtype=np.int64).reshape(len(points), len(fields))


def _cell_count(domain: Domain, resolution: int) -> int:
    return 1 + (len(domain.options) if isinstance(domain, Choice) else resolution)


def _share(domain: Domain, value: Scalar, resolution: int) -> int:
    if isinstance(domain, Choice):
        return next(index for index, option in enumerate(domain.options) if domains.same(option, value))
    assert isinstance(value, int | float)
    half = domain.step / 2 if isinstance(domain, IntRange) else 0.0
    low, high, at = domain.low - half, domain.high + half, float(value)
    if domain.log:
        low, high, at = math.log(low), math.log(high), math.log(at)
    return min(max(int((at - low) / (high - low) * resolution), 0), resolution - 1)
