"""Candidates: what a search varies, from a walked point to the spec of one trial."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from blocks import cost as costs
from blocks import size
from blocks.cost import Cost
from blocks.families import AbstractStack, InfeasibleArchitecture
from blocks.model import ModelConfig
from blocks.registry import config_id, decode, encode, load_modules, variants
from runners import lion, muon  # noqa: F401 - importing registers them
from runners.optimize import AbstractOptimizer, AbstractSchedule, Course
from runners.tasks.data import TaskShape
from search_space.canon import unflatten
from search_space.domains import Scalar, choice, family, float_range, nested
from search_space.errors import UserError
from search_space.experiment import Experiment, SizeTarget
from search_space.records import Budget, Seeds, TrialSpec
from search_space.space import Space, derive


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the training loop treats the model."""

    gradient_clip: float = float_range(
        0.01, 100.0, default=1.0, log=True, opt_in=True, help="Largest gradient norm; 100 never bites in practice"
    )
    label_smoothing: float = float_range(
        0.0, 0.3, default=0.0, opt_in=True, help="Share of each target spread over the vocabulary, in training only"
    )
    activation_checkpointing: bool = choice(
        False, True, default=False, opt_in=True, help="Recompute layers in the backward pass: less memory, same numbers"
    )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One architecture with the optimiser, schedule and training settings it is tried with."""

    model: ModelConfig = nested(ModelConfig, help="The architecture")
    optimizer: AbstractOptimizer = family(
        AbstractOptimizer, default="adamw", opt_in=True, help="How gradients become updates"
    )
    schedule: AbstractSchedule = family(
        AbstractSchedule, default="cosine", opt_in=True, help="How the learning rate moves over the budget"
    )
    training: Training = nested(Training, help="Clipping, smoothing, recomputation")

    def __post_init__(self) -> None:
        self.optimizer.check(self.model)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A legal point within every limit, ready to train."""

    flat: dict[str, Scalar]
    """The walked point."""
    candidate: Candidate
    """Canonical: settings at which two variants coincide are written one way."""
    cost: Cost
    arch_id: str
    """Digest of the canonical model."""


def full_space(blocks: tuple[str, ...] = ()) -> Space:
    """Everything that can be searched, the user's own block modules included."""
    load_modules(blocks)
    return derive(Candidate, variants)


def resolve(flat: Mapping[str, Scalar], experiment: Experiment, data_sizes: TaskShape) -> Resolved:
    """The trainable candidate of a point.

    Raises InfeasibleArchitecture when the point is illegal, cannot meet the size target, or is over a hard limit.
    """
    plain = unflatten(flat)
    sizes = {
        "vocab_size": data_sizes.vocab_size,
        "train_len": data_sizes.train_len,
        "max_len": data_sizes.max_len,
    }
    target = experiment.size
    if isinstance(target, SizeTarget):
        config = size.solve(plain["model"], measure=target.measure, target=target.value, **sizes)
    else:
        config = size.sized(plain["model"], **sizes)
    config = config.canonical()
    if not config.stack.predicts_next:
        able = [kind for kind, stack in variants(AbstractStack).items() if stack.predicts_next]
        raise InfeasibleArchitecture(
            f"model.stack.kind={config.stack.kind!r} may look at the token that a trial asks it to predict, or needs a "
            f"source; trials train stacks that predict the next token: {', '.join(able)}; train others in a loop of "
            f"your own"
        )
    cost = _measured(config, data_sizes, experiment)
    _check_limit("max_state_bytes", state_bytes(cost, data_sizes.train_len), experiment)
    candidate: Candidate = decode(Candidate, {**plain, "model": encode(config)})
    return Resolved(flat=dict(flat), candidate=candidate, cost=cost, arch_id=config_id(config))


def state_bytes(cost: Cost, length: int) -> float:
    """Bytes of decoding state after one sequence of a length."""
    return cost.fixed_state_bytes + cost.state_bytes_per_token * length


def make_spec(resolved: Resolved, experiment: Experiment, *, fingerprint: str, seeds: Seeds) -> TrialSpec:
    """All that decides the trial's numbers; device and dtype 'auto' become what this machine has."""
    engine = experiment.engine
    check_budget(experiment.budget, resolved.candidate.model.train_len)
    # Trials that ask Ray for a GPU run where there is one, which need not be here.
    elsewhere = engine.kind == "ray" and engine.gpus > 0 and engine.device != "cpu"
    device = "cuda" if elsewhere else pick_device(engine.device)
    return TrialSpec(
        candidate=encode(resolved.candidate),
        task=dict(experiment.task),
        data_fingerprint=fingerprint,
        budget=experiment.budget,
        seeds=seeds,
        device=device,
        dtype=pick_dtype(engine.dtype, device),
        threads=engine.threads,
        deterministic=engine.deterministic,
        blocks=experiment.blocks,
        space_id=experiment.space.id,
        diagnostics=experiment.search.diagnostics,
    )


@functools.lru_cache(maxsize=4096)
def _cost(config: ModelConfig, length: int, micro_batch_tokens: int) -> Cost:
    """Points that differ in the optimiser alone share a model, which is measured once."""
    return costs.measure(config, length, micro_batch_tokens)


def _measured(config: ModelConfig, sizes: TaskShape, experiment: "Experiment") -> Cost:
    """The model's cost; the user's own blocks are run for it, and what they raise makes the point infeasible.

    The limits that are cheap to look at come first, so that spaces of which little is legal are gone through fast.
    """
    try:
        if math.isfinite(experiment.limits.max_params):
            _check_limit("max_params", costs.count_parameters(config).total, experiment)
        flops = costs.flops_per_token(config, sizes.train_len, causal=False)
        _check_limit("max_flops_per_token", flops, experiment)
        return _cost(config, sizes.train_len, experiment.budget.micro_batch_tokens)
    except (Exception, SystemExit) as error:
        if not experiment.blocks or isinstance(error, UserError | InfeasibleArchitecture):
            raise
        raise InfeasibleArchitecture(
            f"blocks {', '.join(experiment.blocks)}: the model cannot be measured "
            f"({type(error).__name__}: {error}); correct the module"
        ) from error


def _check_limit(name: str, value: float, experiment: Experiment) -> None:
    limit = getattr(experiment.limits, name)
    if value > limit:
        raise InfeasibleArchitecture(f"limits.{name}={limit:g}: the model needs {value:g}; raise it or shrink it")


def rebuild(spec: TrialSpec) -> Candidate:
    """The candidate of a spec."""
    load_modules(spec.blocks)
    candidate: Candidate = decode(Candidate, spec.candidate)
    return candidate


def course_of(spec: TrialSpec) -> Course:
    """The settings of the optimiser over a trial of the spec."""

    def optimizer(plain: dict[str, Any]) -> AbstractOptimizer:
        return rebuild(replace(spec, candidate={**spec.candidate, "optimizer": plain})).optimizer

    changes = [(int(change["tokens"]), optimizer(change["optimizer"])) for change in spec.changes]
    return Course(rebuild(spec).optimizer, changes)


def pick_device(wanted: str) -> str:
    """'cpu' or 'cuda'; 'auto' is cuda where there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("engine.device='cuda', but torch finds no CUDA device here; write cpu or auto")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def pick_dtype(wanted: str, device: str) -> str:
    """'float32' or 'bfloat16'; 'auto' is bfloat16 on a CUDA device that has it in hardware."""
    if wanted != "auto":
        return wanted
    if device == "cpu" or not torch.cuda.is_available():
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def check_budget(budget: Budget, train_len: int) -> None:
    """UserError unless tokens, batches, micro-batches and readings are whole multiples of each other."""
    for name, value, of, unit in (
        ("budget.micro_batch_tokens", budget.micro_batch_tokens, "the sequence length", train_len),
        ("budget.batch_tokens", budget.batch_tokens, "budget.micro_batch_tokens", budget.micro_batch_tokens),
        ("budget.tokens", budget.tokens, "budget.batch_tokens", budget.batch_tokens),
        ("budget.eval_every", budget.eval_every, "budget.batch_tokens", budget.batch_tokens),
    ):
        if value < 1 or unit < 1 or value % unit:
            near = max(unit, round(value / unit) * unit) if unit >= 1 else 1
            raise UserError(f"{name}={value}: takes a positive multiple of {of} ({unit}); write {near}")
