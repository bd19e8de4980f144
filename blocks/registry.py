"""The registry of block variants: a config class per variant, found by family and kind."""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, TypeVar

from search_space.canon import digest
from search_space.domains import Scalar
from search_space.space import unknown

Config = TypeVar("Config", bound=type[Any])

_VARIANTS: dict[type, dict[str, type[Any]]] = {}
_PACKAGES = ("mixers", "premixers", "positions", "ffn", "norms", "placements", "inits")
_MODULES = ("pattern", "residual", "looped", "hyper_connections", "gated_residual", "stacks", "encoder_decoder")


def register(config: Config) -> Config:
    """Class decorator: adds a frozen config dataclass to its family under its `kind`.

    The family is the root of the abstract class it derives from directly. Raises ValueError when the kind is taken.
    """
    family = family_of(config)
    kinds = _VARIANTS.setdefault(family, {})
    other = kinds.get(config.kind)
    if other is not None and (other.__module__, other.__qualname__) != (config.__module__, config.__qualname__):
        raise ValueError(
            f"{config.__module__}.{config.__name__}: kind {config.kind!r} of {family.__name__} is taken by "
            f"{other.__module__}.{other.__name__}; choose another kind"
        )
    if not getattr(config, "paper", "") or not (config.__doc__ or "").strip():
        raise ValueError(f"{config.__module__}.{config.__name__} has no paper or no docstring; both are shown to users")
    kinds[config.kind] = config
    return config


def family_of(config: type) -> type:
    """The abstract family a config class belongs to: the root of the abstract class it derives from."""
    (abstract,) = (base for base in config.__bases__ if base.__name__.startswith("Abstract"))
    return [base for base in abstract.__mro__ if base.__name__.startswith("Abstract")][-1]


def variants(family: type) -> Mapping[str, type[Any]]:
    """Registered config classes of a family by kind, in alphabetical order."""
    _load_builtin()
    return dict(sorted(_VARIANTS.get(family, {}).items()))


def lookup(family: type, kind: str) -> type:
    """The config class of a kind; ValueError with near matches when there is none."""
    known = variants(family)
    if kind not in known:
        raise ValueError(f"{kind!r} {unknown('kind of ' + family.__name__, kind, known)}")
    return known[kind]


def load_modules(modules: tuple[str, ...]) -> None:
    """Import the user's own block modules, so that their variants are registered."""
    for module in modules:
        importlib.import_module(module)


@functools.cache
def _load_builtin() -> None:
    for module in _MODULES:
        importlib.import_module(f"blocks.{module}")
    for package in _PACKAGES:
        parent = importlib.import_module(f"blocks.{package}")
        for found in pkgutil.iter_modules(parent.__path__):
            importlib.import_module(f"blocks.{package}.{found.name}")


def registered_by(modules: tuple[str, ...]) -> frozenset[str]:
    """The kinds that these modules, or modules inside them, have registered."""
    return frozenset(
        kind
        for kinds in _VARIANTS.values()
        for kind, config in kinds.items()
        if any(config.__module__ == module or config.__module__.startswith(f"{module}.") for module in modules)
    )


def encode(config: Any) -> dict[str, Any]:
    """The nested plain dict of a config: a family member is {'kind': k, k: {fields}}."""
    plain: dict[str, Any] = {}
    for declared in dataclasses.fields(config):
        value = getattr(config, declared.name)
        if "family" in declared.metadata:
            plain[declared.name] = {"kind": value.kind, value.kind: encode(value)}
        elif "nested" in declared.metadata:
            plain[declared.name] = encode(value)
        else:
            plain[declared.name] = value
    return plain


def decode(config: type, plain: Mapping[str, Any], **context: Scalar) -> Any:
    """The config of a nested plain dict; `context` fills fields that no space holds (such as vocab_size).

    Raises ValueError for unknown or missing fields and whatever the config's own checks raise.
    """
    given = {**plain, **context}
    declared = {entry.name: entry for entry in dataclasses.fields(config)}
    for name in given:
        if name not in declared:
            raise ValueError(f"{config.__name__}.{name} {unknown('field', name, declared)}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        marks = declared[name].metadata
        if "family" in marks:
            values[name] = decode(lookup(marks["family"], value["kind"]), value.get(value["kind"], {}))
        elif "nested" in marks:
            values[name] = decode(marks["nested"], value)
        else:
            values[name] = value
    missing = [
        name
        for name, entry in declared.items()
        if name not in values and entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{config.__name__} lacks {', '.join(missing)}; give a value to each")
    return config(**values)


def identity(config: Any) -> dict[str, Any]:
    """What decides a config's numbers: `encode` without sizing fields and without fields at their neutral value."""
    plain: dict[str, Any] = {}
    for declared in dataclasses.fields(config):
        value = getattr(config, declared.name)
        marks = declared.metadata
        if marks.get("sizing") or ("neutral" in marks and marks["neutral"] == _comparable(value, marks)):
            continue
        if "family" in marks:
            plain[declared.name] = {"kind": value.kind, value.kind: identity(value)}
        elif "nested" in marks:
            plain[declared.name] = identity(value)
        else:
            plain[declared.name] = value
    return plain


def _comparable(value: Any, marks: Mapping[str, Any]) -> Any:
    """A scalar as it is, a family member by its kind."""
    return value.kind if "family" in marks else value


def config_id(config: Any) -> str:
    """Twelve hex digits that name the config's identity."""
    return digest(identity(config))
