"""Canonical JSON, digests, and the flat form {path: scalar} that crosses every boundary."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from search_space.domains import Scalar

CANON_VERSION = 1


def canonical_json(value: Any) -> str:
    """The one JSON text of a plain value: sorted keys, no spaces, shortest floats; refuses NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """Twelve hex digits of the sha256 of the versioned canonical JSON."""
    text = canonical_json({"canon": CANON_VERSION, "value": value})
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """{'a': {'b': 1}} as {'a.b': 1}; leaves are scalars."""
    flat: dict[str, Scalar] = {}
    for key, value in nested.items():
        assert "." not in key, f"key {key!r} holds a dot"
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{path}."))
        else:
            assert isinstance(value, str | int | float | bool), f"{path} is {type(value).__name__}, not a scalar"
            flat[path] = value
    return flat


def unflatten(flat: Mapping[str, Scalar]) -> dict[str, Any]:
    """The inverse of flatten."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return nested


def seed_from(*parts: str | int) -> int:
    """A 63-bit seed that depends on every part; equal in every process and on every platform."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
