"""What is done to single points of a space."""

from collections.abc import Mapping

from search_space import domains
from search_space.domains import Domain, Scalar
from search_space.space import Space, walk


def changed(full: Space, point: Mapping[str, Scalar], change: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The point with some paths changed; a variant that comes new takes its declared defaults.

    A change to a field of a variant that the point does not have changes nothing.
    """

    def ask(path: str, domain: Domain) -> Scalar:
        value = change.get(path, point.get(path, domain.default))
        return value if domains.contains(domain, value) else domain.default

    return walk(full, ask)
