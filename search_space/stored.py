"""Spaces as stored data: complete, so that a space can be rebuilt without the registry it was derived from."""

from collections.abc import Mapping
from typing import Any

from search_space import domains
from search_space.domains import Choice, Domain, FloatRange, IntRange
from search_space.space import OneOf, Space, join, plain

Node = Domain | OneOf | Space


def space_to_plain(node: Node) -> dict[str, Any]:
    """The tree as JSON data with its defaults, without help texts."""
    if isinstance(node, Space):
        return {"space": {name: space_to_plain(child) for name, child in node.fields.items()}}
    if isinstance(node, OneOf):
        variants = {kind: space_to_plain(child) for kind, child in node.variants.items()}
        return {"one_of": variants, "default": node.default, "opt_in": node.opt_in}
    live = {"live": node.live} if isinstance(node, FloatRange) and node.live else {}
    return {**plain(node), "default": node.default, "opt_in": node.opt_in, **live}


def space_from_plain(stored: Mapping[str, Any]) -> Space:
    """The inverse of space_to_plain for a space."""
    return Space(fields={name: _node(child) for name, child in stored["space"].items()})


def _node(stored: Mapping[str, Any]) -> Node:
    if "space" in stored:
        return space_from_plain(stored)
    shared = {"default": stored["default"], "opt_in": stored["opt_in"]}
    if "one_of" in stored:
        return OneOf(variants={kind: space_from_plain(child) for kind, child in stored["one_of"].items()}, **shared)
    if "options" in stored:
        return Choice(options=tuple(stored["options"]), **shared)
    if "int" in stored:
        low, high = stored["int"]
        return IntRange(low=low, high=high, step=stored["step"], log=stored["log"], **shared)
    low, high = stored["float"]
    return FloatRange(low=low, high=high, log=stored["log"], live=stored.get("live", ""), **shared)


def described(node: Node, path: str = "") -> dict[str, str]:
    """{path: what can be drawn there, in the words of a file}; a family's path lists its variants."""
    if isinstance(node, Space):
        return {
            p: text for name, child in node.fields.items() for p, text in described(child, join(path, name)).items()
        }
    if isinstance(node, OneOf):
        below = {
            p: text for kind, child in node.variants.items() for p, text in described(child, join(path, kind)).items()
        }
        return {path: ", ".join(sorted(node.variants)), **below}
    return {path: domain_words(node)}


def domain_words(domain: Domain) -> str:
    """What a domain holds, in the words of a file."""
    if isinstance(domain, Choice):
        return " or ".join(words(option) for option in domain.options)
    return domains.describe(domain)


def words(value: Any) -> str:
    """A plain value in the words of a file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value)) or "nothing"
    return "nothing" if value in ({}, "") else str(value)
