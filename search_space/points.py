"""What is done to single points of a space."""

from collections.abc import Mapping

from search_space import domains
from search_space.domains import Domain, Scalar
from search_space.space import OneOf, Space, join, walk


def defaults(space: Space, prefix: str = "") -> dict[str, Scalar]:
    """The default at every path of the space, live or conditional: the declared one unless the file excludes it."""
    found: dict[str, Scalar] = {}
    for name, node in space.fields.items():
        path = join(prefix, name)
        if isinstance(node, Space):
            found.update(defaults(node, path))
        elif isinstance(node, OneOf):
            found[f"{path}.kind"] = node.default
            for kind, variant in node.variants.items():
                found.update(defaults(variant, join(path, kind)))
        else:
            found[path] = node.default
    return found


def changed(full: Space, space: Space, point: Mapping[str, Scalar], change: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The point of the full space with some paths changed.

    A variant that comes new takes the defaults of the narrowed space, so what a file fixes stays fixed; a change to a
    field of a variant that the point does not have changes nothing.
    """
    known = {**defaults(space), **point, **change}

    def ask(path: str, domain: Domain) -> Scalar:
        value = known.get(path, domain.default)
        return value if domains.contains(domain, value) else domain.default

    return walk(full, ask)
