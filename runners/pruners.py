"""From an experiment to its pruner."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from runners.population import Population
from runners.pruning import AbstractPruner, Asha, Hyperband, Median, NoPruner

if TYPE_CHECKING:
    from search_space.experiment import Experiment


def make_pruner(experiment: "Experiment") -> AbstractPruner:
    """The pruner an experiment asks for, with nothing observed yet."""
    pruner, tokens = experiment.search.pruner, experiment.budget.tokens
    makers: dict[str, Callable[[], AbstractPruner]] = {
        "none": NoPruner,
        "asha": lambda: Asha(grace_tokens=pruner.grace_tokens, factor=pruner.factor, budget_tokens=tokens),
        "hyperband": lambda: Hyperband(grace_tokens=pruner.grace_tokens, factor=pruner.factor, budget_tokens=tokens),
        "pbt": lambda: Population.of(experiment),
        "median": lambda: Median(grace_tokens=pruner.grace_tokens, budget_tokens=tokens),
    }
    return makers[pruner.kind]()
