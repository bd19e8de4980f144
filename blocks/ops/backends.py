"""How an op finds its backend: the first that can do what is needed, with a record of why not the others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from search_space.errors import UserError
from search_space.space import unknown

Run = TypeVar("Run")
Needs = TypeVar("Needs")


@dataclass(frozen=True, kw_only=True)
class Backend(Generic[Run, Needs]):
    """One implementation of an op."""

    name: str
    run: Run
    refuses: Callable[[Needs], str]
    """Why it cannot do what is needed; an empty string when it can."""


@dataclass(frozen=True, kw_only=True)
class Chosen(Generic[Run]):
    """The backend a block was built with."""

    name: str
    run: Run
    passed_over: dict[str, str]
    """Every other backend and why it was not taken."""

    @property
    def record(self) -> str:
        """The choice and its reasons in one line."""
        others = "; ".join(f"not {name}: {reason}" for name, reason in self.passed_over.items())
        return f"{self.name} ({others})" if others else self.name


class BackendError(UserError):
    """A backend that was asked for by name cannot do what is needed."""


def choose(op: str, backends: Sequence[Backend[Run, Needs]], needs: Needs, named: str = "auto") -> Chosen[Run]:
    """The first backend that can do what is needed, or exactly the named one.

    Raises BackendError when the named one is unknown or cannot, or when none can.
    """
    by_name = {backend.name: backend for backend in backends}
    refusals = {name: backend.refuses(needs) for name, backend in by_name.items()}
    able = [name for name in by_name if not refusals[name]]
    if named != "auto" and named not in by_name:
        raise BackendError(f"{op}: backend {named!r} {unknown('backend', named, by_name)}")
    if named != "auto" and refusals[named]:
        raise BackendError(
            f"{op}: backend {named!r} cannot be used: {refusals[named]}; backends that can: {', '.join(able) or 'none'}"
        )
    if not able:
        raise BackendError(f"{op}: no backend can run: {'; '.join(f'{name}: {refusals[name]}' for name in by_name)}")
    name = able[0] if named == "auto" else named
    others = {
        other: refusals[other] or (f"{name} was named" if named != "auto" else f"{name} comes first")
        for other in by_name
        if other != name
    }
    return Chosen(name=name, run=by_name[name].run, passed_over=others)
