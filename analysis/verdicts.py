"""The finals of a search as verdicts: seeds paired, contrasts counted, costs beside the gap.

The pairs are the seeds on which both sides ended well, and so say nothing of a side that often does not. No side that
ended badly on more seeds than the other is called better or equal, whatever the pairs say.

The best candidates meet the baseline as contrasts too, each at its share of the contest's own level.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.compare import Verdict, interval_text, paired_verdict
from analysis.contest import verdict_on
from analysis.contested import Contested, contested
from analysis.frame import ENDED_BADLY, PARAM, Search, short_path, short_value
from search_space.contest import BASELINE, CONTEST
from search_space.domains import Scalar
from search_space.records import BASE, CHANGED, Metric, Status

_RATE = ".learning_rate"
ALPHA = 0.05
"""Chance that any verdict of one search is ever wrong."""
_COSTS = {Metric.PARAMS: "parameters", Metric.FLOPS: "FLOPs/token", Metric.TOKENS_PER_SECOND: "tokens/s"}
_SAME_COST, _NO_COST = 0.01, 0.0005


SEEDS_ALONE = ("first seeds", "other seeds")
"""Names of the two sides of a contrast in which nothing but the seeds differs."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One paired final: a candidate and the same candidate with one thing changed."""

    name: str
    verdict: Verdict
    metric: str
    """The measure that was compared: the loss on the test split where it was read, else on the validation split."""
    pairs: pd.DataFrame
    """replica, base, changed, difference: one row a complete pair, in the order of replicas."""
    failures: dict[str, int]
    """Replicas of each side that ended badly, and so are in no pair."""
    ended: dict[str, int]
    """Replicas of each side that ended, well or badly."""
    costs: dict[str, float]
    """Relative difference of mean cost over the complete pairs, changed over base minus one; the text tells that of
    the winner."""
    base: str
    """Which trial the base is, and whether that is the winner; empty while no trial has been recorded."""
    documents: tuple[float, float] | None = None
    """Where the mean difference would lie on other test documents, with the seeds as they are; None where not known."""
    doubts: tuple[str, ...] = ()
    """What else speaks against taking the verdict at its word: sides whose learning rate is not known to be tuned."""

    @property
    def split(self) -> str:
        """On which split the losses were compared."""
        return "test" if self.metric.startswith("test/") else "validation"

    @property
    def text(self) -> str:
        """The verdict with what the change costs and what failed."""
        parts, more = [self.verdict.text], list(self.doubts)
        if self.documents is not None:
            # A sentence on a winner counts its lead upwards, as the verdict does.
            sign = -1 if self.verdict.kind == "better" else 1
            ends = sorted(sign * end for end in self.documents)
            said = f"{interval_text(*ends)} over test documents"
            (more if self.verdict.kind == "undecided" else parts).append(said)
        if self.verdict.kind in ("better", "equal", "worse"):
            parts += [self._cost(name, share) for name, share in self.costs.items()]
        sides = {BASE: self.verdict.baseline, CHANGED: self.verdict.contestant}
        if not self.verdict.withheld:
            parts += [f"{count} seed(s) of {sides[side]} ended badly" for side, count in self.failures.items() if count]
        if self.verdict.kind == "undecided" and (self.verdict.baseline, self.verdict.contestant) == SEEDS_ALONE:
            more.append("nothing but the seeds differs: undecided is the right answer")
        return "; ".join([", ".join(parts), *more, *([f"base: {self.base}"] if self.base else [])])

    def _cost(self, name: str, share: float) -> str:
        if abs(share) < _SAME_COST:
            return f"equal {name} ({abs(share):.1%})" if abs(share) >= _NO_COST else f"equal {name}"
        signed = 1 / (1 + share) - 1 if self.verdict.kind == "worse" else share
        return f"{name} {signed:+.0%}".replace("-", "−")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "contrast": self.name,
            "metric": self.metric,
            "text": self.text,
            "verdict": self.verdict.to_json(),
            "pairs": self.pairs.to_dict("records"),
            "failures": self.failures,
            "ended": self.ended,
            "costs": self.costs,
            "base": self.base,
            "documents": self.documents,
            "doubts": list(self.doubts),
        }


def contrasts(search: Search, *, alpha: float = ALPHA, margin: float = 0.0) -> list[Contrast]:
    """Every contrast of the finals, each at alpha divided by the number of contrasts the experiment asks for."""
    contest = contested(search)
    met = [] if contest is None else [_met(search, contest, finalist) for finalist in contest.finalists]
    finals = search.finals[~search.finals["candidate"].astype(str).str.startswith(f"{CONTEST}/")]
    sides = [str(candidate).rpartition("/") for candidate in finals["candidate"]]
    finals = finals.assign(contrast=[name for name, _, _ in sides], side=[side for _, _, side in sides])
    names = [str(name) for name in finals["contrast"].unique() if name]
    asked = search.parent.experiment.get("final", {}).get("contrasts", {})
    share = alpha / max(len(names), len(asked), 1)
    return met + [_contrast(search, name, finals[finals["contrast"] == name], share, margin) for name in names]


def _met(search: Search, contest: Contested, finalist: int) -> Contrast:
    """A finalist against the baseline."""
    sides = {BASELINE: BASE, finalist: CHANGED}
    rows = contest.rows[contest.rows["contestant"].isin(sides)]
    rows = rows.assign(side=rows["contestant"].map(sides))
    pairs = contest.pairs(finalist)
    replicas = pairs["replica"].tolist()
    failures, ended = _endings(rows)
    label = _labels(search, rows, rates=False)[1]
    at_length = contest.contest.spec.at_length
    verdict = verdict_on(
        contest.contest,
        contest.ended,
        finalist,
        label if "=" in label else "+".join(label.split()),
        unit=f"{search.unit} at length {at_length}" if at_length else search.unit,
    )
    done = rows[(rows["status"] == Status.OK) & rows["replica"].isin(replicas)]
    return Contrast(
        name=contest.source(finalist),
        metric=contest.metric,
        pairs=pairs,
        failures=failures,
        ended=ended,
        costs=_costs(done),
        base="",
        verdict=_heeding(verdict, failures, ended),
        documents=contest.documents(finalist, replicas) if len(replicas) > 1 else None,
        doubts=tuple(contest.doubts(finalist)),
    )


def _endings(rows: pd.DataFrame) -> tuple[dict[str, int], dict[str, int]]:
    """How many replicas of each side ended badly, and how many ended."""
    sides = {side: rows[rows["side"] == side]["status"] for side in (BASE, CHANGED)}
    failures = {side: int(status.isin(ENDED_BADLY).sum()) for side, status in sides.items()}
    return failures, {side: failures[side] + int((status == Status.OK).sum()) for side, status in sides.items()}


def _contrast(search: Search, name: str, rows: pd.DataFrame, alpha: float, margin: float) -> Contrast:
    done = rows[rows["status"] == Status.OK]
    metric = Metric.TEST_LOSS if Metric.TEST_LOSS in done and done[Metric.TEST_LOSS].notna().all() else Metric.LOSS
    wide = done.pivot_table(index="replica", columns="side", values=metric, aggfunc="last").reindex(
        columns=[BASE, CHANGED]
    )
    wide = wide.dropna().sort_index()
    pairs = wide.reset_index().assign(difference=(wide[CHANGED] - wide[BASE]).to_numpy())
    failures, ended = _endings(rows)
    labels = _labels(search, rows)
    verdict = paired_verdict(
        pairs["difference"].tolist(),
        alpha=alpha,
        margin=margin,
        contestant=labels[1],
        baseline=labels[0],
        unit=search.unit,
    )
    return Contrast(
        name=name,
        metric=metric,
        pairs=pairs,
        failures=failures,
        ended=ended,
        costs=_costs(done[done["replica"].isin(pairs["replica"])]),
        base=_base(search, rows[rows["side"] == BASE]),
        verdict=_heeding(verdict, failures, ended),
    )


def _heeding(verdict: Verdict, failures: dict[str, int], ended: dict[str, int]) -> Verdict:
    """The verdict, withheld where it would favour the side that ended badly more often, or call it equal."""
    if failures[BASE] == failures[CHANGED]:
        return verdict
    frail = CHANGED if failures[CHANGED] > failures[BASE] else BASE
    favours_frail = verdict.kind == ("better" if frail == CHANGED else "worse")
    if verdict.n and not favours_frail and verdict.kind != "equal":
        return verdict
    sound = BASE if frail == CHANGED else CHANGED
    names = {BASE: verdict.baseline, CHANGED: verdict.contestant}
    told = {side: f"{failures[side]} of {ended[side]}" for side in (BASE, CHANGED)}
    why = f"{names[frail]} fails {told[frail]} seeds, {names[sound]} {told[sound]}"
    return dataclasses.replace(verdict, kind="undecided", more_seeds=0, withheld=why)


def _base(search: Search, rows: pd.DataFrame) -> str:
    """The best trial at the point of these finals, in words."""
    trials = search.trials
    if not len(trials) or not len(rows):
        return ""
    same = trials[trials["point_id"] == rows["point_id"].iloc[0]]
    best = search.finished["number"]
    if not len(same):
        return f"no trial of {search.name} has its settings"
    numbers = [number for number in best if number in set(same["number"])] or list(same["number"])
    name = f"{search.name}/{numbers[0]}"
    if not len(best):
        return name
    winner = best.iloc[0]
    return (
        f"{name} (the winner)" if numbers[0] == winner else f"{name} (not the winner, which is {search.name}/{winner})"
    )


def _labels(search: Search, rows: pd.DataFrame, *, rates: bool = True) -> tuple[str, str]:
    """What to call base and changed: the settings in which they differ, learning rates only where `rates`."""
    first = {side: rows[rows["side"] == side].iloc[:1] for side in (BASE, CHANGED)}
    if any(not len(side) for side in first.values()):
        return BASE, CHANGED
    words: dict[str, list[str]] = {BASE: [], CHANGED: []}
    for path in [str(column).removeprefix(PARAM) for column in rows if str(column).startswith(PARAM)]:
        if path not in search.choices or (path.endswith(_RATE) and not rates):
            continue
        values = {side: first[side][PARAM + path].iloc[0] for side in first}
        if values[BASE] != values[CHANGED] and not all(pd.isna(value) for value in values.values()):
            for side, value in values.items():
                if not pd.isna(value):
                    words[side].append(_setting(path, value))
    if not words[BASE] and not words[CHANGED]:
        return SEEDS_ALONE
    return " ".join(_kinds_first(words[BASE])) or BASE, " ".join(_kinds_first(words[CHANGED])) or CHANGED


def _setting(path: str, value: Scalar) -> str:
    return str(value) if path.endswith(".kind") else f"{short_path(path)}={short_value(value)}"


def _kinds_first(words: Sequence[str]) -> list[str]:
    """The variants' names alone where there are any: their own fields follow from them."""
    kinds = [word for word in words if "=" not in word]
    return kinds or list(words)


def _costs(done: pd.DataFrame) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric, name in _COSTS.items():
        if metric not in done:
            continue
        means = done.groupby("side")[metric].mean()
        if {BASE, CHANGED} <= set(means.index) and means[BASE] > 0 and means.notna().all():
            found[name] = float(means[CHANGED] / means[BASE] - 1)
    return found
