"""Tables for the terminal and for Markdown: leaderboard, effects, verdicts."""

import math
from collections.abc import Sequence

from analysis.compare import interval_text, number_text
from analysis.effects import Effect, Effects, main_effects
from analysis.frame import ENDED_BADLY, Search, short_path
from analysis.leaderboard import lead_text, leaderboard
from analysis.tables import Row, aligned, quantity
from analysis.verdicts import Contrast, contrasts
from search_space.records import Metric, Status


def leaderboard_text(search: Search, top: int = 10) -> str:
    """The best trials, the difference to the baseline, and the bigram loss beside them."""
    header, rows = leaderboard_rows(search, top)
    left = len(search.trials) - len(rows)
    head, *table = aligned(header[:-1], [row[:-1] for row in rows]).split("\n")
    lines = [f"Leaderboard of {search.name}: final validation loss in {search.unit}, one seed each", head]
    for line, row in zip(table, rows, strict=True):
        lines += [line, f"      {row[-1]}"]
    if left > 0:
        lines.append(f"... and {left} more: assay runs {search.name}")
    return "\n".join([*lines, bigram_text(search), lead_text(search)])


def leaderboard_rows(search: Search, top: int) -> tuple[Row, list[Row]]:
    """Header and rows of the leaderboard; the baseline is always among them."""
    board = leaderboard(search)
    shown = board[(board.index < top) | board["is_baseline"]]
    header: Row = ["", "run", "loss", "to baseline", "parameters", "FLOPs/token", "tokens/s", "what"]
    rows: list[Row] = []
    for place, row in shown.iterrows():
        ended = row["status"] == Status.OK
        rows.append(
            [
                str(int(str(place)) + 1) if ended else "",
                str(row["run"]),
                f"{row['loss']:.4f}" if ended else _cut_short(row["status"], row["tokens"], row["loss"]),
                "baseline" if row["is_baseline"] else number_text(row["difference"]) if ended else "",
                *(
                    quantity(row.get(cost, math.nan))
                    for cost in (Metric.PARAMS, Metric.FLOPS, Metric.TOKENS_PER_SECOND)
                ),
                str(row["what"]),
            ]
        )
    if search.baseline is None:
        header, rows = _without(3, header, rows)
    return header, rows


def bigram_text(search: Search) -> str:
    """The best finished trial beside the bigram model of the task."""
    best = search.finished
    if not len(best):
        return "No trial has finished."
    loss = float(best[Metric.LOSS].iloc[0])
    head = f"Best: {search.name}/{best['number'].iloc[0]} at {loss:.4f} {search.unit}"
    bigram = search.parent.bigram_loss
    if bigram is None:
        return f"{head}."
    side = "below" if loss < bigram else "above"
    return f"{head}, {abs(bigram - loss):.3f} {side} the bigram model ({bigram:.4f})."


def effects_text(search: Search) -> str:
    """What each choice was worth."""
    effects = main_effects(search)
    if not effects.rows:
        return "No choice was tried in two ways by trials that trained: there are no effects to tell."
    header, rows = effects_rows(effects)
    return "\n".join([effects_title(effects), aligned(header, rows), *failure_lines(search, effects)])


def effects_title(effects: Effects) -> str:
    """What the numbers of the effects table are."""
    level = f"{1 - effects.alpha:.0%}"
    same = ""
    if effects.warning:
        same = f"; WARNING: {effects.warning}"
    elif effects.n_finished >= 3 and not math.isnan(effects.agreement):
        same = f"; against the final order: Spearman {effects.agreement:.2f} over {effects.n_finished} finished trials"
    nature = "; ".join(filter(None, [effects.early, "descriptive: the sampler chose the trials"]))
    return (
        f"What each choice was worth ({nature}): difference of validation loss in "
        f"{effects.unit} at {effects.tokens:,} tokens (equal for all), {effects.n} trials, below zero is better; "
        f"intervals nominally at {level} for the whole table{same}; paired finals decide"
    )


def effects_rows(effects: Effects) -> tuple[Row, list[Row]]:
    """Header and rows of the effects table."""
    header = ["choice", "option", "against", "difference", "interval", "n", "claim"]
    return header, [
        [
            short_path(row.path),
            row.option,
            row.reference,
            # A number without an interval would be read as a finding.
            "" if math.isnan(row.low) else number_text(row.estimate),
            "" if math.isnan(row.low) else interval_text(row.low, row.high),
            f"{row.n}, {row.n_reference}",
            f"{row.claim}, early" if effects.early and row.claim in ("better", "worse") else row.claim,
        ]
        for row in effects.rows
    ]


def failure_lines(search: Search, effects: Effects, most: int = 5) -> list[str]:
    """How many trials ended badly, and with which options more often."""
    counts = search.trials["status"].value_counts()
    bad = [f"{status.replace('_', ' ')} {counts[status]}" for status in ENDED_BADLY if status in counts]
    if not bad:
        return [f"None of {len(search.trials)} trials ended badly."]
    lines = [f"Ended badly: {', '.join(bad)} of {len(search.trials)} trials."]
    decided = [rate for rate in effects.failures if rate.claim != "undecided"]
    lines += [f"  {rate.text}: {rate.claim} often than without" for rate in decided[:most]]
    if not decided:
        lines.append("  No choice is shown to be the cause; the most lopsided counts:")
        lines += [f"  {rate.text}" for rate in effects.failures[:3]]
    return lines


def verdicts_text(search: Search) -> str:
    """The verdicts of the finals."""
    found = contrasts(search)
    if not found:
        return "No paired final was run: nothing is decided between candidates."
    return "\n".join(verdict_lines(search, found))


def verdict_lines(search: Search, found: Sequence[Contrast]) -> list[str]:
    """A title and one line a contrast."""
    split = "test" if all(contrast.split == "test" for contrast in found) else "validation"
    alpha = sum(contrast.verdict.alpha for contrast in found)
    title = (
        f"Verdicts ({split} split, paired seeds; the chance that any of them is wrong is at most {100 * alpha:.3g} %):"
    )
    return [title, *(f"  {contrast.name}: {contrast.text}" for contrast in found)]


def undecided_lines(search: Search, effects: Effects, found: Sequence[Contrast]) -> list[str]:
    """Everything this search leaves open, in words."""
    lines = [f"{contrast.name}: {contrast.text}" for contrast in found if contrast.verdict.kind == "undecided"]
    if not found:
        lines.append("No paired final was run, so no candidate is shown to beat another.")
    asked = search.parent.experiment.get("final", {}).get("contrasts", {})
    lines += [f"{name}: no final has run." for name in asked if name not in {contrast.name for contrast in found}]
    lines.append(lead_text(search))
    by_choice: dict[str, list[Effect]] = {}
    for row in effects.rows:
        by_choice.setdefault(short_path(row.path), []).append(row)
    open_choices = [name for name, rows in by_choice.items() if all(row.claim == "undecided" for row in rows)]
    thin = [f"{name} {row.option}" for name, rows in by_choice.items() for row in rows if row.claim == "too few"]
    if open_choices:
        lines.append(f"Whether these choices matter at all (every interval holds zero): {', '.join(open_choices)}.")
    pairs = [
        f"{name} {row.option} against {row.reference}"
        for name, rows in by_choice.items()
        for row in rows
        if row.claim == "undecided" and name not in open_choices
    ]
    if pairs:
        lines.append(f"Whether these options differ (the interval holds zero): {', '.join(pairs)}.")
    if thin:
        lines.append(f"Too few trials to say anything: {', '.join(thin)}.")
    return lines


def _cut_short(status: str, tokens: float, loss: float) -> str:
    words = status.replace("_", " ")
    if math.isnan(loss) or math.isnan(tokens) or not tokens:
        return words
    return f"{words} ({loss:.3f} at {quantity(tokens)})"


def _without(place: int, header: Row, rows: Sequence[Row]) -> tuple[Row, list[Row]]:
    return [*header[:place], *header[place + 1 :]], [[*row[:place], *row[place + 1 :]] for row in rows]
