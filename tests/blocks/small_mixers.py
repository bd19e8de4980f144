"""Small mixers with drawn weights, every legal pair of them with a position scheme, and decoding in pieces."""

import dataclasses
import itertools

import torch
from torch import Tensor, nn

from blocks.families import AbstractMixer, AbstractPosition, Dims, MixerModule, PositionModule
from blocks.mixers.linear import Linear
from blocks.mixers.sliding_window import SlidingWindow
from blocks.mixers.softmax import Softmax
from blocks.registry import variants

CPU = torch.device("cpu")
DIMS = Dims(d_model=24, d_ff=48, layers=2, train_len=64, max_len=64)
LENGTH = 21
PLAIN = PositionModule()
SMALL_SOFTMAX = Softmax(kv_heads=2, queries_per_kv=2, head_dim=8)
SMALL_WINDOW = SlidingWindow(kv_heads=2, queries_per_kv=2, head_dim=8, window=5)
SMALL_LINEAR = Linear(heads=2, head_dim=8)
MIXERS = (
    SMALL_SOFTMAX,
    SMALL_WINDOW,
    dataclasses.replace(SMALL_SOFTMAX, qk_norm="l2"),
    dataclasses.replace(SMALL_WINDOW, qk_norm="rms"),
    SMALL_LINEAR,
    dataclasses.replace(SMALL_LINEAR, feature_map="relu_squared"),
)
FIRST = (SMALL_SOFTMAX, SMALL_WINDOW, SMALL_LINEAR)
KINDS = variants(AbstractPosition)
PAIRS = [
    *((mixer, kind) for mixer, kind in itertools.product(FIRST, KINDS) if KINDS[kind].needs <= mixer.offers),
    *((mixer, "rotary") for mixer in MIXERS if mixer not in FIRST),
]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def drawn(module: nn.Module) -> None:
    """Draw every parameter so that nothing stays at a neutral start."""
    for index, parameter in enumerate(module.parameters()):
        parameter.data = 0.3 * draw(*parameter.shape, seed=index) + (parameter.dim() == 1)


def build(mixer: AbstractMixer, position: str = "none") -> tuple[MixerModule, PositionModule]:
    built = mixer.build(DIMS), KINDS[position]().build(DIMS, mixer.head_shape())
    for module in built:
        drawn(module)
    return built


def decode(module: MixerModule, x: Tensor, position: PositionModule, cuts: tuple[int, ...]) -> Tensor:
    state, parts = module.empty_state(x.shape[0], CPU, x.dtype), []
    for start, end in zip((0, *cuts), (*cuts, x.shape[1]), strict=True):
        y, state = module.step(x[:, start:end], state, position, start)
        parts.append(y)
    return torch.cat(parts, dim=1)
