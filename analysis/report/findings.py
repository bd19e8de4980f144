"""What a report is written from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.diagnostics import Looked
from analysis.effects import Effects
from analysis.frame import Search
from analysis.report.document import Block, Picture
from analysis.verdicts import Contrast


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the analysis found, and the pictures that were drawn of it."""

    search: Search
    effects: Effects
    contrasts: Sequence[Contrast]
    looked: Sequence[Looked]
    files: frozenset[str]
    """Names of the PNG files beside the report."""

    def picture(self, file: str, title: str, note: str, chart: Mapping[str, Any]) -> list[Block]:
        """A figure, where its file was drawn."""
        return [Picture(title=title, note=note, file=file, chart=chart)] if file in self.files else []
