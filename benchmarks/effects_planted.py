"""Simulated searches whose effects are known, drawn by the sampler that real searches use.

Effects are planted as they are reported: a main effect is the difference between two options, averaged over the other
choices; an interaction is the difference between two such differences. Analysis of variance often gives deviations that
sum to zero instead, which for two options each are a half of the one and a quarter of the other.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analysis.frame import PARAM
from runners.history import Fate, Told, select
from runners.samplers import sampler_of
from search_space.domains import Choice, FloatRange, Scalar
from search_space.space import OneOf, Space

OPTIONS = ("a", "b", "c")
KIND = "model.mixer.kind"
HEADS = "model.mixer.x.heads"
WINDOW = "model.mixer.y.window"
RATE = "optimizer.adamw.learning_rate"
PATHS = (*(f"model.c{place}" for place in range(6)), KIND, HEADS, WINDOW, RATE)
PEAK = 3e-3
RUNGS = (1, 2, 4)
"""Token counts at which half of the trials are stopped."""
BUDGET = 8
SHARES = np.array([0.6, 0.75, 0.9, 1.0])
"""How much of an effect shows at each rung and at the end."""
START = 40.0
SEED_NOISE = 0.9
LEAST = 2.5
"""Noise deviations from which an effect must be estimated well."""
MOST = 6.0


def planted_space() -> Space:
    """Six plain choices, a family with conditional fields on two of its three variants, and a learning rate."""
    plain = {f"c{place}": Choice(options=OPTIONS[: 2 + place % 2], default="a") for place in range(6)}
    mixers = {
        "x": Space(fields={"heads": Choice(options=(1, 2), default=1)}),
        "y": Space(fields={"window": Choice(options=(8, 16, 32), default=8)}),
        "z": Space(fields={}),
    }
    rate = FloatRange(low=1e-4, high=1e-1, default=1e-3, log=True)
    return Space(
        fields={
            "model": Space(fields={**plain, "mixer": OneOf(variants=mixers, default="x")}),
            "optimizer": OneOf(variants={"adamw": Space(fields={"learning_rate": rate})}, default="adamw"),
        }
    )


@dataclass(frozen=True, kw_only=True)
class Planted:
    """True worths in noise deviations."""

    worth: dict[str, dict[Scalar, float]]
    pairs: dict[tuple[str, str], np.ndarray]
    """Worth of two options together, by their places; rows and columns sum to zero."""
    bend: float = 0.5
    """Worth of one squared doubling of the learning rate from its peak."""

    def loss(self, point: dict[str, Scalar]) -> float:
        """The loss without noise."""
        total = sum(values[point[path]] for path, values in self.worth.items() if path in point)
        for (one, other), table in self.pairs.items():
            places = [list(self.worth[path]).index(point[path]) for path in (one, other)]
            total += float(table[places[0], places[1]])
        return total + self.bend * float(np.log2(float(point[RATE]) / PEAK)) ** 2

    @cached_property
    def inner(self) -> dict[str, float]:
        """Mean worth of the fields below each variant of the mixer, each option counting alike."""
        found = {"x": HEADS, "y": WINDOW}
        return {kind: float(np.mean(list(self.worth[path].values()))) for kind, path in found.items()} | {"z": 0.0}

    def main(self, path: str, option: str, reference: str) -> float:
        """The true difference of two options, averaged over the space."""
        values = {str(key): value for key, value in self.worth[path].items()}
        below = self.inner if path == KIND else {}
        return values[option] + below.get(option, 0.0) - values[reference] - below.get(reference, 0.0)

    def pair(self, paths: tuple[str, str], options: tuple[str, str], references: tuple[str, str]) -> float:
        """The true difference of differences."""
        table = self.pairs.get(paths)
        if table is None:
            return 0.0
        keys = [[str(key) for key in self.worth[path]] for path in paths]
        a, b = (names.index(option) for names, option in zip(keys, options, strict=True))
        c, d = (names.index(option) for names, option in zip(keys, references, strict=True))
        return float(table[a, b] - table[a, d] - table[c, b] + table[c, d])


def plant(rng: np.random.Generator, *, deviations: bool = False) -> Planted:
    """Effects of four of six choices, of a variant and of a field below another one, and one interaction.

    Every difference between two options is either 0 or at least LEAST, but that between the variants x and y.
    """
    least, most = (2 * LEAST, 2 * MOST) if deviations else (LEAST, MOST)

    def worths(options: tuple[Scalar, ...], absent: bool) -> dict[Scalar, float]:
        steps = np.cumsum([0.0, *rng.uniform(least, most, len(options) - 1)])
        return {
            option: 0.0 if absent else float(step) for option, step in zip(options, rng.permutation(steps), strict=True)
        }

    worth = {f"model.c{place}": worths(OPTIONS[: 2 + place % 2], absent=place >= 4) for place in range(6)}
    worth[HEADS] = worths((1, 2), absent=False)
    worth[WINDOW] = worths((8, 16, 32), absent=True)
    worth[KIND] = {"x": 0.0, "y": 0.0, "z": float(rng.uniform(least, most)) + worth[HEADS][1] / 2}
    size = float(rng.choice([-1, 1]) * rng.uniform(least, most)) / (2 if deviations else 4)
    pairs = {("model.c0", "model.c2"): np.array([[size, -size], [-size, size]])}
    return Planted(worth=worth, pairs=pairs)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A simulated search."""

    planted: Planted
    points: pd.DataFrame
    readings: pd.DataFrame
    """A column a rung and one for the end, NaN where a trial was stopped before."""


def sampled(planted: Planted, seed: int, n: int, *, sampler: str = "tpe", pruned: bool = False) -> Sampled:
    """A search of n trials: the project's sampler sees what it would see, readings and stops included."""
    rng = np.random.default_rng(seed)
    source = sampler_of(sampler, planted_space(), seed)
    history: list[Told] = []
    seen: dict[int, list[float]] = {rung: [] for rung in RUNGS}
    table = np.full((n, len(RUNGS) + 1), np.nan)
    for number in range(n):
        point = next(source.draws(number, select(history)))
        table[number] = _readings(planted.loss(point), rng)
        stop = _stop(table[number], seen) if pruned else len(RUNGS)
        table[number, stop + 1 :] = np.nan
        loss = float(table[number, stop])
        ended = stop == len(RUNGS)
        history.append(
            Told(
                number=number,
                point=point,
                fate=Fate.OK if ended else Fate.PRUNED,
                drawn=True,
                values=(loss,),
                last_tokens=0 if ended else RUNGS[stop],
                last_loss=loss,
            )
        )
    points = pd.DataFrame([{PARAM + path: told.point.get(path) for path in PATHS} for told in history], dtype=object)
    readings = pd.DataFrame(table, columns=[*RUNGS, BUDGET])
    return Sampled(planted=planted, points=points.where(points.notna(), None), readings=readings)


def _readings(loss: float, rng: np.random.Generator) -> np.ndarray:
    """Readings at the rungs and at the end: less of the effect early on; noise of deviation 1, most of it shared."""
    shared = SEED_NOISE * rng.standard_normal()
    own = (1 - SEED_NOISE**2) ** 0.5 * rng.standard_normal(len(SHARES))
    found: np.ndarray = START * (1 - SHARES) + SHARES * loss + shared + own
    return found


def _stop(readings: np.ndarray, seen: dict[int, list[float]]) -> int:
    """The place of the last reading under successive halving."""
    for place, rung in enumerate(RUNGS):
        seen[rung].append(float(readings[place]))
        if readings[place] > np.median(seen[rung]):
            return place
    return len(RUNGS)
