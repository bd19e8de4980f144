"""What checkups saw inside the best trials of a search: heat maps by layer, and warnings in words."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from analysis import load
from analysis.drawing import STYLE, cut, title
from analysis.frame import Search
from search_space.checkup import Checkup, checkup_from_plain
from search_space.records import Artifact, Metric

BEST = 4
"""Trials that are shown."""
MAPS = ("entropy of each head (nats)", "residual rms", "gradient norm")
"""What the maps of a trial show."""
_WARNINGS = "diagnostics/warnings"
"""The metric that every trial with checkups has."""
_COLOURS = "cividis"
_MOST_CELLS = 80
"""Cells of a map up to which each shows its number."""
_MOST_WARNINGS = 5
_TITLE = 130
_FIRST_ROLES = ("query", "key", "value", "mixer_out", "ffn_in", "ffn_gate", "ffn_out")


@dataclass(frozen=True, kw_only=True)
class Looked:
    """A trial that was looked at."""

    run: str
    """NAME/NUMBER."""
    what: str
    loss: float
    checkups: tuple[Checkup, ...]
    """At growing tokens; at least one."""

    @property
    def last(self) -> Checkup:
        """The newest checkup."""
        return self.checkups[-1]


def looked(search: Search, most: int = BEST) -> list[Looked]:
    """The best finished trials that kept their checkups."""
    found: list[Looked] = []
    if _WARNINGS not in search.frame:
        return found
    finished = search.finished
    for _, row in finished[finished[_WARNINGS].notna()].iterrows():
        if len(found) == most:
            break
        runs = load.runs_by_id(search.uri, [row["run_id"]])
        file = load.artifact(search.uri, runs[0], Artifact.DIAGNOSTICS) if runs else None
        if file is not None:
            checkups = tuple(checkup_from_plain(plain) for plain in json.loads(file.read_text(encoding="utf-8")))
            name = f"{search.name}/{row['number']}"
            found.append(
                Looked(run=name, what=search.described[row["run_id"]], loss=row[Metric.LOSS], checkups=checkups)
            )
    return found


def diagnostics_lines(search: Search, shown: Sequence[Looked]) -> list[str]:
    """The warnings of the trials shown, and how often each kind stands in the whole search."""
    lines = []
    for trial in shown:
        said = [*trial.last.warnings, *trial.last.notes] or ["nothing unusual"]
        lines.append(f"{trial.run} (loss {trial.loss:.3f}): {'; '.join(said)}.")
    checked = search.trials[search.trials[_WARNINGS].notna()]
    warned = checked[checked[_WARNINGS] > 0]
    lines.append(f"{len(warned)} of {len(checked)} trials that were looked at have warnings.")
    kinds = Counter(_kind(line) for words in warned["warnings"] for line in words.splitlines())
    lines += [f"{count}x: {kind}" for kind, count in kinds.most_common(_MOST_WARNINGS)]
    return lines


def _kind(warning: str) -> str:
    """A warning without its layer and numbers, so that the same fault of several trials is counted together."""
    place, found, rest = warning.partition(": ")
    words = (rest if found and place.startswith("layer") else warning).split()
    return " ".join("…" if any(map(str.isdigit, word)) else word for word in words)


@mpl.rc_context(STYLE)
def diagnostics_figure(search: Search, shown: Sequence[Looked]) -> Figure:
    """A row of heat maps for each trial: entropy of each head, size of the residual stream, norm of the gradient."""
    heights = [max(len(trial.last.layers) + 1, 3) for trial in shown]
    figure = Figure(figsize=(11.0, 1.4 + sum(0.34 * height + 0.85 for height in heights)))
    grid = figure.subplots(
        len(shown), 3, squeeze=False, gridspec_kw={"height_ratios": heights, "width_ratios": [1.0, 0.8, 1.7]}
    )
    held = [maps(trial) for trial in shown]
    scales = (_scale(held, 0, Normalize), _scale(held, 1, LogNorm), _scale(held, 2, LogNorm))
    for row, (trial, three) in enumerate(zip(shown, held, strict=True)):
        for axes, one, scale in zip(grid[row], three, scales, strict=True):
            _draw(axes, one, scale)
        named = cut(f"{trial.run}, loss {trial.loss:.3f}: {trial.what}", _TITLE)
        grid[row][0].set_title(" ")  # Room above; the words span the columns, and the first one need not be as wide.
        grid[row][0].annotate(
            named, (0, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points", weight="bold"
        ).set_in_layout(False)
    for column, label in enumerate(MAPS):
        scale = scales[column]
        if scale is not None:
            drawn = mpl.cm.ScalarMappable(norm=scale, cmap=_COLOURS)
            bar = figure.colorbar(drawn, ax=grid[:, column], location="bottom", label=label, aspect=35, fraction=0.05)
            ends = [float(scale.inverse(share)) for share in (0.0, 0.5, 1.0)]
            bar.set_ticks(ends, labels=[f"{end:.2g}" for end in ends])
            bar.minorticks_off()
    tokens = max(trial.last.tokens for trial in shown)
    notes = [
        f"best {len(shown)} finished trials, one seed each; entropy and gradient after {tokens:,} tokens",
        "the same few validation sequences for all; colours are common to a column",
    ]
    title(figure, f"{search.name}: inside the best trials", notes)
    return figure


@dataclass(frozen=True, kw_only=True)
class Map:
    """Numbers by layer; NaN where there is none."""

    values: np.ndarray[Any, np.dtype[np.float64]]
    rows: Sequence[str]
    columns: Sequence[str]
    across: str
    empty: str = ""
    """What is said where there is no number at all."""


def maps(trial: Looked) -> tuple[Map, Map, Map]:
    """What the newest checkup says by layer, in the order of MAPS; the residual stream at every checkup."""
    return _entropy(trial), _residual(trial), _gradient(trial)


def _entropy(trial: Looked) -> Map:
    layers = trial.last.layers
    heads = max(len(layer.get("entropy", ())) for layer in layers)
    values = np.full((len(layers), max(heads, 1)), np.nan)
    for place, layer in enumerate(layers):
        held = layer.get("entropy", ())
        values[place, : len(held)] = held
    return Map(
        values=values,
        rows=_layers(layers),
        columns=[str(head) for head in range(1, heads + 1)],
        across="head",
        empty="no attention weights to read",
    )


def _residual(trial: Looked) -> Map:
    values = np.array([[layer.get("rms", np.nan) for checkup in trial.checkups for layer in [checkup.layers[place]]]
                       for place in range(len(trial.last.layers))])  # fmt: skip
    return Map(
        values=values,
        rows=_layers(trial.last.layers),
        columns=[f"{checkup.tokens:,}" for checkup in trial.checkups],
        across="training tokens",
    )


def _gradient(trial: Looked) -> Map:
    norms = trial.last.gradients
    held = list(dict.fromkeys(role for roles in norms.values() for role in roles))
    roles = sorted(held, key=lambda role: _FIRST_ROLES.index(role) if role in _FIRST_ROLES else len(_FIRST_ROLES))
    values = np.array([[of.get(role, np.nan) for role in roles] for of in norms.values()])
    return Map(
        values=values, rows=[place.removeprefix("layer ") for place in norms], columns=roles, across="role of weights"
    )


def _layers(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(number) for number in range(1, len(layers) + 1)]


def _scale(held: Sequence[tuple[Map, Map, Map]], column: int, kind: type[Normalize]) -> Normalize | None:
    """One scale for a column; None where it holds no number."""
    values = np.concatenate([three[column].values.ravel() for three in held])
    values = values[np.isfinite(values) & ((values > 0) | (kind is Normalize))]
    if not len(values):
        return None
    low, high = (0.0 if kind is Normalize else float(values.min())), float(values.max())
    return kind(vmin=low, vmax=high if high > low else low + 1.0)


def _draw(axes: Axes, one: Map, scale: Normalize | None) -> None:
    axes.grid(visible=False)
    if scale is None or not np.isfinite(one.values).any():
        axes.set_axis_off()
        axes.text(0.5, 0.5, one.empty, ha="center", va="center", fontsize=8, transform=axes.transAxes)
        return
    axes.imshow(np.ma.masked_invalid(one.values), cmap=_COLOURS, norm=scale, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(one.rows)), one.rows, fontsize=7)
    slanted = max(map(len, one.columns), default=0) > 3 and len(one.columns) > 3
    turned = {"rotation": 30.0, "ha": "right"} if slanted else {}
    axes.set_xticks(range(len(one.columns)), one.columns)
    axes.tick_params(axis="x", labelsize=7)
    for label in axes.get_xticklabels():
        label.set(**turned)
    axes.set_ylabel("layer", fontsize=7.5)
    axes.set_xlabel(one.across, fontsize=7.5)
    if one.values.size <= _MOST_CELLS:
        for row, column, value in _cells(one.values):
            bright = value > 0 and float(scale(value)) > 0.55
            colour = "#000000" if bright else "#FFFFFF"
            number = f"{value:.2g}" if value >= 0.01 else f"{value:.0e}".replace("e-0", "e-")
            axes.text(column, row, number, ha="center", va="center", fontsize=6.5, color=colour)


def _cells(values: np.ndarray[Any, np.dtype[np.float64]]) -> Iterator[tuple[int, int, float]]:
    for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
        yield int(row), int(column), float(values[row, column])
