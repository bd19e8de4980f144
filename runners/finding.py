"""The way from draws to a trial: the first point that is new, legal, within every limit, and not likely to fail."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from blocks.families import InfeasibleArchitecture
from runners.candidate import Resolved
from runners.feasibility import Vetted
from search_space.canon import canonical_json, digest
from search_space.domains import Scalar
from search_space.records import TrialSpec
from search_space.space import Space, enumerate_all, size

MOST_DRAWS = 2000
"""Draws for one trial before the search gives up finding a new legal point."""
DRAWS_BEFORE_COUNTING = 200
MOST_COUNTED = 100_000
"""A finite space of at most so many points is gone through before it is called used up."""

Found = tuple[Resolved, TrialSpec]


class Finder:
    """Judges draws; knows the points and candidates that were tried, and remembers what it refused."""

    def __init__(
        self, space: Space, resolve: Callable[[Mapping[str, Scalar]], Found], check: Callable[[TrialSpec], None]
    ) -> None:
        """`resolve` and `check` raise InfeasibleArchitecture; `check` is the costly one and comes last."""
        self.ended = ""
        """Why the last search for a point found none."""
        self._space = space
        self._resolve = resolve
        self._check = check
        self._refused: dict[str, str] = {}
        self._points: set[str] = set()
        self._candidates: set[str] = set()

    def know(self, point: Mapping[str, Scalar], candidate: Mapping[str, Any]) -> None:
        """The point, and what was resolved from it, were tried."""
        self._points.add(canonical_json(dict(point)))
        self._candidates.add(digest(candidate))

    def find(self, draws: Vetted, *, ends: bool) -> tuple[Found | None, dict[str, int]]:
        """The first new legal point of the draws, and how many were refused for which reason.

        `ends` says that the draws end by themselves, after every point of the space.
        """
        refused: Counter[str] = Counter()
        for point in draws:
            found, reason = self._judge(point)
            if found is not None:
                return found, {**refused, **draws.counted()}
            refused[reason] += 1
            total = refused.total()
            if total >= DRAWS_BEFORE_COUNTING and size(self._space) <= MOST_COUNTED and not ends:
                return self._find_any(refused, draws)
            if total >= MOST_DRAWS and not ends:
                last = self._refused.get(canonical_json(point), "")
                self.ended = f"no new legal point in {total} draws ({dict(refused)}); the last: {last or 'known'}"
                return None, dict(refused)
        self.ended = self._used_up()
        return None, dict(refused)

    def _find_any(self, refused: Counter[str], draws: Vetted) -> tuple[Found | None, dict[str, int]]:
        """Go through a finite space for a new legal point."""
        for point in draws.rather(lambda: enumerate_all(self._space)):
            found, _ = self._judge(point)
            if found is not None:
                return found, {**refused, **draws.counted(), "enumerated": 1}
        self.ended = self._used_up()
        return None, dict(refused)

    def _used_up(self) -> str:
        points = f"{size(self._space):.0f} points in all"
        refused = [why for why in self._refused.values() if why]
        if self._points:
            return f"every distinct legal point of the space was tried ({points})"
        return f"none of the points of the space can be trained ({points}); the last that was refused: {refused[-1]}"

    def _judge(self, point: Mapping[str, Scalar]) -> tuple[Found | None, str]:
        """The resolved point, or None and the reason against it."""
        key = canonical_json(dict(point))
        if key in self._points:
            return None, "duplicate"
        if key in self._refused:
            return None, "infeasible" if self._refused[key] else "duplicate"
        try:
            resolved, spec = self._resolve(point)
            if digest(spec.candidate) in self._candidates:
                self._refuse(key, "")
                return None, "duplicate"
            self._check(spec)
        except InfeasibleArchitecture as error:
            self._refuse(key, str(error))
            return None, "infeasible"
        return (resolved, spec), ""

    def _refuse(self, key: str, why: str) -> None:
        if len(self._refused) < MOST_COUNTED:
            self._refused[key] = why
