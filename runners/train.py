"""run_trial: the one training loop. It logs nothing; what happened is in the result it returns."""

import math
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn

from blocks import cost as costs
from blocks.families import InfeasibleArchitecture
from blocks.ffn.routing import routing_statistics
from blocks.model import DecoderLM
from runners.candidate import Candidate, check_budget, course_of, rebuild
from runners.checkpoints import Checkpointing, Keeper, State
from runners.conditions import backends, begin_peak, environment, imposed
from runners.diagnosing import Checkups
from runners.divergence import ADVICE, TrialEnd, Watch, is_out_of_memory
from runners.evaluate import Evaluation, autocast, evaluate, summed_loss, to_device
from runners.group import ALONE, Group
from runners.optimize import set_learning_rate
from runners.tally import Tally
from runners.tasks.data import IGNORED, Batch, TaskData
from search_space.records import Metric, Reading, Status, TrialResult, TrialSpec

CHECK_EVERY = 10
"""Steps between two looks at losses and norms; each look waits for the device."""
TRACEBACK_LINES = 25


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is to be trained and how; `spec` has the micro-batch that is really used."""

    spec: TrialSpec
    identity: str
    """Id of the spec as it was given."""
    data: TaskData
    report: Callable[[Reading], bool]
    weights: Path | None
    test: bool
    checkpoint: Checkpointing | None
    group: Group


def run_trial(
    spec: TrialSpec,
    data: TaskData,
    report: Callable[[Reading], bool],
    *,
    weights: Path | None = None,
    test: bool = False,
    checkpoint: Checkpointing | None = None,
    micro_batch_tokens: int = 0,
    group: Group = ALONE,
) -> TrialResult:
    """Train and evaluate one candidate; whatever goes wrong inside becomes the status of the result.

    `report` is called with every reading after the first step and returns False to prune. `weights` is where the
    trained parameters are written, `test` whether the test split is read. With `checkpoint`, training goes on from the
    checkpoint there, to the same numbers, and keeps further ones. `micro_batch_tokens` overrides the budget's where it
    is not 0: the loss is the same up to rounding. `group` is the processes that train the model together, each by this
    call; the first writes the files. Only KeyboardInterrupt and SystemExit pass.
    """
    tally = Tally(started=time.perf_counter())
    status, reason, last_lines, baseline = Status.OK, "", "", 0
    used = spec
    if micro_batch_tokens:
        used = replace(spec, budget=replace(spec.budget, micro_batch_tokens=micro_batch_tokens))
        tally.put(Metric.MICRO_BATCH_TOKENS, micro_batch_tokens)
    asked = _Asked(
        spec=used,
        identity=spec.id,
        data=data,
        report=report,
        weights=weights,
        test=test,
        checkpoint=checkpoint,
        group=group,
    )
    try:
        with imposed(spec):
            tally.environment = environment()
            baseline = begin_peak(spec.device)
            _trial(asked, tally)
    except TrialEnd as end:
        status, reason = end.status, end.reason
        tally.first_nonfinite = end.first_nonfinite
    except InfeasibleArchitecture as error:
        status, reason = Status.INFEASIBLE, str(error)
    except Exception as error:  # noqa: BLE001 - the trial boundary: the search goes on, the traceback is kept
        out_of_memory = is_out_of_memory(error)
        status = Status.OUT_OF_MEMORY if out_of_memory else Status.FAILED
        reason = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        last_lines = "\n".join(traceback.format_exc().rstrip().split("\n")[-TRACEBACK_LINES:])
    return tally.result(spec, status, reason, last_lines, baseline)


def _trial(asked: _Asked, tally: Tally) -> None:
    spec, data = asked.spec, asked.data
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
        tally.put(name, value)
    model = config.build(spec.seeds.init, spec.device)
    tally.backends = backends(model)
    tally.put(Metric.SECONDS_BUILD, tally.elapsed())
    _check_time(asked, tally, "while the model was built")
    _train(model, candidate, asked, tally)
    _read_out(model, asked, tally)
    if asked.weights is not None:
        whole = asked.group.gathered(model)
        if asked.group.leads:
            keep_weights(whole, asked.weights, tally)


def _train(model: DecoderLM, candidate: Candidate, asked: _Asked, tally: Tally) -> None:
    """Spend the budget; readings at each multiple of eval_every and after the last step."""
    spec, data, budget, group = asked.spec, asked.data, asked.spec.budget, asked.group
    spread = group.spread(model)
    optimizer = candidate.optimizer.build(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    watch, checkups = Watch(budget.batch_tokens), Checkups(model, spec, data)
    state = State(model=model, optimizer=optimizer, watch=watch, checkups=checkups, tally=tally, device=spec.device)
    keeper = Keeper(asked.checkpoint, state, asked.identity, budget.micro_batch_tokens, group)
    begun, course = keeper.resume(), course_of(spec)
    untrained = None if begun else _evaluate(model, asked, tally, "validation", data.shape.train_len)
    model.train()
    n_steps, per_reading = budget.tokens // budget.batch_tokens, budget.eval_every // budget.batch_tokens
    for step in range(begun, n_steps):
        checkups.expect(tally.tokens + budget.batch_tokens)
        since = time.perf_counter()
        progress = (step + 0.5) / n_steps
        settings = course.adopt(optimizer, model, tally.tokens)
        set_learning_rate(optimizer, settings, candidate.schedule, progress)
        batch = data.batch(step, budget.batch_tokens // data.shape.train_len, spec.seeds.data)
        loss = accumulate(spread, candidate, spec, batch, group, step)
        norm = group.clip(parameters, candidate.training.gradient_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        group.rebalance(model)
        model.after_step()
        watch.add(loss, norm)
        tally.tokens += budget.batch_tokens
        last = step + 1 == n_steps
        reads = last or (step + 1) % per_reading == 0
        looks = reads or (step + 1) % CHECK_EVERY == 0
        if looks:
            watch.check()
        tally.train_seconds += time.perf_counter() - since
        if untrained is not None and step == 0:
            first = Reading(tokens=0, loss=untrained.loss, train_loss=watch.first_loss(), seconds=tally.elapsed())
            tally.curve.append(first)
        if reads:
            tally.look(checkups)
            reading = _read(model, asked, tally, watch)
            if not last:
                keeper.offer_others(step + 1)
            _tell(reading, asked, tally)
        if not last:
            _check_time(asked, tally, f"after {tally.tokens} of {budget.tokens} tokens")
            if looks:
                ends = group.ends(tally.tokens, spec.device)
                keeper.offer(step + 1, at_reading=reads, always=ends)
                if ends:
                    raise TrialEnd(Status.PREEMPTED, f"stopped after {tally.tokens} of {budget.tokens} tokens")


def _check_time(asked: _Asked, tally: Tally, when: str) -> None:
    limit = asked.spec.budget.max_seconds
    if tally.elapsed() > limit:
        raise TrialEnd(Status.TIMED_OUT, f"budget.max_seconds={limit:g} passed {when}")


def accumulate(
    model: nn.Module, candidate: Candidate, spec: TrialSpec, batch: Batch, group: Group = ALONE, step: int = 0
) -> Tensor:
    """Gradients of one batch, micro-batch by micro-batch, and its loss without smoothing or auxiliary terms.

    The loss of each counted target weighs the same whatever the micro-batch; auxiliary losses are means over rows.
    """
    inputs, targets = group.rows(batch)
    counted = max(int((batch[1] != IGNORED).sum()), 1)
    first = group.rank * len(inputs)
    rows = spec.budget.micro_batch_tokens // inputs.shape[1]
    smoothing = candidate.training.label_smoothing
    total = torch.zeros((), device=spec.device)
    for start in range(0, len(inputs), rows):
        part, wanted = inputs[start : start + rows], to_device(targets[start : start + rows], spec.device)
        with group.part(model, spec.seeds.dropout, step, first + start, last=start + rows >= len(inputs)):
            with autocast(spec.device, spec.dtype):
                logits, auxiliary = model(
                    to_device(part, spec.device), checkpointing=candidate.training.activation_checkpointing
                )
            loss = summed_loss(logits, wanted, smoothing) / counted
            (loss + auxiliary * (len(part) / len(batch[0]))).backward()
        plain = summed_loss(logits.detach(), wanted) / counted if smoothing else loss.detach()
        total = total + plain
    return group.sum(total)


def _read(model: DecoderLM, asked: _Asked, tally: Tally, watch: Watch) -> Reading:
    found = _evaluate(model, asked, tally, "validation", asked.data.shape.train_len)
    if not math.isfinite(found.loss):
        raise TrialEnd(
            Status.DIVERGED,
            f"validation loss is {found.loss} after {tally.tokens} tokens; {ADVICE}",
            first_nonfinite=max(tally.tokens, 1),
        )
    reading = Reading(
        tokens=tally.tokens, loss=found.loss, train_loss=watch.mean_since_reading(), seconds=tally.elapsed()
    )
    tally.curve.append(reading)
    for name, value in routing_statistics(model).items():
        tally.put(f"routing/{name}", value)
    if tally.tokens >= asked.spec.budget.tokens:
        tally.put(Metric.LOSS, found.loss)
        if asked.data.reports_accuracy:
            tally.put(Metric.ACCURACY, found.accuracy)
    return reading


def _tell(reading: Reading, asked: _Asked, tally: Tally) -> None:
    """Report the reading; TrialEnd when the trial is to end with it."""
    since = time.perf_counter()
    go_on = asked.report(reading)
    tally.waited_seconds += time.perf_counter() - since
    if not go_on and reading.tokens < asked.spec.budget.tokens:
        raise TrialEnd(Status.PRUNED, f"pruned at {reading.tokens} tokens with a validation loss of {reading.loss:.4f}")


def _evaluate(
    model: DecoderLM, asked: _Asked, tally: Tally, split: str, length: int, *, by_sequence: bool = False
) -> Evaluation:
    """One evaluation, timed."""
    spec = asked.spec
    since = time.perf_counter()
    batches = asked.data.evaluation(split, spec.budget.eval_tokens, length)
    found = evaluate(model, batches, spec.device, spec.dtype, asked.group, by_sequence=by_sequence)
    tally.evaluate_seconds += time.perf_counter() - since
    return found


def _read_out(model: DecoderLM, asked: _Asked, tally: Tally) -> None:
    """What is measured once, on the trained model: further lengths, and the test split where it may be read.

    A loss that is not finite is absent; the trial itself has ended well.
    """
    task = asked.spec.task.get(asked.spec.task["kind"]) or {}
    for length in task.get("eval_lengths", ()):
        tally.put(f"loss_at/{length}", _evaluate(model, asked, tally, "validation", length).loss)
    if asked.test:
        alone = asked.group.size == 1
        found = _evaluate(model, asked, tally, "test", asked.data.shape.train_len, by_sequence=alone)
        tally.put(Metric.TEST_LOSS, found.loss)
        if alone and math.isfinite(found.loss):
            tally.take_documents(found.sequences)
        for length in task.get("eval_lengths", ()):
            at_length = _evaluate(model, asked, tally, "test", length)
            tally.put(f"{Metric.TEST_LOSS_AT}{length}", at_length.loss)
        if asked.data.reports_accuracy:
            tally.put(Metric.TEST_ACCURACY, found.accuracy)


def keep_weights(model: DecoderLM, path: Path, tally: Tally) -> None:
    """Write the parameters as safetensors, all of them or nothing; load with safetensors.torch.load_model.

    A disk that is full costs the file, not the trial.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_model(model, str(partial))
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        tally.remarks.append(f"the trained model could not be kept ({type(error).__name__}: {error})")
