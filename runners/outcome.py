"""How a search stands when its driver returns."""

from collections.abc import Mapping
from dataclasses import dataclass

from runners.finals import FinalOutcome
from search_space.records import Status


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """How a search stands when its driver returns."""

    name: str
    parent: str
    """Id of the search's parent run."""
    interrupted: str
    """Name of the signal that ended it; empty when it ended by itself."""
    ended: str
    """Why no further trial was started."""
    counts: Mapping[Status, int]
    """Trials of the search stage by status, earlier drivers included."""
    running: int
    """Trials that were cut off; the same command runs them again."""
    best_number: int
    """-1 when no trial is ok."""
    best_loss: float
    finals: tuple[FinalOutcome, ...]
    seconds: float
    """Wall clock of this driver."""
    unshown: int = 0
    """Ends, of trials and of the search itself, that the tracking store does not show: it could not be written."""
