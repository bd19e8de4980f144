"""What a model costs, known before it is built: parameters are counted, FLOPs declared, state and activations measured.

Nothing here allocates: modules live on the meta device, and equal layers are built once.
"""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from blocks.decoding import Decoding, MixerSlot
from blocks.families import AbstractMixer, Context, PositionModule, Role, State, active_share
from blocks.init import role_of
from blocks.model import (
    ModelConfig,
    build_blocks,
    build_embedding_norm,
    build_final_norm,
    build_layer,
    build_positions,
    build_slot,
)

WEIGHT_BYTES = 4
"""Weights, gradients and optimizer moments are float32."""
STATE_DTYPE = torch.float32
COPIES_IN_TRAINING = 4
"""Weights, gradients and the two moments of AdamW."""
LOGIT_COPIES = 3
"""Logits, their log-softmax, and the gradient of the logits are alive at once."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Sizes and work of one model at one sequence length."""

    params: int
    active_params: int
    """Parameters one token passes through; all of them where nothing routes."""
    body_params: int
    """Parameters without the token embedding, the position tables of the embedding, and an untied head."""
    flops_per_token: float
    """Forward FLOPs (two per multiply-add) of all matrix products, every score counted."""
    flops_per_token_causal: float
    """The same where only scores of visible pairs count."""
    state_bytes_per_token: float
    """Bytes by which the decoding state of one sequence grows with one more token, around this length."""
    fixed_state_bytes: float
    """Bytes of the decoding state of one sequence that no longer grow at this length."""
    weight_bytes: int
    training_bytes: int
    """Estimated peak in training: weights, gradients, AdamW's moments, and the activations of one micro-batch."""

    def state_bytes(self, length: int) -> float:
        """Bytes of the decoding state of one sequence after so many tokens, counted from the length measured at."""
        return self.fixed_state_bytes + self.state_bytes_per_token * length


@dataclass(frozen=True, kw_only=True)
class Count:
    """Parameters: all of them, those of the body, and those that one token passes through."""

    total: int
    body: int
    active: int

    def __add__(self, other: "Count") -> "Count":
        return Count(total=self.total + other.total, body=self.body + other.body, active=self.active + other.active)

    def __mul__(self, times: int) -> "Count":
        return Count(total=self.total * times, body=self.body * times, active=self.active * times)


OUTSIDE_BODY = frozenset({Role.EMBEDDING, Role.POSITION, Role.HEAD})


def measure(config: ModelConfig, length: int, micro_batch_tokens: int = 0) -> Cost:
    """The cost at a sequence length; activations count for a micro-batch of so many tokens, none for 0."""
    count = count_parameters(config)
    per_token, fixed = _state_bytes(config, length)
    activations = _activation_bytes_per_token(config, length) * micro_batch_tokens if micro_batch_tokens else 0.0
    return Cost(
        params=count.total,
        active_params=count.active,
        body_params=count.body,
        flops_per_token=flops_per_token(config, length, causal=False),
        flops_per_token_causal=flops_per_token(config, length, causal=True),
        state_bytes_per_token=per_token,
        fixed_state_bytes=fixed,
        weight_bytes=count.total * WEIGHT_BYTES,
        training_bytes=math.ceil(count.total * WEIGHT_BYTES * COPIES_IN_TRAINING + activations),
    )


def flops_per_token(config: ModelConfig, length: int, causal: bool) -> float:
    """Forward FLOPs per token as the blocks declare them; embeddings look up, norms and activations are not counted."""
    dims = config.dims()
    outside_mixer = config.premixer.flops_per_token(dims) + config.placement.ffns * config.ffn.flops_per_token(dims)
    layers = sum(
        times * (mixer.flops_per_token(dims, length, causal) + outside_mixer)
        for mixer, times in Counter(config.layer_mixers()).items()
    )
    layers += sum(
        config.position.at_layer(layer).flops_per_token(dims, mixer.head_shape(), length, causal)
        for layer, mixer in enumerate(config.layer_mixers())
    )
    stack = config.stack.flops_per_token(config, length, causal)
    return layers + config.residual.flops_per_token(dims) + stack + 2.0 * config.vocab_size * config.d_model


def count_parameters(config: ModelConfig) -> Count:
    """Parameters, counted on the meta device; equal layers are built once, and shared ones counted once."""
    count = count_shell(config)
    for mixer, times in Counter(mixer for mixer, _ in build_blocks(config)).items():
        count = count + count_layer(config, mixer) * times
    return count


def count_shell(config: ModelConfig) -> Count:
    """Parameters outside the layers."""
    tables = config.vocab_size * config.d_model * (1 if config.tied else 2)
    with torch.device("meta"):
        parts = nn.ModuleList(
            [
                build_embedding_norm(config),
                build_final_norm(config),
                config.residual.build(config.dims()),
                *config.stack.parts(config),
                *dict.fromkeys(build_positions(config, config.dims())),
            ]
        )
    return Count(total=tables, body=0, active=tables) + _count(parts)


def count_layer(config: ModelConfig, mixer: AbstractMixer) -> Count:
    """Parameters of one layer."""
    with torch.device("meta"):
        return _count(build_layer(config, mixer))


def _count(module: nn.Module) -> Count:
    sizes = [(role_of(name, parameter), parameter.numel()) for name, parameter in module.named_parameters()]
    return Count(
        total=sum(size for _, size in sizes),
        body=sum(size for role, size in sizes if role not in OUTSIDE_BODY),
        active=sum(round(parameter.numel() * active_share(parameter)) for parameter in module.parameters()),
    )


def _state_bytes(config: ModelConfig, length: int) -> tuple[float, float]:
    """Growth of the decoding state per token over the second half of `length` tokens, and the rest of it after them.

    Half of them, since a state that keeps a row per block grows by none at most tokens and by a whole row at some.
    """
    growth, total = 0.0, 0
    for mixer, times in Counter(config.layer_mixers()).items():
        before, after = _slot_state_bytes(config, mixer, length)
        growth += times * (after - before) / (length - length // 2)
        total += times * after
    with torch.device("meta"):
        placing = build_positions(config, config.dims())[0]
    total += _bytes(placing.empty_state(1, torch.device("meta"), STATE_DTYPE))
    return growth, total - growth * length


def _slot_state_bytes(config: ModelConfig, mixer: AbstractMixer, length: int) -> tuple[int, int]:
    """Bytes of the state after the first half of so many tokens, and after all of them."""
    meta, half = torch.device("meta"), length // 2
    with meta, torch.no_grad():
        slot = build_slot(config, mixer)
        position = config.position.build(config.dims(), mixer.head_shape())
        state = slot.empty_state(1, meta, STATE_DTYPE)
        if half:
            state = _decoded(slot, position, state, torch.empty(1, half, config.d_model), 0)
        before = _bytes(state)
        state = _decoded(slot, position, state, torch.empty(1, length - half, config.d_model), half)
    return before, _bytes(state)


def _decoded(slot: MixerSlot, position: PositionModule, state: State, x: Tensor, start: int) -> State:
    decoding = Decoding(state=state, start=start)
    slot(x, position, decoding)
    return decoding.following


def _bytes(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _activation_bytes_per_token(config: ModelConfig, length: int) -> float:
    """Bytes kept for the backward pass, per token of a sequence of this length: every layer, and the logits."""
    layers = sum(times * _saved_bytes(config, mixer, length) for mixer, times in Counter(config.layer_mixers()).items())
    return layers / length + LOGIT_COPIES * config.vocab_size * WEIGHT_BYTES


def _saved_bytes(config: ModelConfig, mixer: AbstractMixer, length: int) -> int:
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
        return tensor

    with torch.device("meta"):
        layer = build_layer(config, mixer)
        position = config.position.build(config.dims(), mixer.head_shape())
        x = torch.empty(1, length, config.d_model, requires_grad=True)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(x, position, Context())
    return sum(storage.nbytes() for storage in storages.values())
