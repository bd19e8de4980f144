"""Trials that ended badly as a rate: with which choices, alone and two together, they did so more or less often."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from analysis.factors import FEWEST
from analysis.frame import ENDED_BADLY, PARAM, TRAINED, Search, short_path, short_value

_MOST_OPTIONS = 4
_MOST_PAIRS = 200
"""Pairs of conditions, the most lopsided first, that are tested exactly."""
_CUTS = (0.25, 0.5, 0.75)
"""Quantiles at which a range is cut; its halves are told alone, its quarters only beside another choice."""


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """How often trials that meet one or two conditions ended badly."""

    conditions: tuple[tuple[str, str], ...]
    """(path, option or part of a range) of each."""
    n: int
    counts: dict[str, int]
    """Trials by status, of those that ended badly."""
    claim: str
    """'more' or 'less' often than the other trials, or 'undecided'."""

    @property
    def path(self) -> str:
        """The path of the first condition."""
        return self.conditions[0][0]

    @property
    def option(self) -> str:
        """The option of the first condition, and the second condition."""
        return ", ".join(
            [self.conditions[0][1], *(f"{short_path(path)} {option}" for path, option in self.conditions[1:])]
        )

    @property
    def text(self) -> str:
        """For example: diverged 7 of 12 with placement post, learning_rate > 0.003."""
        counts = ", ".join(f"{status.replace('_', ' ')} {count}" for status, count in self.counts.items())
        return f"{counts} of {self.n} with {short_path(self.path)} {self.option}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**vars(self), "path": self.path, "option": self.option, "text": self.text}


@dataclass(frozen=True, kw_only=True)
class _Condition:
    path: str
    option: str
    inside: np.ndarray
    outside: np.ndarray
    alone: bool


def failure_rates(search: Search, alpha: float) -> tuple[FailureRate, ...]:
    """Options and parts of ranges with which trials ended badly more often, or surely less, most telling first.

    Two conditions are named together only where each matters among the trials that meet the other. The chance that any
    'more' or 'less' is an accident is at most alpha, were the trials drawn at random.
    """
    ended = search.trials[search.trials["status"].isin((*TRAINED, *ENDED_BADLY))]
    bad = ended["status"].isin(ENDED_BADLY).to_numpy()
    if not bad.any():
        return ()
    found = [one for path in search.varied for one in _conditions(path, ended[PARAM + path])]
    alone = [one for one in found if one.alone]
    rates: list[tuple[float, FailureRate]] = []
    for one in alone:
        hits, n = int((bad & one.inside).sum()), int(one.inside.sum())
        rest_hits, rest = int((bad & one.outside).sum()), int(one.outside.sum())
        if not hits or not rest:
            continue
        chance = fisher(hits, n, rest_hits, rest)
        decided = min(n, rest) >= FEWEST and chance < alpha / 2 / len(alone)
        more = hits * rest > rest_hits * n
        if more or decided:
            claim = "undecided" if not decided else "more" if more else "less"
            rates.append((chance, _rate(ended, bad, one.inside, (one,), claim)))
    rates += _together(ended, bad, found, alpha / 2)
    return tuple(rate for _, rate in sorted(rates, key=lambda entry: entry[0]))


def _together(
    ended: pd.DataFrame, bad: np.ndarray, found: Sequence[_Condition], alpha: float
) -> list[tuple[float, FailureRate]]:
    """The most telling pair of conditions of each pair of paths in which both matter."""
    if not found:
        return []
    inside = np.column_stack([one.inside for one in found]).astype(float)
    n = inside.T @ inside
    hits = inside.T @ (inside * bad[:, None])
    total, rows = float(bad.sum()), float(len(bad))
    allowed = np.array([[one.path < other.path for other in found] for one in found])
    allowed &= (n >= FEWEST) & (hits * rows > total * n)
    spread = np.sqrt(np.maximum(n * total * (rows - total) * (rows - n), 1e-12))
    excess = np.where(allowed, (hits * rows - total * n) / spread, -np.inf)
    level = alpha / max(int(allowed.sum()), 1)
    best: dict[tuple[str, str], tuple[float, FailureRate]] = {}
    for place in np.argsort(excess, axis=None)[::-1][:_MOST_PAIRS]:
        i, j = np.unravel_index(place, excess.shape)
        if not np.isfinite(excess[i, j]):
            break
        one, other = found[i], found[j]
        both = one.inside & other.inside
        chance = max(_against(bad, both, one.inside & other.outside), _against(bad, both, one.outside & other.inside))
        paths = (one.path, other.path)
        if chance < level and (paths not in best or chance < best[paths][0]):
            best[paths] = (chance, _rate(ended, bad, both, (one, other), "more"))
    return list(best.values())


def _against(bad: np.ndarray, inside: np.ndarray, outside: np.ndarray) -> float:
    """The p-value that trials inside end badly no more often than those outside; 1 where they do not."""
    hits, n, rest_hits, rest = (int(part.sum()) for part in (bad & inside, inside, bad & outside, outside))
    return fisher(hits, n, rest_hits, rest) if rest and hits * rest > rest_hits * n else 1.0


def _rate(
    ended: pd.DataFrame, bad: np.ndarray, inside: np.ndarray, conditions: Sequence[_Condition], claim: str
) -> FailureRate:
    seen = ended.loc[bad & inside, "status"].value_counts()
    return FailureRate(
        conditions=tuple((one.path, one.option) for one in conditions),
        n=int(inside.sum()),
        counts={str(status): int(count) for status, count in seen.items()},
        claim=claim,
    )


def _conditions(path: str, values: pd.Series) -> list[_Condition]:
    """Each option, or the parts of a range on both sides of its quartiles."""
    live = values.notna()
    seen = values[live]
    if seen.nunique() < 2:
        return []
    if seen.nunique() <= _MOST_OPTIONS or isinstance(seen.iloc[0], str | bool):
        parts = [
            (short_value(option), (live & (values == option)).to_numpy(dtype=bool), True) for option in seen.unique()
        ]
    else:
        numbers = pd.to_numeric(values).to_numpy(dtype=float)
        cuts = dict.fromkeys(np.quantile(numbers[live], _CUTS, method="nearest"))
        middle = float(np.median(numbers[live]))
        places = [(middle, True), *((float(cut), False) for cut in cuts if cut != middle)]
        parts = [(f"> {short_value(cut)}", live.to_numpy() & (numbers > cut), alone) for cut, alone in places]
        parts += [(f"≤ {short_value(cut)}", live.to_numpy() & (numbers <= cut), alone) for cut, alone in places]
    return [
        _Condition(path=path, option=option, inside=inside, outside=live.to_numpy() & ~inside, alone=alone)
        for option, inside, alone in parts
        if inside.any()
    ]


def fisher(hits: int, n: int, other_hits: int, other_n: int) -> float:
    """Two-sided p-value of Fisher's exact test that two rates are equal."""
    total = hits + other_hits
    k = np.arange(max(0, total - other_n), min(n, total) + 1)

    def log_ways(of: int, some: np.ndarray) -> np.ndarray:
        found: np.ndarray = special.gammaln(of + 1) - special.gammaln(some + 1) - special.gammaln(of - some + 1)
        return found

    ways = log_ways(n, k) + log_ways(other_n, total - k)
    here = ways[k == hits][0]
    # Equal counts of ways differ in their last digits once they are logarithms.
    return float(np.exp(ways[ways <= here + 1e-7] - special.logsumexp(ways)).sum())
