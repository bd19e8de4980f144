"""The mixer sublayer of a layer: its whole pass, its decoding step, and the values it shares with other layers."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import Context, HeadShape, MixerModule, PositionModule, State, Values


@dataclass
class Decoding:
    """What one decoding call hands to a layer's mixer, and takes back from it."""

    state: State
    start: int
    following: State = field(default_factory=dict)
    values: Values | None = None
    both_ways: bool = False
    """Whether these are the tokens of a prefix, which all see each other."""


class MixerSlot(nn.Module):
    """A premixer and the mixer behind it, as one sublayer; their states live under separate prefixes."""

    def __init__(self, premixer: MixerModule, mixer: MixerModule, shape: HeadShape | None = None) -> None:
        super().__init__()
        self.shape = shape
        """The heads of the mixer; None where init rules that relate its matrices leave it alone."""
        self.premixer = premixer
        self.mixer = mixer

    def forward(
        self, x: Float[Tensor, "B T D"], position: PositionModule, run: Context | Decoding
    ) -> Float[Tensor, "B T D"]:
        with _mixed(self.mixer, run.values):
            if isinstance(run, Context):
                return self.mixer(self.premixer(x, position, run), position, run)
            for prefix, part in self._parts():
                own = under(run.state, prefix)
                if run.both_ways and part is self.mixer:
                    x, following = part.begin(x, own, position)
                else:
                    x, following = part.step(x, own, position, run.start)
                run.following.update(prefixed(following, prefix))
            return x

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """The states of both before the first token."""
        state: State = {}
        for prefix, part in self._parts():
            state.update(prefixed(part.empty_state(batch, device, dtype), prefix))
        return state

    def _parts(self) -> tuple[tuple[str, MixerModule], ...]:
        return (("premixer.", self.premixer), ("mixer.", self.mixer))


@contextlib.contextmanager
def _mixed(mixer: nn.Module, values: Values | None) -> Iterator[None]:
    """While it lasts, the mixer's values are mixed with those of the first layer, and kept."""
    if values is None:
        yield
        return

    def mix(module: nn.Module, args: tuple[Tensor, ...], own: Tensor) -> Tensor:
        values.own = own
        if values.first is None:
            return own
        return (values.share * own + (1 - values.share) * values.first).to(own.dtype)

    handle = mixer.get_submodule("value").register_forward_hook(mix)
    try:
        yield
    finally:
        handle.remove()


def prefixed(state: State, prefix: str) -> State:
    """The state under longer names."""
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def under(state: State, prefix: str) -> State:
    """The part of a state whose names begin so, under the rest of its names."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
