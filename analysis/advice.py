"""What to try next, in words: sentences that follow from the effects, the failures and the trials of a search."""

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from analysis.compare import number_text
from analysis.effects import Effects
from analysis.factors import FEWEST
from analysis.frame import PARAM, Search, short_path, short_value
from search_space.domains import FloatRange, IntRange

_EDGE = 0.05
"""Share of a range, in the scale it is drawn in, that counts as its edge."""
_BEST = 5
_MOST_OPEN = 3
_WORTH = 0.1
"""Importance from which an undecided choice is worth more trials."""


def next_steps(search: Search, effects: Effects) -> list[str]:
    """Sentences, the most useful first; empty where the search leaves nothing to say."""
    return [*_edges(search), *_untried(search, effects), *_thin(effects), *_open(effects), *_failing(effects)]


def _edges(search: Search) -> Iterator[str]:
    """Ranges whose best trials lie at an end."""
    best = search.finished.head(_BEST)
    for path in search.varied:
        domain = search.domains.get(path)
        if not isinstance(domain, FloatRange | IntRange):
            continue
        values = pd.to_numeric(best[PARAM + path].dropna())
        if len(values) < FEWEST:
            continue
        scale = math.log if domain.log else float
        low, high, middle = scale(domain.low), scale(domain.high), scale(float(np.median(values)))
        share = (middle - low) / (high - low)
        if share < _EDGE or share > 1 - _EDGE:
            end, word = (domain.low, "lower") if share < _EDGE else (domain.high, "upper")
            yield (
                f"Widen {short_path(path)}: the best {len(values)} trials lie at its {word} end, {short_value(end)}; "
                "the optimum may be beyond."
            )


def _untried(search: Search, effects: Effects) -> Iterator[str]:
    """The best options of all choices that are decided, where no trial held all of them."""
    decided = {row.path for row in effects.rows if row.claim in ("better", "worse")}
    sure: dict[str, str] = {}
    for path in dict.fromkeys(row.path for row in effects.rows):
        rows = [row for row in effects.rows if row.path == path]
        if isinstance(search.domains.get(path), FloatRange) or path not in decided:
            continue
        lowest = min(rows, key=lambda row: row.estimate if not math.isnan(row.estimate) else math.inf)
        sure[path] = lowest.option if lowest.estimate < 0 else lowest.reference
    held = pd.Series(True, index=search.trials.index)
    for path, option in sure.items():
        values = search.trials[PARAM + path]
        held &= values.isna() | values.map(lambda value: "" if value is None else short_value(value)).eq(option)
    if len(sure) > 1 and not held.any():
        together = ", ".join(f"{short_path(path)} {option}" for path, option in sure.items())
        yield f"Try {together} together: each is the better option, and no trial held all of them."


def _thin(effects: Effects) -> Iterator[str]:
    for row in effects.rows:
        if row.claim == "too few" and row.n < FEWEST:
            yield (
                f"Give {short_path(row.path)} {row.option} {FEWEST - row.n} more "
                f"trial{'s' if FEWEST - row.n > 1 else ''}: {row.n} so far, {FEWEST} are needed to say anything."
            )


def _open(effects: Effects) -> Iterator[str]:
    """Undecided differences of choices that seem to matter, with the trials that would settle them."""
    share = {row.path: row.share for row in effects.importances if not row.other_path}
    rows = [row for row in effects.rows if row.claim == "undecided" and share.get(row.path, 0.0) >= _WORTH]
    for row in sorted(rows, key=lambda row: -abs(row.estimate))[:_MOST_OPEN]:
        half = (row.high - row.low) / 2
        more = math.ceil(effects.n * ((half / max(abs(row.estimate), half / 10)) ** 2 - 1))
        yield (
            f"{short_path(row.path)} {row.option} against {row.reference} is open at {number_text(row.estimate)} "
            f"{effects.unit}: about {max(more, 1):,} more trials, or paired finals, would settle a gap of this size."
        )


def _failing(effects: Effects) -> Iterator[str]:
    for rate in effects.failures:
        if rate.claim == "more" and sum(rate.counts.values()) * 2 >= rate.n:
            conditions = ", ".join(f"{short_path(path)} {option}" for path, option in rate.conditions)
            yield f"Leave out {conditions}: {rate.text}."
            return
