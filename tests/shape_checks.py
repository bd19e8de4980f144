"""The checker of annotations in tests: an int is a float, as in type checkers; axes are compared where some are named.

jaxtyping binds the arguments of every function it wraps, which takes most of the time of small ones. Only functions
whose annotations name axes need that; the others are checked by beartype alone.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
_with_axes = jaxtyping.jaxtyped


def names_axes(function: Callable[..., Any]) -> bool:
    """Whether an annotation holds axes, or cannot be read yet."""
    try:
        hints = get_type_hints(function)
    except NameError:
        return True
    return any(_holds_axes(hint) for hint in hints.values())


def _holds_axes(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(_holds_axes(part) for part in (hint if isinstance(hint, list) else get_args(hint)))


def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    """Stands for jaxtyping.jaxtyped where the import hook calls it."""

    def wrap(thing: Any) -> Any:
        if inspect.isclass(thing):
            if dataclasses.is_dataclass(thing) and not names_axes(thing.__init__):
                thing.__init__ = typechecker(thing.__init__)
                return thing
        elif inspect.isfunction(thing) and not names_axes(thing):
            return typechecker(thing)
        return _with_axes(thing, typechecker=typechecker)

    return wrap


def install(package: str) -> None:
    """Check the annotations of a package that is not imported yet."""
    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook(package, "shape_checks.checked")
