"""Which placements, FFNs, mixers and init rules go together, by what each needs, reaches and provides."""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn

from blocks import registry
from blocks.families import (
    AbstractFFN,
    AbstractInit,
    AbstractMixer,
    AbstractPlacement,
    Dims,
    InfeasibleArchitecture,
    Role,
)
from blocks.init import role_of


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
        missing = wanted - linear_roles(mixer)
        if missing:
            raise InfeasibleArchitecture(
                f"{where} {', '.join(sorted(wanted))} maps inside the mixer, and {path_of(mixer)}.kind={mixer.kind!r} "
                f"has no {', '.join(sorted(missing))} map; use model.mixer.kind='softmax', or "
                f"model.placement.kind='pre'"
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


@functools.cache
def linear_roles(mixer: AbstractMixer) -> frozenset[Role]:
    """Roles of the linear maps inside a mixer's module."""
    sizes = Dims(d_model=64, d_ff=64, layers=2, train_len=64, max_len=64, direction=min(mixer.directions))
    with torch.device("meta"):
        module = mixer.build(sizes)
    maps = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return frozenset(role_of("weight", part.get_parameter("weight")) for part in maps)
