"""Which groups of columns a mixed model needs beside its free ones.

Each group of columns that may matter or not is a random effect whose variance is found by restricted maximum likelihood
(Patterson & Thompson 1971, "Recovery of inter-block information when block sizes are unequal"), group by group as in
Tipping & Faul (2003, "Fast marginal likelihood maximisation for sparse Bayesian models"). A group without support in
the data gets variance zero and costs nothing; one that is kept widens the intervals by what is not known of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

_TINY = 1e-9
_RATIOS = np.logspace(-3, 5, 49)
"""Variances tried for a group, relative to what one residual variance would explain of it."""
_SWEEPS = 4
_WINDOW = 3.0
"""A set of groups is a rival while its log-likelihood, less prices, is this near to that of the kept one."""
_MOST_KEPT = 0.5
"""Columns of kept groups, at most, as a share of the rows that the free columns leave."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Groups of columns that may be drawn beside free ones, each with the rise of the likelihood it has to be worth."""

    free: np.ndarray
    columns: Sequence[np.ndarray]
    outcome: np.ndarray
    prices: Sequence[float]

    @property
    def rows(self) -> int:
        """Rows less free columns."""
        return len(self.outcome) - self.free.shape[1]

    @cached_property
    def places(self) -> list[np.ndarray]:
        """Where each group's columns are in `gram`."""
        ends = np.cumsum([0, *(group.shape[1] for group in self.columns)])
        return [np.arange(low, high) for low, high in pairwise(ends)]

    @cached_property
    def _whole(self) -> np.ndarray:
        return np.hstack([*self.columns, self.outcome[:, None]])

    @cached_property
    def gram(self) -> np.ndarray:
        """Products of all columns, the outcome last, less what the free columns explain."""
        basis = np.linalg.qr(self.free)[0]
        rest = self._whole - basis @ (basis.T @ self._whole)
        found: np.ndarray = rest.T @ rest
        return found

    @cached_property
    def _fresh(self) -> list[bool]:
        """Whether a group adds to the free columns at all."""
        size = np.linalg.norm(self._whole, axis=0)
        return [bool((self.gram.diagonal()[place] > _TINY * size[place] ** 2).all()) for place in self.places]

    def worth(self, kept: Mapping[int, float]) -> dict[int, tuple[float, float]]:
        """For each group that may be added: what it is worth above its price, and its variance ratio."""
        width = sum(len(self.places[held]) for held in kept)
        found = {}
        for place, own in enumerate(self.places):
            if place not in kept and self._fresh[place] and width + len(own) <= _MOST_KEPT * self.rows:
                gain, ratio = _gain(self.gram, self.places, kept, place, self.rows)
                found[place] = (gain - self.prices[place], ratio)
        return found

    def supported(self) -> dict[int, float]:
        """The groups that the data supports, with the variance ratio of each: those that are worth their price."""
        kept: dict[int, float] = {}
        while True:
            found = self.worth(kept)
            best = max(found, key=lambda place: found[place][0], default=None)
            if best is None or found[best][0] <= 0:
                return kept
            kept[best] = found[best][1]
            _settle(self.gram, self.places, kept, self.rows, self.prices)

    def rivals(self, kept: Mapping[int, float]) -> list[tuple[float, dict[int, float]]]:
        """Sets that the data can hardly tell from the kept one, with their odds against it: a priced group more, less,
        or another in its place. A price is the log of the prior odds against a group.

        They lie in Occam's window (Madigan & Raftery 1994, "Model selection and accounting for model uncertainty in
        graphical models using Occam's window").
        """
        found = self._with_one_more(kept)
        for less in (place for place in kept if self.prices[place] > 0):
            rest = {place: ratio for place, ratio in kept.items() if place != less}
            own = _gain(self.gram, self.places, rest, less, self.rows)[0] - self.prices[less]
            others = [(worth, other) for worth, other in self._with_one_more(rest) if less not in other]
            found += [(worth - own, other) for worth, other in [(0.0, rest), *others]]
        return [(float(np.exp(worth)), other) for worth, other in found if worth > -_WINDOW]

    def _with_one_more(self, kept: Mapping[int, float]) -> list[tuple[float, dict[int, float]]]:
        """The set with each priced group that it lacks, and what that is worth above its price."""
        found = self.worth(kept).items()
        return [(worth, {**kept, place: ratio}) for place, (worth, ratio) in found if self.prices[place] > 0]


def _settle(
    gram: np.ndarray, places: Sequence[np.ndarray], kept: dict[int, float], rows: int, prices: Sequence[float]
) -> None:
    """Find each kept group's variance anew, the others given; a group that has become dear is left out."""
    for _ in range(_SWEEPS):
        moved = False
        for place in list(kept):
            before = kept.pop(place)
            gain, ratio = _gain(gram, places, kept, place, rows)
            held = gain > prices[place]
            if held:
                kept[place] = ratio
            moved = moved or not held or abs(np.log(ratio / before)) > np.log(_RATIOS[1] / _RATIOS[0]) / 2
        if not moved:
            return


def _gain(
    gram: np.ndarray, places: Sequence[np.ndarray], kept: Mapping[int, float], place: int, rows: int
) -> tuple[float, float]:
    """Rise of the restricted log-likelihood at the group's best variance ratio, and that ratio."""
    own = np.append(places[place], gram.shape[0] - 1)
    part = gram[np.ix_(own, own)]
    if kept:
        held = np.concatenate([places[other] for other in kept])
        penalty = np.concatenate([np.full(len(places[other]), 1 / ratio) for other, ratio in kept.items()])
        cross = gram[np.ix_(held, own)]
        part = part - cross.T @ np.linalg.solve(gram[np.ix_(held, held)] + np.diag(penalty), cross)
    strengths, directions = np.linalg.eigh(part[:-1, :-1])
    strengths = np.maximum(strengths, 0.0)
    pulls = (directions.T @ part[:-1, -1]) ** 2
    total = max(float(part[-1, -1]), _TINY * float(gram[-1, -1]))
    middle = float(strengths.mean())
    if middle <= 0 or total <= 0:
        return 0.0, 1.0
    ratios = _RATIOS / middle
    shrunk = 1 + ratios[:, None] * strengths
    explained = (ratios[:, None] * pulls / shrunk).sum(axis=1)
    left = np.maximum(total - explained, _TINY * total)
    likelihood = -0.5 * np.log(shrunk).sum(axis=1) - 0.5 * rows * np.log(left / total)
    best = int(likelihood.argmax())
    return float(likelihood[best]), float(ratios[best])
