"""Losses over the learning rate and over pairs of choices, at equal tokens, before any adjusting."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import special

from analysis import curves
from analysis.frame import NOT_LIVE, Search, short_path
from search_space.domains import Scalar

LEVEL = 0.95
_RATE = ".learning_rate"
_FEWEST_FIT = 6
"""Trials from which a curve is laid through losses over the rate."""
_PLACES = 25


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Trials by two choices; NaN where there is none, or no interval."""

    one: str
    other: str
    """Paths."""
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    mean: np.ndarray
    """Mean loss of the cell minus that of all its trials: [rows, columns]."""
    width: np.ndarray
    """Half the 95 % interval of the mean of the cell."""
    n: np.ndarray

    @property
    def name(self) -> str:
        """The two choices, as people say them."""
        return f"{short_path(self.one)} × {short_path(self.other)}"


def rates(search: Search) -> list[str]:
    """Paths of the learning rates that varied."""
    return [path for path in search.varied if path.endswith(_RATE)]


def losses(search: Search) -> tuple[pd.Series, int]:
    """Loss of trained trials by run id, at the last token count that nearly all of them reached; that count."""
    tokens = curves.common_tokens(search)
    return curves.loss_at(search, tokens), tokens


def rate_fits(places: pd.Series, outcome: pd.Series, groups: pd.Series) -> dict[str, list[tuple[float, ...]]]:
    """For each group of enough trials a parabola over the logarithm of the rate: (rate, loss, low, high), pointwise.

    Groups whose trials do not bear one, or in which it has no lowest place, have none.
    """
    found: dict[str, list[tuple[float, ...]]] = {}
    held = pd.DataFrame({"rate": places, "loss": outcome, "group": groups}).dropna()
    for name, group in held.groupby("group"):
        x = np.log(group["rate"].to_numpy(dtype=float))
        if len(group) < _FEWEST_FIT or len(np.unique(x)) < _FEWEST_FIT:
            continue
        y, middle, size = group["loss"].to_numpy(dtype=float), x.mean(), np.ptp(x)
        design = _parabola((x - middle) / size)
        inverse = np.linalg.inv(design.T @ design)
        coefficients = inverse @ design.T @ y
        if coefficients[2] <= 0:
            continue
        degrees = len(y) - design.shape[1]
        deviation = float(((y - design @ coefficients) ** 2).sum() / degrees) ** 0.5
        at = np.linspace(x.min(), x.max(), _PLACES)
        rows = _parabola((at - middle) / size)
        wide = special.stdtrit(degrees, (1 + LEVEL) / 2) * deviation * np.sqrt((rows @ inverse * rows).sum(axis=1))
        fitted = rows @ coefficients
        found[str(name)] = list(zip(np.exp(at), fitted, fitted - wide, fitted + wide, strict=True))
    return found


def pairs(search: Search, most: int = 21) -> list[Cells]:
    """The choices of few values two at a time, those that share most trials first."""
    outcome, _ = losses(search)
    held = {path: _coded(values.reindex(outcome.index)) for path, values in search.options.items()}
    found = [_cells(one, other, held, outcome.to_numpy()) for one, other in combinations(held, 2)]
    whole = [cells for cells in found if min(cells.n.shape) > 1]
    return sorted(whole, key=lambda cells: -int(np.minimum(cells.n, 3).sum() + cells.n.sum()))[:most]


def share_interval(hits: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share: the score interval of Wilson (1927, "Probable inference", p. 209)."""
    z = float(special.ndtri((1 + LEVEL) / 2))
    middle, scale = (hits + z * z / 2) / (n + z * z), n + z * z
    width = z * np.sqrt(hits * (n - hits) / n + z * z / 4) / scale
    return max(0.0, float(middle - width)), min(1.0, float(middle + width))


def seed_width(spread: float, degrees: int) -> float:
    """Half the 95 % interval of what one seed gives, from the deviation between seeds; 0 where it is not known."""
    return float(special.stdtrit(degrees, (1 + LEVEL) / 2)) * spread if degrees else 0.0


def _parabola(x: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones_like(x), x, x * x])


def _coded(values: pd.Series) -> tuple[tuple[str, ...], np.ndarray]:
    """The options in order, and each trial's place among them; -1 where the choice is not live."""
    names = tuple(sorted((str(name) for name in values.unique() if name != NOT_LIVE), key=_order))
    return names, pd.Index(names).get_indexer(pd.Index(values))


def _cells(one: str, other: str, held: Mapping[str, tuple[tuple[str, ...], np.ndarray]], outcome: np.ndarray) -> Cells:
    (rows, across), (columns, along) = held[one], held[other]
    live = (across >= 0) & (along >= 0)
    rows, across = _present(rows, across[live])
    columns, along = _present(columns, along[live])
    size, losses = len(rows) * len(columns), outcome[live]
    places = across * len(columns) + along
    n = np.bincount(places, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        level = np.bincount(places, losses, size) / n
        squares = np.bincount(places, (losses - level[places]) ** 2, size)
        width = special.stdtrit(n - 1.0, (1 + LEVEL) / 2) * np.sqrt(squares / (n - 1) / n)
    mean = level - losses.mean() if len(losses) else level
    mean, width = np.where(n > 0, mean, np.nan), np.where(n > 1, width, np.nan)
    shape = (len(rows), len(columns))
    return Cells(
        one=one,
        other=other,
        rows=rows,
        columns=columns,
        mean=mean.reshape(shape),
        width=width.reshape(shape),
        n=n.reshape(shape),
    )


def _present(names: tuple[str, ...], places: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """The options that occur, and each trial's place among those."""
    seen, again = np.unique(places, return_inverse=True)
    return tuple(names[place] for place in seen), again


def _order(value: Scalar) -> tuple[int, float, str]:
    """Numbers by size, then words."""
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, str(value)
