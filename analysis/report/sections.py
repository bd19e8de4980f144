"""What a report says, section by section; the same for Markdown and the page."""

from collections.abc import Sequence
from typing import Any

from analysis import costs, text
from analysis.diagnostics import diagnostics_lines
from analysis.frame import ENDED_BADLY, Search
from analysis.leaderboard import common_text, leaderboard
from analysis.report import charts, estimates
from analysis.report.board import MOST_ROWS, board
from analysis.report.document import (
    Block,
    Command,
    Document,
    Picture,
    Points,
    Section,
    Table,
    Words,
    clean,
)
from analysis.report.findings import Findings
from analysis.report.headline import answers, place_option
from analysis.report.worth import effects_blocks, landscape_sections
from analysis.tables import quantity
from analysis.verdicts import Contrast
from search_space.records import Artifact, Metric, Tag

FIRST = "In short"
"""The first section."""
_LONG = 160
_FEW = 12
_TELLING = ("torch", "numpy", "optuna", "mlflow", "triton", "flash-attn")


def document(found: Findings) -> Document:
    """The whole report."""
    search = found.search
    said = [_summary(search), str(search.parent.experiment.get("description", "")).strip()]
    return Document(
        title=search.name,
        lead=[words for words in said if words],
        sections=[
            Section(title=FIRST, blocks=[answers(search, found.contrasts)], short=FIRST),
            Section(title="Verdicts", blocks=_verdicts(found), short="Verdicts"),
            Section(title="Leaderboard", blocks=_leaderboard(found), short="Leaderboard"),
            Section(title="Learning curves", blocks=_curves(found), short="Curves"),
            Section(title="What each choice was worth", blocks=effects_blocks(found), short="Effects"),
            *landscape_sections(found),
            Section(title="Loss against cost", blocks=_front(found), short="Cost"),
            *_inside(found),
            Section(title="How the trials ended", blocks=_endings(found), short="Endings"),
            Section(title="Undecided", blocks=[Points(items=_undecided(found))], short="Undecided"),
            Section(title="Data and environment", blocks=[Points(items=_environment(search))]),
            Section(title="What it cost", blocks=[Points(items=costs.cost_lines(search))]),
            Section(title="Replay", blocks=_replay(search, found.contrasts), short="Replay"),
        ],
    )


def _summary(search: Search) -> str:
    budget = search.parent.experiment.get("budget", {})
    size = search.parent.experiment.get("size", {})
    facts = [f"{len(search.trials)} trials", f"{len(search.finished)} trained to the end"]
    if len(search.finals):
        trained = int((search.finals["same_as"] == "").sum())
        copies = f", {trained} trainings" if trained < len(search.finals) else ""
        facts.append(f"{len(search.finals)} finals{copies}")
    if budget:
        facts.append(f"at most {budget['tokens']:,} tokens each")
    facts += [f"every candidate at {measure} {quantity(float(value))}" for measure, value in size.items()]
    if search.task:
        facts.append(f"task {search.task}")
    said = [f"{', '.join(facts)}. Losses are {search.unit}; lower is better.", common_text(search)]
    return " ".join(filter(None, said))


def _verdicts(found: Findings) -> list[Block]:
    search, contrasts = found.search, found.contrasts
    if not contrasts:
        return [Words(text=text.verdicts_text(search))]
    title, *lines = text.verdict_lines(search, contrasts)
    pairs = ", ".join(f"{contrast.name} n={contrast.verdict.n}" for contrast in contrasts)
    level = 1 - sum(contrast.verdict.alpha for contrast in contrasts)
    note = (
        f"Dots: one pair of seeds; line: their mean; band: the interval, valid however often one looks; all bands hold "
        f"together at {level:.0%}. Pairs: {pairs}. Left of 0 the first named is better."
    )
    axis = f"paired difference of loss ({search.unit})"
    chart = estimates.finals_chart(search, contrasts, axis) if "finals.png" in found.files else {}
    return [
        Words(text=title),
        Points(items=[line.strip() for line in lines]),
        *found.picture("finals.png", "Paired finals", note, chart),
    ]


def _leaderboard(found: Findings) -> list[Block]:
    search = found.search
    chart_note = f"Final validation losses of the best trials ({search.unit}). {charts.seed_note(search)}"
    return [
        Words(text=text.bigram_text(search)),
        Words(text=text.lead_text(search)),
        board(search),
        *found.picture("leaderboard.png", "Leaderboard", chart_note, {}),
    ]


def _curves(found: Findings) -> list[Block]:
    search = found.search
    if "curves.png" not in found.files:
        return [Words(text="No two trials were read at the same tokens.")]
    chart = charts.curves_chart(search)
    note = (
        f"n={len(chart['items'])} of {len(search.trials)} trials with readings; each ends in a dot, or a cross where "
        f"it ended badly. What shoots up is cut off at the top. {charts.seed_note(search)}"
    )
    return found.picture("curves.png", "Validation loss against training tokens", note, chart)


def _front(found: Findings) -> list[Block]:
    if "cost.png" not in found.files:
        return [Words(text="No trial has finished.")]
    note = (
        f"n={len(found.search.finished)} finished trials. Ringed: no other is both cheaper and better (none where all "
        f"cost the same). {charts.seed_note(found.search)}"
    )
    return found.picture("cost.png", "Final loss against cost", note, charts.front_chart(found.search))


def _inside(found: Findings) -> list[Section]:
    """What checkups saw, where there were any."""
    if not found.looked:
        return []
    note = (
        f"n={len(found.looked)} best finished trials that were looked at, one seed each, on the same few validation "
        "sequences; entropy in nats. One checkup has no interval."
    )
    picture = found.picture("diagnostics.png", "Inside the best trials", note, charts.inside_chart(found.looked))
    lines = diagnostics_lines(found.search, found.looked)
    return [Section(title="Diagnostics", blocks=[Points(items=lines), *picture], short="Diagnostics")]


def _endings(found: Findings) -> list[Block]:
    search = found.search
    order = leaderboard(search)
    bad = order[order["status"].isin(ENDED_BADLY)].head(MOST_ROWS)
    rows = [
        [str(row["run"]), str(row["status"]).replace("_", " "), _short(row["reason"]), str(row["what"])]
        for _, row in bad.iterrows()
    ]
    lines = [line.strip() for line in text.failure_lines(search, found.effects)]
    blocks: list[Block] = [Points(items=lines)]
    note = f"n={len(search.trials)} trials; bars: 95 % intervals of the shares."
    blocks.append(Picture(title="How the trials ended", note=note, chart=estimates.endings_chart(search)))
    if rows:
        table = Table(header=["run", "status", "reason", "what"], rows=rows, name="Trials that ended badly")
        by_option = estimates.failures_chart(search)
        title = "Where trials ended badly"
        blocks += [Picture(title=title, note=note, chart=by_option)] if by_option else []
        note = f"n={len(search.trials)} trials by how they ended."
        return [*blocks, table, *found.picture("failures.png", "How the trials ended", note, {})]
    return blocks


def _undecided(found: Findings) -> list[str]:
    return text.undecided_lines(found.search, found.effects, found.contrasts)


def _environment(search: Search) -> list[str]:
    tags = search.parent.run.tags
    lines = [f"store: `{search.uri}`, parent run `{search.parent.run.run_id}`"]
    if Tag.FINGERPRINT in tags:
        lines.append(f"data fingerprint (sha256): `{tags[Tag.FINGERPRINT]}`")
    if Tag.SPACE in tags:
        lines.append(f"space: `{tags[Tag.SPACE]}`")
    if search.task:
        settings = search.parent.experiment["task"].get(search.task, {})
        lines.append(f"task: {search.task} ({_plain(settings)})")
    return [*lines, *(f"{key}: {_plain(value)}" for key, value in sorted(search.parent.environment.items()) if value)]


def _replay(search: Search, found: Sequence[Contrast]) -> list[Block]:
    names = [f"{search.name}/best", *(f"{search.name}/{number}" for number in search.finished["number"].head(3))]
    if found and len(search.finals):
        names.append(f"{search.name}/final/{search.finals['number'].iloc[0]}")
    seconds = search.finished[Metric.SECONDS].median() if Metric.SECONDS in search.trials else float("nan")
    about = f" A trial took {seconds:.1f} s (median of unpruned)." if seconds == seconds else ""
    lead = (
        f"Any line of this report is trained again from the store alone and compared bit for bit.{about} "
        f"Elsewhere than in the folder of the search, add `{place_option(search).strip()}`."
    )
    return [Words(text=lead), *(Command(line=f"assay replay {name}") for name in dict.fromkeys(names))]


def _plain(value: Any) -> str:
    """A setting in words; of many packages only those that decide numbers."""
    if isinstance(value, dict):
        held = {key: inner for key, inner in value.items() if inner not in ("", [], {})}
        shown = {key: inner for key, inner in held.items() if len(held) <= _FEW or key in _TELLING}
        more = f", and {len(held) - len(shown)} more in {Artifact.ENVIRONMENT}" if len(shown) < len(held) else ""
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in shown.items()) + more
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return _short(str(value))


def _short(line: str) -> str:
    line = clean(line)
    return line if len(line) <= _LONG else f"{line[:_LONG]}…"
