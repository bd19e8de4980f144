"""A report as one HTML file: style, script and data inside it, and a policy that forbids it to ask any other host."""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from analysis.report.document import (
    Answers,
    Block,
    Board,
    Cell,
    Command,
    Document,
    Picture,
    Points,
    Section,
    Table,
    Words,
    clean,
    shown,
)

_HERE = Path(__file__).parent
_SCRIPTS = ("svg.js", "charts.js", "page.js")
_CODE = re.compile(r"`([^`]+)`")
_PLUS = re.compile(r"(?<=[\w)])\+(?=[a-z])")
"""Where a long name of a candidate may go on in the next line."""
_WIDE = 28
"""Characters from which a column of words keeps a width of its own."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}: report</title>
<style>
{style}
</style>
</head>
<body>
<header><div><strong>{title}</strong><nav aria-label="Sections">{links}</nav>\
<button type="button" id="theme" hidden>light / dark</button></div></header>
<main>
<h1>{title}</h1>
{body}
</main>
<footer>{foot}</footer>
<div id="tip" role="tooltip" hidden></div>
<script type="application/json" id="charts">{charts}</script>
<script>{script}</script>
</body>
</html>
"""
_FOOT = "Made by <code>assay report</code> from the tracking store alone. The file asks no other host for anything."


def html_page(document: Document) -> str:
    """The document as a page of its own."""
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    sections = document.sections
    charts = {
        _key(section, place): block.chart
        for section in sections
        for place, block in enumerate(section.blocks)
        if isinstance(block, Picture) and block.chart
    }
    return _PAGE.format(
        policy=policy,
        title=html.escape(clean(document.title)),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        links="".join(f'<a href="#{_anchor(part)}">{_text(part.short)}</a>' for part in sections if part.short),
        body="\n".join([*(f"<p>{_text(words)}</p>" for words in document.lead), *map(_section, sections)]),
        foot=_FOOT,
        charts=json.dumps(_plain(charts), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029"),
        script=script,
    )


@cache
def _script() -> str:
    return "\n".join((_HERE / file).read_text(encoding="utf-8") for file in _SCRIPTS)


def _section(section: Section) -> str:
    parts = [f'<section aria-labelledby="{_anchor(section)}"><h2 id="{_anchor(section)}">{_text(section.title)}</h2>']
    parts += [_block(block, _key(section, place)) for place, block in enumerate(section.blocks)]
    return "\n".join([*filter(None, parts), "</section>"])


def _block(block: Block, key: str) -> str:
    match block:
        case Words():
            return f"<p>{_text(block.text)}</p>"
        case Points():
            return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in block.items) + "</ul>"
        case Command():
            return _command(block)
        case Answers():
            return '<dl class="answers">' + "".join(_answer(*item) for item in block.items) + "</dl>"
        case Table():
            return _table(block)
        case Board():
            return _table(block.whole)
        case Picture():
            return _figure(block, key) if block.chart else ""


def _figure(picture: Picture, key: str) -> str:
    return (
        f'<figure data-chart="{key}"><h3>{_text(picture.title)}</h3><div class="controls"></div>'
        f'<div class="plot"><noscript>Charts need scripts; the tables and report.md say the same.</noscript></div>'
        f"<figcaption>{_text(picture.note)}</figcaption></figure>"
    )


def _answer(question: str, answers: "Sequence[str | Command]") -> str:
    parts = (_command(part) if isinstance(part, Command) else f"<p>{_text(part)}</p>" for part in answers)
    return f"<div><dt>{_text(question)}</dt><dd>{''.join(parts)}</dd></div>"


def _command(command: Command) -> str:
    line = html.escape(clean(command.line))
    return f'<div class="command"><code>{line}</code><button type="button" hidden>copy</button></div>'


def _table(table: Table) -> str:
    numbers = [
        all(not shown(row[k]) or not isinstance(row[k], str) for row in table.rows) for k in range(len(table.header))
    ]
    wide = [any(len(shown(row[k])) >= _WIDE for row in table.rows) for k in range(len(table.header))]
    kinds = [' class="n"' if n else ' class="w"' if w else "" for n, w in zip(numbers, wide, strict=True)]
    head = "".join(f'<th scope="col"{kind}>{_text(name)}</th>' for name, kind in zip(table.header, kinds, strict=True))
    rows = [
        f"<tr{' class=baseline' if place in table.marked else ''}>"
        + "".join(
            f"<td{kind}{_sorted_by(cell)}>{_text(shown(cell))}</td>" for cell, kind in zip(row, kinds, strict=True)
        )
        + "</tr>"
        for place, row in enumerate(table.rows)
    ]
    note = f"<p>{_text(table.note)}</p>" if table.note else ""
    return (
        f'{note}<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(clean(table.name))}">'
        f"<table{' class=sorts' if table.sorts else ''}><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _sorted_by(cell: Cell) -> str:
    if isinstance(cell, str):
        return ""
    return f' data-v="{cell[1]!r}"' if math.isfinite(cell[1]) else ' data-v=""'


def _text(text: str) -> str:
    """Words as HTML that cannot be anything but words, with their code marked as code."""
    return _CODE.sub(r"<code>\1</code>", _PLUS.sub("+<wbr>", html.escape(clean(text))))


def _anchor(section: Section) -> str:
    return re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")


def _key(section: Section, place: int) -> str:
    return f"{_anchor(section)}-{place}"


def _plain(value: Any) -> Any:
    """JSON data: what is no number is null, and floats keep six digits."""
    if isinstance(value, Mapping):
        return {clean(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, str):
        return "\n".join(map(clean, value.split("\n")))
    if isinstance(value, Sequence):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
