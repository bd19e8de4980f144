"""Which placements, FFNs, mixers and init rules go together, by what each needs, reaches and provides."""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from blocks import registry
from blocks.families import (
    AbstractFFN,
    AbstractInit,
    AbstractMixer,
    AbstractNorm,
    AbstractPlacement,
    Dims,
    InfeasibleArchitecture,
    Role,
    Trait,
)
from blocks.init import related, role_of

PROBE_WIDTH = 1009
"""A prime, so that what has this size has it from the model's width."""


def check_reach(
    placement: AbstractPlacement,
    ffn: AbstractFFN,
    mixers: Iterable[AbstractMixer],
    path_of: Callable[[AbstractMixer], str],
) -> None:
    """Refuse placements whose inner norms find no linear map to stand at."""
    where = f"model.placement.kind={placement.kind!r} puts norms at the"
    if Role.FFN_OUT in placement.reaches and ffn.grows and not ffn.dense:
        dense = [kind for kind, other in registry.variants(AbstractFFN).items() if other.dense]
        raise InfeasibleArchitecture(
            f"{where} output map inside the FFN, of which model.ffn.kind={ffn.kind!r} has many; "
            f"FFNs that have one: {', '.join(dense)}"
        )
    wanted = placement.reaches - {Role.FFN_OUT}
    for mixer in dict.fromkeys(mixers) if wanted else ():
        absorbed = wanted & mixer.absorbs
        if absorbed:
            raise InfeasibleArchitecture(
                f"{where} {', '.join(sorted(absorbed))} maps inside the mixer, and {path_of(mixer)}.kind="
                f"{mixer.kind!r} applies their weights without running them; use model.mixer.kind='softmax', or "
                f"model.placement.kind='pre'"
            )
        missing = wanted - linear_roles(mixer)
        if missing:
            raise InfeasibleArchitecture(
                f"{where} {', '.join(sorted(wanted))} maps inside the mixer, and {path_of(mixer)}.kind={mixer.kind!r} "
                f"has no {', '.join(sorted(missing))} map; use model.mixer.kind='softmax', or "
                f"model.placement.kind='pre'"
            )


def check_factors(
    placement: AbstractPlacement,
    norm: AbstractNorm,
    mixers: Iterable[AbstractMixer],
    path_of: Callable[[AbstractMixer], str],
) -> None:
    """Refuse norms at maps where all they learn would have no effect."""
    for mixer in dict.fromkeys(mixers) if norm.one_factor else ():
        idle = placement.reaches & mixer.scale_free()
        if idle:
            able = [kind for kind, other in registry.variants(AbstractNorm).items() if not other.one_factor]
            raise InfeasibleArchitecture(
                f"model.placement.kind={placement.kind!r} puts norms at the {', '.join(sorted(idle))} maps of "
                f"{path_of(mixer)}.kind={mixer.kind!r}, which divides every common factor out again, and one factor "
                f"is all that model.norm.kind={norm.kind!r} learns; norms that would do: {', '.join(able)}"
            )


def check_traits(init: AbstractInit, placement: AbstractPlacement) -> None:
    """Refuse init rules whose constants were derived for another placement."""
    if init.needs <= placement.provides:
        return
    capable = [kind for kind, other in registry.variants(AbstractPlacement).items() if init.needs <= other.provides]
    raise InfeasibleArchitecture(
        f"model.init.kind={init.kind!r} is derived for layers with {', '.join(sorted(init.needs))}, which "
        f"model.placement.kind={placement.kind!r} does not provide; placements that do: {', '.join(capable)}"
    )


def check_start(init: AbstractInit, placement: AbstractPlacement) -> None:
    """Refuse layers that could never open, and those whose stream overflows before the first step."""
    rules = registry.variants(AbstractInit)
    if init.opens_later and placement.opens_later:
        able = [kind for kind, other in rules.items() if not other.opens_later and other.needs <= placement.provides]
        raise InfeasibleArchitecture(
            f"model.init.kind={init.kind!r} starts the last map of each branch at zero and "
            f"model.placement.kind={placement.kind!r} the factor on the branch: neither would ever get a gradient; "
            f"init rules that would do: {', '.join(able)}"
        )
    if init.amplifies and Trait.NO_NORM in placement.provides:
        able = [kind for kind, other in rules.items() if not other.amplifies and other.needs <= placement.provides]
        raise InfeasibleArchitecture(
            f"model.init.kind={init.kind!r} makes each branch return more than it is given, and with "
            f"model.placement.kind={placement.kind!r} no norm keeps the residual stream finite; init rules that "
            f"would do: {', '.join(able)}"
        )


def check_relations(
    init: AbstractInit, mixers: Sequence[AbstractMixer], path_of: Callable[[AbstractMixer], str]
) -> None:
    """Refuse rules that relate matrices of one mixer to each other, where no layer's mixer has such matrices."""
    if not init.relates or any(can_relate(init, mixer) for mixer in mixers):
        return
    first = mixers[0]
    able = [kind for kind, other in registry.variants(AbstractMixer).items() if can_relate(init, other())]
    raise InfeasibleArchitecture(
        f"model.init.kind={init.kind!r} relates query to key maps and value to output maps, head by head, and "
        f"{path_of(first)}.kind={first.kind!r} has no two that fit together, so that nothing would be related; "
        f"mixers that do: {', '.join(able)}"
    )


@functools.cache
def can_relate(init: AbstractInit, mixer: AbstractMixer) -> bool:
    """Whether the rule finds matrices of the mixer to relate, whatever the model's width."""
    return init.can_relate(related(_probed(mixer)), mixer.head_shape())


@functools.cache
def linear_roles(mixer: AbstractMixer) -> frozenset[Role]:
    """Roles of the linear maps inside a mixer's module."""
    maps = [part for part in _probed(mixer).modules() if isinstance(part, nn.Linear)]
    return frozenset(role_of("weight", part.get_parameter("weight")) for part in maps)


def _probed(mixer: AbstractMixer) -> nn.Module:
    """The mixer's module without numbers, in a model whose width is no size inside of it."""
    sizes = Dims(d_model=PROBE_WIDTH, d_ff=64, layers=2, train_len=64, max_len=64, direction=min(mixer.directions))
    with torch.device("meta"):
        return mixer.build(sizes)
