"""The report of a ladder: one page for a browser, the same in Markdown, and its picture."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from analysis import drawing
from analysis.extrapolation import Mixture
from analysis.ladder import Ladder, Training, cautions, check_text, curve_of, gap_of
from analysis.ladder_plots import grid, ladder_figure
from analysis.projection import Projection, chance_text, size_text
from analysis.report.charts import Chart
from analysis.report.document import (
    Block,
    Cell,
    Command,
    Document,
    Picture,
    Points,
    Section,
    Table,
    Words,
    markdown_page,
)
from analysis.report.page import html_page
from analysis.report.sections import FIRST
from search_space.records import Stage

PICTURE = "ladder.png"


def write_ladder_report(ladder: Ladder, found: Sequence[Projection], out: Path) -> Path:
    """Write report.html, report.md and a PNG into the folder `out` (made if missing); the path of report.html."""
    out.mkdir(parents=True, exist_ok=True)
    drawing.save(ladder_figure(ladder, found), out / PICTURE)
    told = document(ladder, found)
    (out / "report.md").write_text(markdown_page(told), encoding="utf-8")
    page = out / "report.html"
    page.write_text(html_page(told), encoding="utf-8")
    return page


def document(ladder: Ladder, found: Sequence[Projection]) -> Document:
    """The whole report."""
    sizes = sorted({one.rung for one in ladder.trainings})
    lead = (
        f"{len(ladder.candidates)} candidates at {', '.join(map(size_text, sizes))} parameters, "
        f"{len(ladder.trainings)} trainings; losses are {ladder.unit}, lower is better. What is said of "
        f"{size_text(ladder.target)} is carried on from these sizes: nothing of that size was trained."
    )
    checks = [f"{check_text(projection)}." for projection in found if projection.check is not None]
    return Document(
        title=ladder.name,
        lead=[lead],
        sections=[
            Section(title=FIRST, blocks=_verdicts(ladder, found), short=FIRST),
            Section(title="Over size", blocks=_pictures(ladder, found), short="Over size"),
            Section(title="How far to trust it", blocks=_trust(ladder, found, checks), short="Trust"),
            Section(title="Trainings", blocks=[_trainings(ladder)], short="Trainings"),
            Section(title="Rules", blocks=[Points(items=ladder.rules)], short="Rules"),
            Section(title="Replay", blocks=_replay(ladder)),
        ],
    )


def _verdicts(ladder: Ladder, found: Sequence[Projection]) -> list[Block]:
    taken = [f"{label}: the candidate of {run}" for label, run in ladder.candidates.items()]
    said = (
        f"A winner is named from a probability of {ladder.sure:g}. Probabilities are of each pair by itself; the "
        f"interval is of the loss of the first minus that of the second at the target."
    )
    return [Points(items=[f"{projection.text}." for projection in found]), Words(text=said), Points(items=taken)]


def _pictures(ladder: Ladder, found: Sequence[Projection]) -> list[Block]:
    level = f"{found[0].level:.0%}" if found else ""
    seeds = max((one.replica for one in ladder.trainings), default=0) + 1
    about = (
        f"n={len(ladder.trainings)} trainings, up to {seeds} seeds a size. Line and band: expected, {level} interval"
    )
    note = f"{about} of the curve itself, over several forms. Nothing was trained at the target."
    blocks: list[Block] = [
        Picture(title="Loss against size", note=note, file=PICTURE, chart=_curves_chart(ladder)),
    ]
    gaps = _gaps_chart(ladder)
    if gaps["items"]:
        note = f"Dots: one pair of seeds each. {about}. Below 0 the first named is better."
        blocks.append(Picture(title="Paired differences against size", note=note, chart=gaps))
    return blocks


def _trust(ladder: Ladder, found: Sequence[Projection], checks: Sequence[str]) -> list[Block]:
    items = [*checks, *(f"{words}." for words in cautions(ladder))]
    rows: list[list[Cell]] = [
        [f"{projection.first} minus {projection.second}", form, (chance_text(share), share)]
        for projection in found
        for form, share in sorted(projection.forms.items(), key=lambda pair: -pair[1])
    ]
    note = (
        "How probable each form of the difference is after what was measured; the verdict averages over all of them. "
        "`python benchmarks/ladder.py` measures on simulated families how often such probabilities come true."
    )
    table = Table(header=["difference", "form", "probability"], rows=rows, name="Forms", note=note)
    return [*([Points(items=items)] if items else []), *([table] if rows else [])]


def _trainings(ladder: Ladder) -> Table:
    rows: list[list[Cell]] = [
        [
            f"{ladder.name}/{Stage.LADDER}/{one.number}",
            one.candidate,
            (size_text(one.rung), float(one.rung)),
            (f"#{one.replica}", float(one.replica)),
            one.status,
            (f"{one.loss:.4f}" if one.loss == one.loss else "", one.loss),
            *_shape(one),
        ]
        for one in ladder.trainings
    ]
    header = ["run", "candidate", "size", "seed", "status", f"loss ({ladder.unit})", "parameters", "d_model", "layers"]
    header += ["tokens", "learning rate", "seconds"]
    return Table(header=header, rows=rows, sorts=True, name="Every training of the ladder")


def _shape(one: Training) -> list[Cell]:
    return [
        (f"{one.params:,.0f}" if one.params == one.params else "", one.params),
        (str(one.d_model), float(one.d_model)),
        (str(one.layers), float(one.layers)),
        (f"{one.tokens:,.0f}" if one.tokens == one.tokens else "", one.tokens),
        (f"{one.learning_rate:.3g}", one.learning_rate),
        (f"{one.seconds:.1f}" if one.seconds == one.seconds else "", one.seconds),
    ]


def _replay(ladder: Ladder) -> list[Block]:
    said = "Any training is trained again from the store alone and compared bit for bit, by its name in the table:"
    numbers = [one.number for one in ladder.trainings][:1]
    return [Words(text=said), *(Command(line=f"assay replay {ladder.name}/{Stage.LADDER}/{n}") for n in numbers)]


def _curves_chart(ladder: Ladder) -> Chart:
    """Every loss by candidate, with what is believed of each curve up to the target."""
    places = grid(ladder)
    items = [
        _item(one.candidate, float(one.rung), one.loss, f"{ladder.name}/{Stage.LADDER}/{one.number}")
        for one in ladder.trainings
        if one.loss == one.loss
    ]
    fits = {}
    for label in ladder.candidates:
        believed = curve_of(ladder, label, places)
        if believed is not None:
            fits[label] = _fit(places, believed, 2 * ladder.sure - 1)
            items += _at_target(ladder, label, fits[label][-1])
    return _chart("Loss against size", f"loss ({ladder.unit})", items, fits, [])


def _gaps_chart(ladder: Ladder) -> Chart:
    """Every paired difference by pair of candidates, with what is believed of it up to the target."""
    places, items, fits = grid(ladder), [], {}
    for one, other in combinations(ladder.candidates, 2):
        name, first, second = f"{one} minus {other}", ladder.losses(one), ladder.losses(other)
        for size in sorted(first.keys() & second.keys()):
            for replica in sorted(first[size].keys() & second[size].keys()):
                items.append(_item(name, size, first[size][replica] - second[size][replica], f"seed {replica}"))
        gap = gap_of(ladder, one, other, places)
        if gap is not None:
            fits[name] = _fit(places, gap[1], 2 * ladder.sure - 1)
            items += _at_target(ladder, name, fits[name][-1])
    level = [{"y": 0.0, "label": "no difference"}]
    return _chart("Paired differences against size", f"difference of loss ({ladder.unit})", items, fits, level)


def _at_target(ladder: Ladder, name: str, last: list[float]) -> list[dict[str, object]]:
    """What is expected at the target, and the ends of its interval, as points that the page keeps in view."""
    words = (f"expected of {name}", f"{name}: lower end", f"{name}: upper end")
    group = f"at {size_text(ladder.target)}: expected, ends of the interval"
    return [_item(group, last[0], value, said) for value, said in zip(last[1:], words, strict=True)]


def _item(group: str, size: float, value: float, words: str) -> dict[str, object]:
    return {"g": [group], "l": f"{group}\n{words}", "s": "", "m": "", "e": "", "x": [size], "y": value}


def _fit(places: Sequence[float], believed: Mixture, level: float) -> list[list[float]]:
    return [[size, believed.mean(place), *believed.interval(level, place)] for place, size in enumerate(places)]


def _chart(
    label: str,
    axis: str,
    items: list[dict[str, object]],
    fits: dict[str, list[list[float]]],
    levels: list[dict[str, object]],
) -> Chart:
    return {
        "kind": "xy",
        "label": label,
        "x": [{"label": "parameters", "log": True}],
        "y": axis,
        "by": ["candidate"],
        "items": items,
        "fits": [fits],
        "error": 0,
        "levels": levels,
    }
