"""The report of a search: one page for a browser, the same in Markdown, and its pictures."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from analysis import curves, drawing, landscape, landscape_plots, plots
from analysis.diagnostics import Looked, diagnostics_figure, looked
from analysis.effects import Effects, main_effects
from analysis.frame import ENDED_BADLY, Search
from analysis.ladder import projections, read_ladder
from analysis.load import load_search
from analysis.report.document import markdown_page
from analysis.report.findings import Findings
from analysis.report.ladder import write_ladder_report
from analysis.report.page import html_page
from analysis.report.sections import FIRST, document
from analysis.verdicts import Contrast, contrasts
from search_space.records import Metric, Tag


def write_report(uri: str, name: str, out: Path) -> Path:
    """Write report.html, report.md and PNG files into the folder `out` (made if missing); the path of report.html."""
    search = load_search(uri, name)
    if Tag.LADDER in search.parent.run.tags:
        ladder = read_ladder(uri, name)
        return write_ladder_report(ladder, projections(ladder), out)
    out.mkdir(parents=True, exist_ok=True)
    effects, found, inside = main_effects(search), contrasts(search), looked(search)
    pictures = _pictures(search, effects, found, inside)
    for file, figure in pictures.items():
        drawing.save(figure, out / file)
    files = frozenset(pictures)
    told = document(Findings(search=search, effects=effects, contrasts=found, looked=inside, files=files))
    (out / "report.md").write_text(markdown_page(told), encoding="utf-8")
    page = out / "report.html"
    page.write_text(html_page(told), encoding="utf-8")
    return page


def first_answers(page: Path) -> str:
    """What the report says first, as Markdown: what won, by how much, whether that is sure, its cost, its replay."""
    written = page.with_suffix(".md").read_text(encoding="utf-8")
    return written.partition(f"## {FIRST}\n")[2].partition("\n## ")[0].strip()


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
        shown = landscape.pairs(search)
        if shown:
            pictures["pairs.png"] = landscape_plots.pairs_figure(search, shown)
        if landscape.rates(search):
            pictures["rates.png"] = landscape_plots.rates_figure(search)
    if any(row.claim != "too few" for row in effects.rows):
        pictures["effects.png"] = plots.effects_figure(effects)
    if inside:
        pictures["diagnostics.png"] = diagnostics_figure(search, inside)
    return pictures
