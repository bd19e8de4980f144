"""Faults in an experiment file: collected while it is read, located, and raised together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

MOST_LISTED = 25
MOST_CHARACTERS = 700
MOST_COLLECTED = 100


class UserError(ValueError):
    """Something asked for cannot be done as asked; the message says where, the rule, the values and the remedy."""


class WorkError(RuntimeError):
    """The work failed through no mistake in what was asked; the command line prints the message and exits with 1."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault: where it is, and the rule, the value and the remedy in words."""

    file: str
    """The file, or the override ('--set path=value') that brought the value in."""
    line: int
    """Counted from 1; 0 when the value came from an override or the file could not be read at all."""
    path: str
    """Dotted path of the key; empty when the fault is in the text itself."""
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.path} {self.message}" if self.path else f"{place}: {self.message}"


class ExperimentError(UserError):
    """An experiment file that cannot be used; `problems` holds every independent fault found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems[:MOST_LISTED]]
        if len(self.problems) > MOST_LISTED:
            lines.append(f"... and {len(self.problems) - MOST_LISTED} more; correct these first")
        super().__init__("\n".join(lines))


class Located(Protocol):
    """Knows where a path of an experiment stands."""

    def where(self, path: str, item: int | None = None) -> tuple[str, int]: ...


class Faults:
    """Collects problems, so that one reading of a file reports them all."""

    def __init__(self, source: Located) -> None:
        self._source = source
        self._problems: list[Problem] = []

    def add(self, path: str, message: str, *, item: int | None = None, also: tuple[str, ...] = ()) -> None:
        """Record a fault at a path; where an override set one of the paths in `also`, the fault is laid to it."""
        places = [self._source.where(path, item), *(self._source.where(other) for other in also)]
        file, line = next((place for place in places if not place[1]), places[0])
        if len(message) > MOST_CHARACTERS:
            message = f"{message[: MOST_CHARACTERS // 2]} [...] {message[-MOST_CHARACTERS // 2 :]}"
        self._problems.append(Problem(file=file, line=line, path=path, message=message))
        if len(self._problems) >= MOST_COLLECTED:
            self.raise_any()

    def clean(self, *paths: str) -> bool:
        """True when no fault lies at, above or below any of the paths: rules across fields are checked only then."""
        return not any(
            problem.path == path or problem.path.startswith(f"{path}.") or path.startswith(f"{problem.path}.")
            for path in paths
            for problem in self._problems
        )

    def __len__(self) -> int:
        return len(self._problems)

    def raise_any(self) -> None:
        """Raise ExperimentError when there is at least one fault, in the order of the file."""
        if self._problems:
            raise ExperimentError(sorted(dict.fromkeys(self._problems), key=lambda problem: problem.line))
