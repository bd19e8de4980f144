"""Checkups: what a trial's model looks like inside, at two points of its training, none of whose numbers changes."""

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blocks.diagnostics import SAME, SINK, Diagnosis, Place, diagnose, update_ratios
from blocks.families import Role
from blocks.findings import unread, warnings_of, warnings_of_growth, warnings_of_updates
from blocks.model import DecoderLM
from runners.evaluate import autocast, to_device
from runners.tasks.data import TaskData
from search_space.checkup import PREFIX, Checkup
from search_space.records import TrialSpec

ROWS, LENGTH = 4, 128
"""What of the validation split is looked at, at most: its first sequences, from their beginning."""


class Checkups:
    """The checkups of one trial: at its first reading, which pruned trials reach too, and at its end.

    None are made unless the spec asks for them. Weights, gradients, modes and random streams stay as they are.
    """

    def __init__(self, model: DecoderLM, spec: TrialSpec, data: TaskData) -> None:
        self.seconds = 0.0
        """What the checkups have taken."""
        self._model, self._spec, self._data = model, spec, data
        budget = spec.budget
        self._due = {budget.eval_every, budget.tokens} if spec.diagnostics else set()
        self._before: dict[str, Tensor] = {}
        self._moved: dict[Place, float] = {}
        self._moved_at = 0
        self._first: Diagnosis | None = None

    def expect(self, tokens: int) -> None:
        """To be called before the step that ends at so many tokens: remembers the weights it moves.

        The last step of a schedule hardly moves any; it is measured only where there is no other.
        """
        if tokens in self._due and tokens == min(self._due):
            since = time.perf_counter()
            self._before = {name: weight.detach().clone() for name, weight in self._model.named_parameters()}
            self.seconds += time.perf_counter() - since

    def look(self, tokens: int) -> list[Checkup]:
        """The checkup that is due after the step that ends at so many tokens, if any."""
        if tokens not in self._due:
            return []
        since = time.perf_counter()
        if self._before:
            self._moved, self._moved_at = update_ratios(self._model, self._before), tokens
            self._before = {}
        cuda = [torch.cuda.current_device()] if self._spec.device == "cuda" else []
        with torch.random.fork_rng(devices=cuda), autocast(self._spec.device, self._spec.dtype):
            inputs, targets = self._batch()
            found = diagnose(self._model, inputs, targets=targets)
        checkup = self._checkup(found, tokens)
        self._first = self._first or found
        self.seconds += time.perf_counter() - since
        return [checkup]

    def plain(self) -> dict[str, Any]:
        """What a later attempt must know, as JSON data; between two steps no weights are remembered."""
        first = None
        if self._first is not None:
            first = {name: value for name, value in vars(self._first).items() if name not in ("layers", "gradients")}
        return {
            "seconds": self.seconds,
            "moved": [[layer, str(role), ratio] for (layer, role), ratio in self._moved.items()],
            "moved_at": self._moved_at,
            "first": first,
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Go on from what `plain` said."""
        self.seconds = plain["seconds"]
        self._moved = {(layer, Role(role)): ratio for layer, role, ratio in plain["moved"]}
        self._moved_at = plain["moved_at"]
        # Later checkups compare themselves with the numbers of the whole model alone.
        self._first = None if plain["first"] is None else Diagnosis(layers=(), **plain["first"])

    def _batch(self) -> tuple[Tensor, Tensor]:
        length = self._data.shape.train_len
        inputs, targets = next(iter(self._data.evaluation("validation", self._spec.budget.eval_tokens, length)))
        device = self._spec.device
        return to_device(inputs[:ROWS, :LENGTH], device), to_device(targets[:ROWS, :LENGTH], device)

    def _checkup(self, found: Diagnosis, tokens: int) -> Checkup:
        """The diagnosis as a record."""
        at = "" if tokens == self._moved_at else f" (at {self._moved_at:,} tokens)"
        warnings = [
            *warnings_of(found),
            *(warnings_of_growth(self._first, found) if self._first else ()),
            *(f"{words}{at}" for words in warnings_of_updates(self._moved)),
        ]
        moved = self._moved if tokens == self._moved_at else {}
        numbers = {**summary(found), **_of_updates(moved), "warnings": float(len(warnings))}
        return Checkup(
            tokens=tokens,
            metrics={f"{PREFIX}{name}": value for name, value in numbers.items() if math.isfinite(value)},
            layers=tuple(_finite(vars(layer)) for layer in found.layers),
            gradients=_by_layer(found.gradients),
            updates=_by_layer(moved),
            warnings=tuple(warnings),
            notes=tuple(unread(found, [mixer.kind for mixer in self._model.config.layer_mixers()])),
        )


def summary(found: Diagnosis) -> dict[str, float]:
    """A few numbers for the whole model; those of attention are absent where no mixer has weights."""
    layers = found.layers
    by_head = {
        name: [value for layer in layers for value in getattr(layer, name)]
        for name in ("entropy", "sink_share", "redundancy")
    }
    numbers = {
        "rank_share": min(layer.rank for layer in layers) / found.d_model,
        "residual_rms_first": layers[0].rms,
        "residual_rms_last": layers[-1].rms,
        "dead_units": max(layer.dead_units for layer in layers),
        "logit_rms": found.logit_rms,
        "largest_logit": found.largest_logit,
        "position_r2": found.position_r2,
        "order_effect": found.order_effect,
    }
    if by_head["entropy"]:
        numbers["entropy"] = statistics.fmean(by_head["entropy"])
        numbers["entropy_least"] = min(by_head["entropy"])
        numbers["sink_heads"] = statistics.fmean(share > SINK for share in by_head["sink_share"])
        numbers["repeated_heads"] = statistics.fmean(cosine > SAME for cosine in by_head["redundancy"])
    norms = [norm for norm in _layer_norms(found.gradients).values() if norm > 0]
    if norms:
        numbers["gradient_norm"] = math.hypot(*found.gradients.values())
        numbers["gradient_spread"] = max(norms) / min(norms)
    return numbers


def _layer_norms(norms: Mapping[Place, float]) -> dict[str, float]:
    """The norm over all roles of each layer; what stands outside of layers is left out."""
    by_layer = {layer: list(roles.values()) for layer, roles in _by_layer(norms).items() if layer != "outside"}
    return {layer: math.hypot(*values) for layer, values in by_layer.items()}


def _of_updates(ratios: Mapping[Place, float]) -> dict[str, float]:
    if not ratios:
        return {}
    return {"update_ratio": statistics.median(ratios.values()), "update_ratio_largest": max(ratios.values())}


def _by_layer(values: Mapping[Place, float]) -> dict[str, dict[str, float]]:
    """Values by layer, then by role; those that are no numbers are left out."""
    found: dict[str, dict[str, float]] = {}
    for (layer, role), value in values.items():
        if math.isfinite(value):
            found.setdefault(layer, {})[str(role)] = value
    return found


def _finite(numbers: Mapping[str, float | tuple[float, ...]]) -> dict[str, float | list[float]]:
    """The finite ones of numbers and of lists; a list with one that is not is left out whole."""
    kept: dict[str, float | list[float]] = {}
    for name, value in numbers.items():
        parts = [value] if isinstance(value, float) else list(value)
        if all(map(math.isfinite, parts)):
            kept[name] = value if isinstance(value, float) else parts
    return kept
