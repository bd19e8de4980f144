"""The five things a reader asks of a search first, answered in sentences."""

import math
import shlex
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.compare import number_text
from analysis.costs import cost_lines
from analysis.frame import Search
from analysis.leaderboard import lead_text
from analysis.report.document import Answers, Command
from analysis.tables import quantity
from analysis.text import verdict_lines
from analysis.verdicts import Contrast
from search_space.places import locate
from search_space.records import Metric, Status

_COSTS = {
    Metric.PARAMS: "parameters",
    Metric.FLOPS: "forward FLOPs/token",
    Metric.STATE_BYTES: "bytes of state/token",
    Metric.TOKENS_PER_SECOND: "training tokens/s",
}
_SAME = 0.01
_DECIDED = ("better", "worse", "equal")


def answers(search: Search, found: Sequence[Contrast]) -> Answers:
    """What won, by how much, whether that is sure, what it cost, and how it is trained again."""
    return Answers(
        items=[
            ("What won?", _winner(search)),
            ("By how much?", _lead(search)),
            ("Is it sure?", _certainty(search, found)),
            ("What did it cost?", _cost(search)),
            ("How do I replay it?", _replay(search)),
        ]
    )


def place_option(search: Search) -> str:
    """What a command needs to find the store from any folder."""
    uri = search.uri if "://" in search.uri else locate(search.uri).uri
    return f" --tracking-uri {shlex.quote(uri)}"


def _winner(search: Search) -> list[str]:
    done = search.finished
    if not len(done):
        return ["Nothing yet: no trial has finished."]
    best = done.iloc[0]
    return [
        f"`{search.name}/{best['number']}`: {search.described[best['run_id']]}.",
        f"It has the lowest final validation loss, {best[Metric.LOSS]:.4f} {search.unit}, of {len(done)} trials that "
        f"trained to the end ({len(search.trials)} were started, one seed each).",
    ]


def _lead(search: Search) -> list[str]:
    done = search.finished
    if not len(done):
        return ["Nothing can be compared yet."]
    best = float(done[Metric.LOSS].iloc[0])
    marks: list[tuple[str, float]] = []
    if len(done) > 1:
        marks.append((f"the next best, {search.name}/{done['number'].iloc[1]}", float(done[Metric.LOSS].iloc[1])))
    baseline = search.baseline
    if baseline is not None and baseline["status"] == Status.OK:
        marks.append((f"the baseline, {search.name}/{baseline['number']}", float(baseline[Metric.LOSS])))
    if search.parent.bigram_loss is not None:
        marks.append(("the bigram model of the data", search.parent.bigram_loss))
    said = [_gap(best, level, name, search.unit) for name, level in marks]
    if search.baseline is None:
        said.append("The search names no baseline trial.")
    return said or ["It is the only one that finished."]


def _gap(best: float, level: float, name: str, unit: str) -> str:
    if best == level:
        return f"Level with {name}."
    side = "below" if best < level else "above"
    return f"{number_text(abs(level - best))} {unit} ({abs(level - best) / level:.1%}) {side} {name}."


def _certainty(search: Search, found: Sequence[Contrast]) -> list[str]:
    said = [f"First place: {lead_text(search)}"]
    if not found:
        return [*said, "No paired final was run: nothing is decided between candidates."]
    decided = [contrast for contrast in found if contrast.verdict.kind in _DECIDED]
    _, *lines = verdict_lines(search, found)
    chance = 100 * sum(contrast.verdict.alpha for contrast in found)
    said.append(
        f"By paired finals, {len(decided)} of {len(found)} comparisons are decided; the chance that any of them is "
        f"wrong is at most {chance:.3g} %:"
    )
    return [*said, *(line.strip() + "." for line in lines)]


def _cost(search: Search) -> list[str]:
    said = []
    if len(search.finished):
        best, baseline = search.finished.iloc[0], search.baseline
        parts = [_measure(best, baseline, name, words) for name, words in _COSTS.items() if _known(best, name)]
        if _known(best, Metric.SECONDS):
            parts.append(f"{best[Metric.SECONDS]:.0f} s to train")
        said.append(f"The winner: {', '.join(parts)}.")
    return [*said, f"The whole search: {'; '.join(cost_lines(search))}."]


def _measure(best: "pd.Series[Any]", baseline: "pd.Series[Any] | None", name: str, words: str) -> str:
    value = f"{quantity(float(best[name]))} {words}"
    if baseline is None or baseline["run_id"] == best["run_id"] or not _known(baseline, name):
        return value
    share = float(best[name]) / float(baseline[name]) - 1
    against = "as the baseline" if abs(share) < _SAME else f"{share:+.0%} to the baseline".replace("-", "−")
    return f"{value} ({against})"


def _known(row: "pd.Series[Any]", name: str) -> bool:
    return name in row and not math.isnan(row[name]) and row[name] > 0


def _replay(search: Search) -> "list[str | Command]":
    if not len(search.finished):
        return [f"Any trial that ended: `assay replay {search.name}/NUMBER`; `assay runs {search.name}` lists them."]
    return [
        Command(line=f"assay replay {search.name}/best"),
        "It is trained again from the store alone and compared bit for bit. For any other line put its name in place "
        "of the last word. The trained model as a folder of its own:",
        Command(line=f"assay export {search.name}/best --to {search.name}-best"),
        f"Elsewhere than in the folder of the search, add `{place_option(search).strip()}`.",
    ]
