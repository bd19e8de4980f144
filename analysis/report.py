"""The report of a search: one Markdown page and its pictures."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis import costs, curves, drawing, plots, text
from analysis.diagnostics import Looked, diagnostics_figure, diagnostics_lines, looked
from analysis.effects import Effects, main_effects
from analysis.frame import ENDED_BADLY, Search
from analysis.leaderboard import common_text, leaderboard
from analysis.load import load_search
from analysis.tables import markdown, quantity
from analysis.verdicts import Contrast, contrasts
from search_space.records import Artifact, Metric, Tag

_TOP = 15
_LONG = 160
_FEW = 12
_TELLING = ("torch", "numpy", "optuna", "mlflow", "triton", "flash-attn")


def write_report(uri: str, name: str, out: Path) -> Path:
    """Write report.md and PNG files into the folder `out` (made if missing); the path of report.md."""
    search = load_search(uri, name)
    out.mkdir(parents=True, exist_ok=True)
    effects, found, inside = main_effects(search), contrasts(search), looked(search)
    pictures = _pictures(search, effects, found, inside)
    for file, figure in pictures.items():
        drawing.save(figure, out / file)
    page = out / "report.md"
    page.write_text("\n\n".join(_sections(search, effects, found, inside, set(pictures))) + "\n", encoding="utf-8")
    return page


def _pictures(
    search: Search, effects: Effects, found: Sequence[Contrast], inside: Sequence[Looked]
) -> dict[str, Figure]:
    """Every figure there is something to show in, by file name."""
    pictures = {}
    if search.trials["status"].isin(ENDED_BADLY).any():
        pictures["failures.png"] = plots.failures_figure(search)
    if found:
        pictures["finals.png"] = plots.finals_figure(search, found)
    if len(search.finished):
        pictures["leaderboard.png"] = plots.leaderboard_figure(search)
        if search.finished[Metric.PARAMS].notna().any():
            pictures["cost.png"] = plots.cost_figure(search)
    if curves.common_tokens(search):
        pictures["curves.png"] = plots.curves_figure(search)
    if any(row.claim != "too few" for row in effects.rows):
        pictures["effects.png"] = plots.effects_figure(effects)
    if inside:
        pictures["diagnostics.png"] = diagnostics_figure(search, inside)
    return pictures


def _sections(
    search: Search, effects: Effects, found: Sequence[Contrast], inside: Sequence[Looked], pictures: set[str]
) -> list[str]:
    def picture(file: str, what: str) -> list[str]:
        return [f"![{what}]({file})"] if file in pictures else []

    verdicts = text.verdict_lines(search, found) if found else [text.verdicts_text(search)]
    header, rows = text.leaderboard_rows(search, _TOP)
    replay = ["replay", *(f"`assay replay {row[1]}`" for row in rows)]
    return [
        f"# {search.name}",
        _summary(search),
        "## Verdicts",
        "\n".join([verdicts[0], "", *(f"- {line.strip()}" for line in verdicts[1:])]).strip(),
        *picture("finals.png", "Paired differences of the finals with their intervals"),
        "## Leaderboard",
        text.bigram_text(search),
        text.lead_text(search),
        markdown([*header, replay[0]], [[*row, cell] for row, cell in zip(rows, replay[1:], strict=True)]),
        *_left_out(search, len(rows)),
        *picture("leaderboard.png", "Final validation losses of the best trials"),
        "## Learning curves",
        *picture("curves.png", "Validation loss against training tokens of every trial"),
        "## What each choice was worth",
        *_effects(effects),
        *picture("effects.png", "Effects of every choice with intervals"),
        "## Loss against cost",
        *picture("cost.png", "Final validation loss against parameters and FLOPs per token"),
        *_inside(search, inside),
        *picture("diagnostics.png", "Entropy of heads, residual stream and gradients by layer of the best trials"),
        "## How the trials ended",
        "\n".join(f"- {line.strip()}" for line in text.failure_lines(search, effects)),
        *_failures(search),
        *picture("failures.png", "Number of trials by status"),
        "## Undecided",
        "\n".join(f"- {line}" for line in text.undecided_lines(search, effects, found)),
        "## Data and environment",
        _environment(search),
        "## What it cost",
        costs.cost_text(search),
        "## Replay",
        _replay(search, found),
    ]


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


def _left_out(search: Search, shown: int) -> list[str]:
    total = len(search.trials)
    return [f"{shown} of {total} trials are shown; `assay runs {search.name}` lists all."] if shown < total else []


def _effects(effects: Effects) -> list[str]:
    if not effects.rows:
        return ["No choice was tried in two ways by trials that trained: there are no effects to tell."]
    adjusted = sorted({name for row in effects.rows for name in row.adjusted_for})
    lines = [f"{text.effects_title(effects)}.", markdown(*text.effects_rows(effects))]
    if adjusted:
        lines.append(f"Each difference is adjusted for as many of these as the trials bear: {', '.join(adjusted)}.")
    return lines


def _failures(search: Search) -> list[str]:
    board = leaderboard(search)
    bad = board[board["status"].isin(ENDED_BADLY)]
    rows = [
        [str(row["run"]), str(row["status"]).replace("_", " "), _short(row["reason"]), str(row["what"])]
        for _, row in bad.iterrows()
    ]
    return [markdown(["run", "status", "reason", "what"], rows)] if rows else []


def _inside(search: Search, inside: Sequence[Looked]) -> list[str]:
    """What checkups saw, where there were any."""
    return ["## Diagnostics", "\n".join(f"- {line}" for line in diagnostics_lines(search, inside))] if inside else []


def _environment(search: Search) -> str:
    tags = search.parent.run.tags
    lines = [f"- store: `{search.uri}`, parent run `{search.parent.run.run_id}`"]
    if Tag.FINGERPRINT in tags:
        lines.append(f"- data fingerprint (sha256): `{tags[Tag.FINGERPRINT]}`")
    if Tag.SPACE in tags:
        lines.append(f"- space: `{tags[Tag.SPACE]}`")
    if search.task:
        settings = search.parent.experiment["task"].get(search.task, {})
        lines.append(f"- task: {search.task} ({_plain(settings)})")
    lines += [f"- {key}: {_plain(value)}" for key, value in sorted(search.parent.environment.items()) if value]
    return "\n".join(lines)


def _replay(search: Search, found: Sequence[Contrast]) -> str:
    names = [f"{search.name}/best", *(f"{search.name}/{number}" for number in search.finished["number"].head(3))]
    if found and len(search.finals):
        names.append(f"{search.name}/final/{search.finals['number'].iloc[0]}")
    lines = "\n".join(f"assay replay {name}" for name in dict.fromkeys(names))
    seconds = search.finished[Metric.SECONDS].median() if Metric.SECONDS in search.trials else float("nan")
    about = f" A trial took {seconds:.1f} s (median of unpruned)." if seconds == seconds else ""
    store = shlex.quote(search.uri)
    return (
        f"Any line of this report is trained again from the store alone and compared bit for bit.{about} "
        f"Elsewhere than in the folder of the search, add `--tracking-uri {store}`.\n\n```\n{lines}\n```"
    )


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
    line = " ".join(str(line).split())
    return line if len(line) <= _LONG else f"{line[:_LONG]}…"
