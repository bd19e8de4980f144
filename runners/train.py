"""run_trial: the one training loop. It logs nothing; what happened is in the result it returns."""

import math
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from blocks import cost as costs
from blocks.families import InfeasibleArchitecture
from blocks.ffn.routing import rebalance, routing_statistics
from blocks.model import DecoderLM
from runners.candidate import Candidate, check_budget, rebuild
from runners.conditions import backends, begin_peak, environment, imposed, peak_bytes
from runners.diagnosing import Checkups
from runners.divergence import ADVICE, TrialEnd, Watch, is_out_of_memory
from runners.evaluate import Evaluation, autocast, evaluate, summed_loss, to_device
from runners.optimize import set_learning_rate
from runners.tasks.data import IGNORED, Batch, TaskData
from search_space.checkup import Checkup
from search_space.records import Metric, Reading, Status, TrialResult, TrialSpec

CHECK_EVERY = 10
"""Steps between two looks at losses and norms; each look waits for the device."""
TRACEBACK_LINES = 25


@dataclass
class _Record:
    """What is known of a trial so far; it survives whatever ends the trial."""

    started: float
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[Reading] = field(default_factory=list)
    tokens: int = 0
    first_nonfinite: int = 0
    waited_seconds: float = 0.0  # For answers to readings: the driver's time, not the trial's.
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    checkups: list[Checkup] = field(default_factory=list)
    backends: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def elapsed(self) -> float:
        return time.perf_counter() - self.started - self.waited_seconds

    def look(self, checkups: Checkups) -> None:
        """The checkup that is due now."""
        found = checkups.look(self.tokens)
        if found:
            self.checkups += found
            self.put(Metric.SECONDS_DIAGNOSE, checkups.seconds)

    def put(self, name: str, value: float) -> None:
        """A metric, unless it is NaN or infinite."""
        if math.isfinite(value):
            self.metrics[name] = float(value)


def run_trial(
    spec: TrialSpec,
    data: TaskData,
    report: Callable[[Reading], bool],
    *,
    weights: Path | None = None,
    test: bool = False,
) -> TrialResult:
    """Train and evaluate one candidate; whatever goes wrong inside becomes the status of the result.

    `report` is called with every reading after the first step and returns False to prune. `weights` is where the
    trained parameters are written, `test` whether the test split is read. Only KeyboardInterrupt and SystemExit pass.
    """
    record = _Record(started=time.perf_counter())
    status, reason, last_lines, baseline = Status.OK, "", "", 0
    try:
        with imposed(spec):
            record.environment = environment()
            baseline = begin_peak(spec.device)
            _trial(spec, data, report, record, weights, test)
    except TrialEnd as end:
        status, reason = end.status, end.reason
        record.first_nonfinite = end.first_nonfinite
    except InfeasibleArchitecture as error:
        status, reason = Status.INFEASIBLE, str(error)
    except Exception as error:  # noqa: BLE001 - the trial boundary: the search goes on, the traceback is kept
        out_of_memory = is_out_of_memory(error)
        status = Status.OUT_OF_MEMORY if out_of_memory else Status.FAILED
        reason = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        last_lines = "\n".join(traceback.format_exc().rstrip().split("\n")[-TRACEBACK_LINES:])
    return _result(spec, record, status, reason, last_lines, baseline)


def _result(
    spec: TrialSpec, record: _Record, status: Status, reason: str, last_lines: str, baseline: int
) -> TrialResult:
    seconds = record.elapsed()
    trained = [reading.loss for reading in record.curve if reading.tokens]
    if trained:
        record.put(Metric.BEST_LOSS, min(trained))
    if record.train_seconds > 0:
        record.put(Metric.TOKENS_PER_SECOND, record.tokens / record.train_seconds)
    record.put(Metric.PEAK_BYTES, peak_bytes(spec.device, baseline) if baseline or spec.device == "cuda" else math.nan)
    record.put(Metric.SECONDS, seconds)
    record.put(Metric.SECONDS_TRAIN, record.train_seconds)
    record.put(Metric.SECONDS_EVALUATE, record.evaluate_seconds)
    record.put(Metric.TOKENS, record.tokens)
    return TrialResult(
        status=status,
        reason=reason,
        last_lines=last_lines,
        metrics=record.metrics,
        curve=tuple(record.curve),
        tokens=record.tokens,
        seconds=seconds,
        first_nonfinite_step=record.first_nonfinite,
        device=spec.device,
        backends=record.backends,
        environment=record.environment,
        checkups=tuple(record.checkups),
    )


def _trial(
    spec: TrialSpec,
    data: TaskData,
    report: Callable[[Reading], bool],
    record: _Record,
    weights: Path | None,
    test: bool,
) -> None:
    candidate = rebuild(spec)
    config = candidate.model
    if data.fingerprint != spec.data_fingerprint:
        raise ValueError(
            f"the data's fingerprint is {data.fingerprint}, the spec's is {spec.data_fingerprint}; "
            f"name the data the spec was made for with --data"
        )
    check_budget(spec.budget, config.train_len)
    cost = costs.measure(config, config.train_len, spec.budget.micro_batch_tokens)
    for name, value in (
        (Metric.PARAMS, cost.params),
        (Metric.ACTIVE_PARAMS, cost.active_params),
        (Metric.BODY_PARAMS, cost.body_params),
        (Metric.FLOPS, cost.flops_per_token),
        (Metric.FLOPS_CAUSAL, cost.flops_per_token_causal),
        (Metric.STATE_BYTES, cost.state_bytes_per_token),
        (Metric.FIXED_STATE_BYTES, cost.fixed_state_bytes),
    ):
        record.put(name, value)
    model = config.build(spec.seeds.init, spec.device)
    record.backends = backends(model)
    record.put(Metric.SECONDS_BUILD, record.elapsed())
    _train(model, candidate, spec, data, report, record)
    _read_out(model, spec, data, record, test)
    if weights is not None:
        save_weights(model, weights)


def _train(
    model: DecoderLM,
    candidate: Candidate,
    spec: TrialSpec,
    data: TaskData,
    report: Callable[[Reading], bool],
    record: _Record,
) -> None:
    """Spend the budget; readings at each multiple of eval_every and after the last step."""
    budget = spec.budget
    optimizer = candidate.optimizer.build(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    watch = Watch(budget.batch_tokens)
    untrained = _evaluate(model, spec, data, record, "validation", data.shape.train_len)
    model.train()
    checkups = Checkups(model, spec, data)
    n_steps, per_reading = budget.tokens // budget.batch_tokens, budget.eval_every // budget.batch_tokens
    for step in range(n_steps):
        checkups.expect(record.tokens + budget.batch_tokens)
        since = time.perf_counter()
        progress = (step + 0.5) / n_steps
        set_learning_rate(optimizer, candidate.optimizer, candidate.schedule, progress)
        batch = data.batch(step, budget.batch_tokens // data.shape.train_len, spec.seeds.data)
        loss = accumulate(model, candidate, spec, batch)
        norm = clip_grad_norm_(parameters, candidate.training.gradient_clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rebalance(model)
        model.after_step()
        watch.add(loss, norm)
        record.tokens += budget.batch_tokens
        last = step + 1 == n_steps
        reads = last or (step + 1) % per_reading == 0
        if reads or (step + 1) % CHECK_EVERY == 0:
            watch.check()
        record.train_seconds += time.perf_counter() - since
        if step == 0:
            first = Reading(tokens=0, loss=untrained.loss, train_loss=watch.first_loss(), seconds=record.elapsed())
            record.curve.append(first)
        if reads:
            record.look(checkups)
            _read(model, spec, data, record, watch, report)
        if not last and record.elapsed() > budget.max_seconds:
            raise TrialEnd(
                Status.TIMED_OUT,
                f"budget.max_seconds={budget.max_seconds:g} passed after {record.tokens} of {budget.tokens} tokens",
            )


def accumulate(model: DecoderLM, candidate: Candidate, spec: TrialSpec, batch: Batch) -> Tensor:
    """Gradients of one batch, micro-batch by micro-batch, and its loss without smoothing or auxiliary terms.

    The loss of each counted target weighs the same whatever the micro-batch; auxiliary losses are means over rows.
    """
    inputs, targets = batch
    counted = max(int((targets != IGNORED).sum()), 1)
    rows = spec.budget.micro_batch_tokens // inputs.shape[1]
    smoothing = candidate.training.label_smoothing
    total = torch.zeros((), device=spec.device)
    for part, wanted in zip(inputs.split(rows), targets.split(rows), strict=True):
        wanted = to_device(wanted, spec.device)
        with autocast(spec.device, spec.dtype):
            logits, auxiliary = model(
                to_device(part, spec.device), checkpointing=candidate.training.activation_checkpointing
            )
        loss = summed_loss(logits, wanted, smoothing) / counted
        (loss + auxiliary * (len(part) / len(inputs))).backward()
        plain = summed_loss(logits.detach(), wanted) / counted if smoothing else loss.detach()
        total = total + plain
    return total


def _read(
    model: DecoderLM,
    spec: TrialSpec,
    data: TaskData,
    record: _Record,
    watch: Watch,
    report: Callable[[Reading], bool],
) -> None:
    found = _evaluate(model, spec, data, record, "validation", data.shape.train_len)
    if not math.isfinite(found.loss):
        raise TrialEnd(
            Status.DIVERGED,
            f"validation loss is {found.loss} after {record.tokens} tokens; {ADVICE}",
            first_nonfinite=max(record.tokens, 1),
        )
    reading = Reading(
        tokens=record.tokens, loss=found.loss, train_loss=watch.mean_since_reading(), seconds=record.elapsed()
    )
    record.curve.append(reading)
    for name, value in routing_statistics(model).items():
        record.put(f"routing/{name}", value)
    last = record.tokens >= spec.budget.tokens
    if last:
        record.put(Metric.LOSS, found.loss)
        if data.reports_accuracy:
            record.put(Metric.ACCURACY, found.accuracy)
    since = time.perf_counter()
    go_on = report(reading)
    record.waited_seconds += time.perf_counter() - since
    if not go_on and not last:
        raise TrialEnd(Status.PRUNED, f"pruned at {record.tokens} tokens with a validation loss of {found.loss:.4f}")


def _evaluate(
    model: DecoderLM, spec: TrialSpec, data: TaskData, record: _Record, split: str, length: int
) -> Evaluation:
    """One evaluation, timed."""
    since = time.perf_counter()
    found = evaluate(model, data.evaluation(split, spec.budget.eval_tokens, length), spec.device, spec.dtype)
    record.evaluate_seconds += time.perf_counter() - since
    return found


def _read_out(model: DecoderLM, spec: TrialSpec, data: TaskData, record: _Record, test: bool) -> None:
    """What is measured once, on the trained model: further lengths, and the test split where it may be read.

    A loss that is not finite is absent; the trial itself has ended well.
    """
    task = spec.task.get(spec.task["kind"]) or {}
    for length in task.get("eval_lengths", ()):
        record.put(f"loss_at/{length}", _evaluate(model, spec, data, record, "validation", length).loss)
    if test:
        found = _evaluate(model, spec, data, record, "test", data.shape.train_len)
        record.put(Metric.TEST_LOSS, found.loss)
        if data.reports_accuracy:
            record.put(Metric.TEST_ACCURACY, found.accuracy)


def save_weights(model: DecoderLM, path: Path) -> None:
    """Write the parameters as safetensors, all of them or nothing; load with safetensors.torch.load_model."""
    from safetensors.torch import save_model

    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    save_model(model, str(partial))
    partial.replace(path)
