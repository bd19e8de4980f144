"""The parts a report is made of, and how they read in Markdown; analysis.report.page turns the same parts into HTML.

Texts are plain words of any origin: both writers escape them. Only `backticks` have a meaning: what they hold is code.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Cell = str | tuple[str, float]
"""What is shown, and for a quantity what is sorted by; NaN sorts last."""
_UNSAID = ("Cc", "Cs", "Co", "Cn")
"""Unicode categories that no reader sees: controls, halves of characters, what is not assigned."""
_TURNING = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Characters that turn the direction of the text after them."""
_CODE = re.compile(r"(`[^`]+`)")


@dataclass(frozen=True, kw_only=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Points:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Questions with their answers, a paragraph each; a command among them is copied by a button."""

    items: Sequence[tuple[str, Sequence["str | Command"]]]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A line to type into a shell."""

    line: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    sorts: bool = False
    """True where the page lets its reader sort and filter."""
    marked: frozenset[int] = frozenset()
    """Rows that stand out."""
    name: str = ""
    """What the table is, for those who hear the page."""
    note: str = ""
    """What must be known to read it."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """A table that is longer and wider on the page than in Markdown."""

    brief: Table
    whole: Table


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure: a PNG file in Markdown, a chart on the page; either may be missing."""

    title: str
    note: str
    """Units, numbers of trials and what the intervals are."""
    file: str = ""
    chart: Mapping[str, Any] = field(default_factory=dict)


Block = Words | Points | Answers | Command | Table | Board | Picture


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Block]
    short: str = ""
    """Its name where room is scarce; empty for one that is reached by scrolling alone."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]


def clean(text: str) -> str:
    """The text on one line, without what cannot be seen or would turn the text around it."""
    spaced = " ".join(str(text).split())
    if spaced.isprintable():
        return spaced
    shown = "".join(sign for sign in spaced if unicodedata.category(sign) not in _UNSAID)
    return _TURNING.sub("", shown)


def shown(cell: Cell) -> str:
    """The words of a cell."""
    return cell if isinstance(cell, str) else cell[0]


def markdown_page(document: Document) -> str:
    """The document as Markdown."""
    parts = [f"# {_escaped(document.title)}", *map(_escaped, document.lead)]
    for section in document.sections:
        parts.append(f"## {_escaped(section.title)}")
        parts += filter(None, (_block(block) for block in section.blocks))
    return "\n\n".join(parts) + "\n"


def table_text(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([_escaped(shown(cell)) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _block(block: Block) -> str:
    match block:
        case Words():
            return _escaped(block.text)
        case Points():
            return "\n".join(f"- {_escaped(item)}" for item in block.items)
        case Command():
            return f"```\n{clean(block.line)}\n```"
        case Answers():
            return "\n\n".join(_answer(question, answers) for question, answers in block.items)
        case Table():
            note = [_escaped(block.note)] if block.note else []
            return "\n\n".join([*note, table_text(block.header, block.rows)])
        case Board():
            return _block(block.brief)
        case Picture():
            # A file says in itself what its bars are, which need not be what the page's chart draws.
            below = "" if block.chart else f"\n\n{_escaped(block.note)}"
            return f"![{_escaped(block.title)}]({block.file}){below}" if block.file else ""


def _answer(question: str, answers: "Sequence[str | Command]") -> str:
    said = [f"`{clean(part.line)}`" if isinstance(part, Command) else _escaped(part) for part in answers]
    return f"**{_escaped(question)}** " + "  \n".join(said)


def _escaped(text: str) -> str:
    """The text with nothing in it that Markdown would hand on as HTML; code is left as it is."""
    parts = _CODE.split(clean(text))
    return "".join(part if k % 2 else part.replace("&", "&amp;").replace("<", "&lt;") for k, part in enumerate(parts))
