"""The rules of searches whose trials copy each other: one model for all, settings that may change, a population."""

from collections.abc import Mapping
from typing import Any

from search_space.domains import FloatRange
from search_space.errors import Faults
from search_space.space import Space, searched

_MOST_NAMED = 4


def check_population(faults: Faults, fields: Mapping[str, Any]) -> None:
    """Record every broken rule whose parts are sound in themselves."""
    search, space = fields["search"], fields["space"]
    kind = search.pruner.kind
    if faults.clean("search.sampler") and search.sampler != "random":
        faults.add(
            "search.sampler",
            f"takes random with {kind}: a trial that went on from another one's state does not show what its own "
            f"point is worth, so no sampler can learn from it; got {search.sampler}, write random",
            also=("search.pruner",),
        )
    if faults.clean(*space.fields, "search.pruner"):
        _check_space(faults, kind, space, fields["full"])
    members = min(search.population, search.trials)
    if faults.clean("search") and int(members * search.pruner.quantile) < 1:
        faults.add(
            f"search.pruner.{kind}.quantile",
            f"must hold one of the trials that copy each other ({members}, the smaller of search.population and "
            f"search.trials); got {search.pruner.quantile:g}, write {1 / members:.3g} or a larger population",
            also=("search.population", "search.trials"),
        )
    if fields["baseline"] and faults.clean("baseline"):
        faults.add(
            "baseline",
            f"has no place among trials that copy each other ({kind}); remove it, or write another pruner",
            also=("search.pruner",),
        )
    final = fields["final"]
    if (final.contrasts or final.contest.top) and faults.clean("final"):
        faults.add(
            "final",
            f"trains a candidate again under the settings it was proposed with, which {kind} changes on the way; "
            "remove it, or write another pruner",
            also=("search.pruner",),
        )


def _check_space(faults: Faults, kind: str, space: Space, full: Space) -> None:
    may_change = [path for path, domain in searched(full).items() if isinstance(domain, FloatRange) and domain.live]
    domains = searched(space)
    good = [path for path, domain in domains.items() if isinstance(domain, FloatRange) and domain.live]
    bad = [path for path in domains if path not in good]
    if bad:
        more = f" and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
        faults.add(
            "search.pruner",
            f"{kind} copies weights from trial to trial and changes settings in mid-training, so all trials have one "
            f"model and only ranges of {', '.join(may_change)} are searched; also searched here: "
            f"{', '.join(bad[:_MOST_NAMED])}{more}; fix each to one value, or write another pruner",
        )
    elif not good:
        faults.add(
            "search.pruner",
            f"{kind} has nothing to change, every setting is fixed; write a range {{low: ..., high: ...}} for one or "
            f"more of {', '.join(may_change)}",
        )
