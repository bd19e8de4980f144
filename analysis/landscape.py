"""Losses over the learning rate and over pairs of choices, at equal tokens, before any adjusting."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import special

from analysis import curves
from analysis.frame import PARAM, Search, short_path, short_value
from search_space.domains import Scalar

LEVEL = 0.95
MOST_OPTIONS = 8
"""Values up to which a choice is told apart by colour."""
NOT_LIVE = "not there"
"""The option of a trial for which the choice does not exist."""
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


def options(search: Search) -> dict[str, pd.Series]:
    """The varied choices of few values by path, kinds first: each trial's value in words, by run id."""
    found: dict[str, pd.Series] = {}
    trials = search.trials.set_index("run_id")
    for path in sorted(search.varied, key=lambda path: not path.endswith(".kind")):
        values = trials[PARAM + path]
        if values.nunique() <= MOST_OPTIONS:
            found[path] = values.map(short_value, na_action="ignore").fillna(NOT_LIVE)
    return found


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
    held = {path: values.reindex(outcome.index) for path, values in options(search).items()}
    found = [_cells(one, other, held, outcome) for one, other in combinations(held, 2)]
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


def _cells(one: str, other: str, held: Mapping[str, pd.Series], outcome: pd.Series) -> Cells:
    live = (held[one] != NOT_LIVE) & (held[other] != NOT_LIVE)
    table = pd.DataFrame({"one": held[one], "other": held[other], "loss": outcome})[live]
    rows, columns = (tuple(sorted(table[side].unique(), key=_order)) for side in ("one", "other"))
    shape = (len(rows), len(columns))
    mean, width, n = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, dtype=int)
    middle = table["loss"].mean()
    for (row, column), group in table.groupby(["one", "other"])["loss"]:
        place = rows.index(str(row)), columns.index(str(column))
        n[place], mean[place] = len(group), group.mean() - middle
        if len(group) > 1:
            width[place] = special.stdtrit(len(group) - 1, (1 + LEVEL) / 2) * group.std() / len(group) ** 0.5
    return Cells(one=one, other=other, rows=rows, columns=columns, mean=mean, width=width, n=n)


def _order(value: Scalar) -> tuple[int, float, str]:
    """Numbers by size, then words."""
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, str(value)
