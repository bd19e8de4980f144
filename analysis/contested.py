"""The finals of the best candidates as the tracking store shows them: losses by training, terms, doubts, documents."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analysis import load
from analysis.contest import counted, finalists
from analysis.fastread import RunRow
from analysis.frame import ENDED_BADLY, Search
from search_space.contest import BASELINE, CONTEST, Bout, Contest
from search_space.records import Artifact, Metric, Stage, Status, Tag
from search_space.settings import ContestSpec

RESAMPLES = 10_000
_CHUNK = 500


@dataclass(frozen=True, kw_only=True)
class Contested:
    """A contest of a search."""

    search: Search
    rows: pd.DataFrame
    """Its finals, with the number of their contestant under `contestant`."""
    swept: pd.DataFrame
    """Its sweeps, likewise."""
    terms: Mapping[str, Any]
    """As the study noted them."""

    @property
    def metric(self) -> str:
        """What verdicts are given on."""
        at_length = self.contest.spec.at_length
        return f"{Metric.TEST_LOSS_AT}{at_length}" if at_length else Metric.TEST_LOSS

    @cached_property
    def contest(self) -> Contest:
        """Its terms; how far rates may go no longer matters."""
        spec = ContestSpec(**{each.name: self.terms[each.name] for each in fields(ContestSpec)})
        searched = tuple(self.terms.get("searched", ()))
        return Contest(spec=spec, reach=((0, 0),) * len(self.terms["contestants"]), searched=searched)

    @property
    def finalists(self) -> Sequence[int]:
        """The numbers of those who meet the baseline; none while that is not known."""
        return finalists(self.contest, self.ended)

    def source(self, contestant: int) -> str:
        """NAME/NUMBER of the trial that a contestant is, or where the baseline comes from."""
        return str(self.terms["contestants"][contestant])

    @cached_property
    def ended(self) -> dict[Bout, float]:
        """Loss by training that has ended, of sweeps on the validation split; NaN for one that ended badly."""
        found = {}
        for rows, stage, metric in ((self.rows, Stage.FINAL, self.metric), (self.swept, Stage.SWEEP, Metric.LOSS)):
            for row in rows.to_dict("records"):
                bout = Bout(stage, int(row["contestant"]), int(row["replica"]))
                if row["status"] == Status.OK:
                    found[bout] = float(row.get(metric, math.nan))
                elif row["status"] in ENDED_BADLY:
                    found[bout] = math.nan
        return found

    def pairs(self, finalist: int) -> pd.DataFrame:
        """replica, base, changed, difference: one row a pair that counts."""
        found = counted(self.ended, finalist, self.contest.spec.max_seeds)
        pairs = pd.DataFrame(found, columns=["replica", "base", "changed"]).astype({"replica": "int64"})
        return pairs.assign(difference=pairs["changed"] - pairs["base"])

    def doubts(self, finalist: int) -> list[str]:
        """Whose learning rate is not known to be the best one, in words."""
        said = []
        for contestant, name in ((finalist, ""), (BASELINE, "baseline ")):
            runs = self.rows[self.rows["contestant"] == contestant]["run_id"]
            told = {self._runs[run].tags.get(Tag.UNTUNED, "") for run in runs} - {""}
            said += [f"{name}{doubt}" for doubt in sorted(told)]
        return said

    def documents(self, finalist: int, replicas: Sequence[int]) -> tuple[float, float] | None:
        """What other test documents could have shown: a bootstrap interval of the mean difference, at the level of the
        verdict, with the seeds as they are; None where the losses of documents were not kept.
        """
        sides = [[self._losses(side, replica) for replica in replicas] for side in (BASELINE, finalist)]
        if self.contest.spec.at_length or not replicas or any(held is None for side in sides for held in side):
            return None
        base, own = (np.mean([held[0] for held in side if held], axis=0) for side in sides)
        weights = np.asarray(sides[0][0][1] if sides[0][0] else (), dtype=float)
        return bootstrap(own - base, weights, self.contest.share)

    def _losses(self, contestant: int, replica: int) -> tuple[list[float], list[int]] | None:
        rows = self.rows[(self.rows["contestant"] == contestant) & (self.rows["replica"].astype(int) == replica)]
        file = load.artifact(self.search.uri, self._runs[rows["run_id"].iloc[-1]], Artifact.RESULT)
        plain = json.loads(file.read_text()) if file else {}
        return (plain["document_losses"], plain["document_counts"]) if plain.get("document_losses") else None

    @cached_property
    def _runs(self) -> dict[str, RunRow]:
        return {row.run_id: row for row in load.runs_by_id(self.search.uri, list(self.rows["run_id"]))}


def bootstrap(differences: np.ndarray, weights: np.ndarray, alpha: float) -> tuple[float, float]:
    """Percentile interval of the weighted mean difference over documents drawn anew; equal inputs give equal ends."""
    rng = np.random.default_rng(0)
    count = len(differences)
    means: list[np.ndarray] = []
    for first in range(0, RESAMPLES, _CHUNK):
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=min(_CHUNK, RESAMPLES - first)) * weights
        means.append(drawn @ differences / drawn.sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [alpha / 2, 1 - alpha / 2])
    return float(low), float(high)


def contested(search: Search) -> Contested | None:
    """The contest of the newest generation that has finals; None when there is none."""
    noted = search.parent.run.tags.get(Tag.CONTEST)
    rows = _of_contest(search.finals)
    if not noted or not len(rows):
        return None
    swept = search.frame[search.frame["stage"] == Stage.SWEEP]
    swept = _of_contest(swept[swept["generation"] == rows["generation"].iloc[0]])
    return Contested(search=search, rows=rows, swept=swept, terms=json.loads(noted))


def _of_contest(rows: pd.DataFrame) -> pd.DataFrame:
    """The trainings of contestants, with the number of each under `contestant`."""
    sides = [str(candidate).rpartition("/") for candidate in rows["candidate"]]
    mine = [name == CONTEST for name, _, _ in sides]
    return rows[mine].assign(contestant=[int(side) for name, _, side in sides if name == CONTEST])
