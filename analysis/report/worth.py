"""The sections on choices: what each is worth, alone, beside others, and over the learning rate."""

import math

from analysis import landscape, text
from analysis.compare import interval_text
from analysis.effects import Effects
from analysis.fidelity import fidelity
from analysis.frame import short_path
from analysis.report import charts, estimates
from analysis.report.document import Block, Picture, Points, Section, Table, Words
from analysis.report.findings import Findings

_MOST_IMPORTANT = 12
_FEWEST_BEST = 30
"""Trials from which the best tenth of them says anything."""


def effects_blocks(found: Findings) -> list[Block]:
    effects = found.effects
    if not effects.rows:
        return [Words(text="No choice was tried in two ways by trials that trained: there are no effects to tell.")]
    adjusted = sorted({name for row in effects.rows for name in row.adjusted_for})
    header, rows = text.effects_rows(effects)
    note = (
        f"n={effects.n} trials at {effects.tokens:,} tokens; intervals nominally at {1 - effects.alpha:.0%} for all of "
        f"them together. {effects.warning[:1].upper() + effects.warning[1:] + '.' if effects.warning else ''} "
        "Options that fewer than three trials took are in the table only."
    )
    about = f"Each difference is adjusted for as many of these as the trials bear: {', '.join(adjusted)}."
    chart = estimates.effects_chart(effects) if "effects.png" in found.files else {}
    return [
        Words(text=f"{text.effects_title(effects)}."),
        *found.picture("effects.png", "Effects with intervals", note, chart),
        Table(header=header, rows=rows, name="Effects of every choice"),
        *([Words(text=about)] if adjusted else []),
        *_importances(effects),
        Words(text=fidelity(found.search).text),
    ]


def _importances(effects: Effects) -> list[Block]:
    """Which choices explain the differences of the loss, the most important first."""
    few = effects.n < _FEWEST_BEST
    rows = [
        [
            " × ".join(short_path(path) for path in (row.path, row.other_path) if path),
            f"{row.share:.0%}",
            f"[{row.low:.0%}, {row.high:.0%}]",
            *([] if few else ["" if math.isnan(row.best_tenth) else f"{row.best_tenth:.0%}"]),
        ]
        for row in effects.importances[:_MOST_IMPORTANT]
    ]
    note = (
        f"How much of the differences of the loss over the space each choice explains, of what choices explain at all "
        f"(n={effects.n} trials, 95 % intervals, pointwise)"
    )
    tenth = "; beside it, how much it decides about being among the best tenth of the trials"
    header = ["choice", "share", "interval", *([] if few else ["of the best tenth"])]
    note = f"{note}{'' if few else tenth}."
    return [Table(header=header, rows=rows, name="Importance of every choice", note=note)] if rows else []


def landscape_sections(found: Findings) -> list[Section]:
    search, sections = found.search, []
    outcome, tokens = landscape.losses(search)
    if "pairs.png" in found.files:
        blocks = _interactions(found.effects)
        note = (
            f"Mean validation loss at {tokens:,} tokens of the trials with both options, minus that of all "
            f"({search.unit}); n={len(outcome)} trials. ±: 95 % interval of the mean, from two trials on. Not adjusted "
            "for the other choices: the sampler chose the trials. Blue is better."
        )
        blocks += found.picture("pairs.png", "Mean losses of two choices at a time", note, charts.pairs_chart(search))
        sections.append(Section(title="How choices go together", blocks=blocks, short="Pairs"))
    if "rates.png" in found.files:
        note = (
            f"n={len(outcome)} trials at {tokens:,} tokens, one seed each. Line and band: a parabola over the "
            "logarithm of the rate with its pointwise 95 % interval, for variants of six trials and more where it "
            "has a lowest place. Crosses at the top: trials that ended badly."
        )
        blocks = found.picture("rates.png", "By variant", note, charts.rates_chart(search))
        sections.append(Section(title="Loss against the learning rate", blocks=blocks, short="Rates"))
    return sections


def _interactions(effects: Effects) -> list[Block]:
    """What two choices are worth together beyond what each is worth alone."""
    spoken = [row for row in effects.interactions if row.claim != "too few"]
    if not spoken:
        return [
            Words(text="No two choices were tried together often enough to tell whether they depend on each other.")
        ]
    decided = [row for row in spoken if row.claim != "undecided"]
    lines = [f"{row.text} {interval_text(row.low, row.high)}, n={row.n}: {row.claim}." for row in decided]
    note = (
        f"How much more an option is worth beside another than beside that one's reference ({effects.unit}, at "
        f"{effects.tokens:,} tokens, adjusted for the other choices); n={effects.n} trials; intervals nominally at "
        f"{1 - effects.alpha:.0%} for all of them together. Blue: better together than apart. Cells without a number: "
        "too few trials."
    )
    nothing = f"None of {len(spoken)} pairs of options is shown to matter beyond what each option is worth alone."
    chart = charts.interactions_chart(effects)
    return [Points(items=lines or [nothing]), Picture(title="Interactions", note=note, chart=chart)]
