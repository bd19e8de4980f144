"""Drawing a model's parameters: each by its role, under a rule of blocks.inits.

Query, key and value matrices are separate parameters: each is drawn by its own fans, never by those of a fused matrix.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from blocks.decoding import MixerSlot
from blocks.families import MATRICES, AbstractInit, Role
from search_space.canon import seed_from

TABLES = frozenset({Role.EMBEDDING, Role.POSITION})
"""Roles whose rows are vectors of the residual stream: fan_out is the model width."""
DRAWN = MATRICES | TABLES
"""Roles a rule draws; parameters of other roles start as built."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def initialise(
    model: nn.Module,
    rule: AbstractInit,
    layers: int,
    seed: int,
    sides: Mapping[str, tuple[AbstractInit, int]] = MappingProxyType({}),
) -> None:
    """Draw every parameter of a drawn role, each from its own generator seeded by (seed, parameter name).

    A shared parameter has one name and is drawn once, by the role it was marked with. Every parameter is given the
    rule's learning-rate factor. Parameters whose name begins like a side go by the rule and the layers of that side.
    """
    whole = (rule, layers)
    for name, parameter in model.named_parameters():
        role = role_of(name, parameter)
        fan_in, fan_out = parameter.fans  # type: ignore[attr-defined]
        rule, layers = _side(name, sides, whole)
        factor = rule.learning_rate_factor(role, fan_in, fan_out, layers)
        parameter.learning_rate_factor = factor  # type: ignore[attr-defined]
        if role not in DRAWN:
            continue
        assert min(fan_in, fan_out) > 0, f"{name} has role {role} and fans {fan_in}, {fan_out}; mark it with both"
        generator = torch.Generator().manual_seed(seed_from(seed, name))
        fill = rule.fill_table if role in TABLES else rule.fill
        with torch.no_grad():
            fill(parameter, rule.std_at(role, fan_in, fan_out, layers, layer_of(name)), generator)
    for name, slot in model.named_modules():
        rule, _ = _side(name, sides, whole)
        if isinstance(slot, MixerSlot) and slot.shape is not None:
            with torch.no_grad():
                rule.relate(related(slot.mixer), slot.shape, torch.Generator().manual_seed(seed_from(seed, name)))


def related(mixer: nn.Module) -> dict[Role, nn.Parameter]:
    """By role, the matrices of a mixer's maps called query, key, value and out; gates have roles of matrices too."""
    names = {"query": Role.QUERY, "key": Role.KEY, "value": Role.VALUE, "out": Role.MIXER_OUT}
    found: dict[Role, nn.Parameter] = {}
    for path, parameter in mixer.named_parameters():
        role = names.get(path.removesuffix(".weight").rpartition(".")[2])
        if role == role_of(path, parameter):
            found.setdefault(role, parameter)
    return found


def _side(
    name: str, sides: Mapping[str, tuple[AbstractInit, int]], whole: tuple[AbstractInit, int]
) -> tuple[AbstractInit, int]:
    return next((side for prefix, side in sides.items() if name.startswith(prefix)), whole)


def layer_of(name: str) -> int:
    """The layer, counted from 0, that a parameter of this name belongs to; 0 outside of layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found else 0


def role_of(name: str, parameter: nn.Parameter) -> Role:
    """The role a parameter was marked with; every parameter of a model has one."""
    role = getattr(parameter, "role", None)
    assert isinstance(role, Role), f"parameter {name} has no role; build it with families.linear or families.mark"
    return role


def learning_rate_factor(parameter: nn.Parameter) -> float:
    """The learning rate of a parameter over the optimizer's; 1 before a rule drew it."""
    return getattr(parameter, "learning_rate_factor", 1.0)
