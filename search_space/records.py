"""The contract between those who run trials and those who read them: specs, results, and the names in the store.

Every name in the store stands in this one file, which is therefore longer than others.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from search_space.canon import digest
from search_space.checkup import Checkup, checkup_from_plain

ADDED = "added"
"""Marks a field that came later: at its default it is left out of plain data, so that old ids and records stay."""


class Status(StrEnum):
    """How a trial ended. Every status reaches the sampler and the dashboard; no row is dropped."""

    OK = "ok"
    PRUNED = "pruned"
    INFEASIBLE = "infeasible"
    DIVERGED = "diverged"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


class Stage(StrEnum):
    """Why a run was trained. Finals never steer the sampler, search trials never enter a verdict."""

    SEARCH = "search"
    SWEEP = "sweep"
    """A learning rate tried for a contestant of the finals; enters no verdict."""
    FINAL = "final"
    REPLAY = "replay"
    TRAIN = "train"
    """A candidate of the search trained longer, by itself."""
    LADDER = "ladder"
    """A candidate of an earlier search at one of several sizes, from which a target size is judged."""


BASE, CHANGED = "base", "changed"
"""The two sides of a paired final; Tag.CANDIDATE ends in one of them."""


DEVICES = "devices"
"""In a result's environment, where more than one process trained the model: how many, and how they shared it."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one trial may spend; the unit is training tokens, never iterations."""

    tokens: int
    batch_tokens: int
    micro_batch_tokens: int
    eval_tokens: int
    eval_every: int
    """Training tokens between two validation readings; also the unit in which rungs are placed."""
    max_seconds: float
    """Wall clock after which the trial ends as timed_out."""


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Three separate random streams."""

    init: int
    data: int
    dropout: int


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """All that decides a trial's numbers; two equal specs give equal curves on one machine."""

    candidate: dict[str, Any]
    """Nested plain dict of runners.candidate.Candidate, fully resolved (sizes solved, context filled in)."""
    task: dict[str, Any]
    """{'kind': name, name: {field: value}}."""
    data_fingerprint: str
    """sha256 of the token bytes of all splits."""
    budget: Budget
    seeds: Seeds
    device: str
    """'cpu' or 'cuda'."""
    dtype: str
    """'float32' or 'bfloat16' (autocast)."""
    threads: int
    deterministic: bool
    blocks: tuple[str, ...]
    """Importable modules that register further blocks."""
    space_id: str
    diagnostics: bool = field(default=False, metadata={ADDED: True})
    """Whether the model is looked at on the way; that changes no number of the training."""
    changes: tuple[dict[str, Any], ...] = field(default=(), metadata={ADDED: True})
    """{'tokens': n, 'optimizer': {...}}, in order: from so many training tokens on, these settings of the optimiser
    replace the candidate's."""

    @cached_property
    def id(self) -> str:
        """Digest of the whole spec."""
        return digest(to_plain(self))

    @cached_property
    def point_id(self) -> str:
        """Digest without seeds: replicas of one candidate share it."""
        plain = to_plain(self)
        del plain["seeds"]
        return digest(plain)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One validation reading in mid-trial; steps are training tokens seen."""

    tokens: int
    loss: float
    """Nats per token on the validation split, no dropout, no label smoothing."""
    train_loss: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a trial came to. Numbers that were never reached are absent from `metrics`, never NaN."""

    status: Status
    reason: str = ""
    """Empty for ok; else what ended the trial, in words."""
    last_lines: str = ""
    """The end of the traceback or of the worker's stderr."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Finite values under the names in Metric."""
    curve: tuple[Reading, ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    first_nonfinite_step: int = 0
    """Training tokens at the first NaN or infinity; 0 when there was none."""
    device: str = ""
    backends: dict[str, str] = field(default_factory=dict)
    """Which implementation each op used, and why the faster ones could not run."""
    environment: dict[str, str] = field(default_factory=dict)
    """What the worker ran under: versions, threads, CPU capability, ISA caps, deterministic flag."""
    checkups: tuple[Checkup, ...] = field(default=(), metadata={ADDED: True})
    """What the model looked like inside, at growing tokens; none unless the spec asks for them."""
    remarks: tuple[str, ...] = field(default=(), metadata={ADDED: True})
    """What went wrong on the way without ending the trial, in sentences."""
    document_losses: tuple[float, ...] = field(default=(), metadata={ADDED: True})
    """On a final: mean test loss of each document, which is a run of evaluated sequences; to seven digits."""
    document_counts: tuple[int, ...] = field(default=(), metadata={ADDED: True})
    """The targets that each of them counts."""


class Metric:
    """Metric names in the tracking store. Steps are training tokens."""

    LOSS = "loss"
    """Final validation loss; nats per token."""
    BEST_LOSS = "best_loss"
    VALIDATION_CURVE = "validation/loss"
    TRAIN_CURVE = "train/loss"
    ACCURACY = "accuracy"
    TEST_LOSS = "test/loss"
    TEST_LOSS_AT = "test/loss_at/"
    """Followed by an eval length of the task: the same at that length."""
    TEST_ACCURACY = "test/accuracy"
    PARAMS = "params"
    ACTIVE_PARAMS = "active_params"
    BODY_PARAMS = "body_params"
    FLOPS = "flops_per_token"
    """Forward FLOPs per token, full score matrix counted."""
    FLOPS_CAUSAL = "flops_per_token_causal"
    """The same with only the visible half of the score matrix counted."""
    STATE_BYTES = "state_bytes_per_token"
    FIXED_STATE_BYTES = "fixed_state_bytes"
    TOKENS_PER_SECOND = "tokens_per_second"
    PEAK_BYTES = "peak_bytes"
    SECONDS = "seconds"
    SECONDS_BUILD = "seconds/build"
    SECONDS_TRAIN = "seconds/train"
    SECONDS_EVALUATE = "seconds/evaluate"
    SECONDS_DIAGNOSE = "seconds/diagnose"
    TOKENS = "tokens"
    MICRO_BATCH_TOKENS = "micro_batch_tokens"
    """Tokens of a micro-batch, on a trial that ran out of memory with those of its budget and was run with fewer."""
    BEST_SO_FAR = "search/best_loss"
    """On the parent: lowest final loss of the finished trials; the step is how many have finished."""
    BASELINE_BIGRAM = "baseline/bigram_loss"
    """On the parent: loss of the task's bigram model on the validation split."""


class Tag:
    """Tag names in the tracking store."""

    KIND = "assay.kind"
    """'search' on a parent run, 'trial' on a child."""
    SEARCH = "assay.search"
    SPACE = "assay.space_id"
    KEY = "assay.key"
    """Deterministic and unique: '<search>/<generation>/<stage>/<number>'; a resumed trial finds its run by it."""
    NUMBER = "assay.number"
    STAGE = "assay.stage"
    GENERATION = "assay.generation"
    """The generation in which a trial was proposed or a final planned; finals are numbered from 0 in each."""
    BATCH = "assay.batch"
    """On a trial: the batch it was last written in (search_space.batches). On the parent: the newest one begun."""
    STATUS = "assay.status"
    REASON = "assay.reason"
    ATTEMPTS = "assay.attempts"
    """On a trial that was run more than once: how each earlier attempt ended, a line each."""
    MUTATIONS = "assay.mutations"
    """On a trial of a population that went on from another one's state: when, from whom, with which settings."""
    REMARKS = "assay.remarks"
    """What went wrong on a trial's way without ending it, a line each."""
    WEIGHTS = "assay.weights"
    """On a trial whose trained model was deleted: why."""
    CAUTIONS = "assay.cautions"
    """On a trial whose model is legal but doubtful: why, a line each."""
    SPEC = "assay.spec_id"
    POINT = "assay.point_id"
    ARCH = "assay.arch_id"
    CANDIDATE = "assay.candidate"
    """On a final, or on a sweep for one: which contestant it belongs to."""
    REPLICA = "assay.replica"
    """On a final: which seeds; on a sweep for one: how many factors of 2 the rate lies above the contestant's own."""
    CONTEST = "assay.contest"
    """On the parent: how its finals of the best candidates were asked for, as JSON."""
    LADDER = "assay.ladder"
    """On the parent of a ladder: its sizes, target and candidates, as JSON."""
    RUNG = "assay.rung"
    """On a training of a ladder: the number of parameters that was asked for."""
    UNTUNED = "assay.untuned"
    """On a final whose learning rate is not known to be the best one for it: why."""
    SAME_AS = "assay.same_as"
    """On a final whose spec another final of the search had already trained: that final's number."""
    FIRST_NONFINITE = "assay.first_nonfinite_step"
    FINGERPRINT = "assay.data_fingerprint"
    UNIT = "assay.unit"
    """On the parent: what one token of the task is, 'byte' or 'token'; losses are nats per unit."""
    DETERMINISTIC = "assay.deterministic"
    BASELINE = "assay.is_baseline"
    ENVIRONMENT = "assay.environment"
    """Id of the driver's environment; a trial trained after the code changed carries another one than its search."""
    DRIVER = "assay.driver"
    """On the parent: 'host:pid:start' of the process that runs the search."""
    JOINED = "assay.joined/"
    """On the parent, followed by a driver: one that works, or worked, beside the driver that leads."""
    BEAT = "assay.beat"
    """On the parent: seconds since the epoch at which one of its drivers was last known to live."""
    STUDY = "assay.study"
    """On the parent: URI of the study that steers the search, without credentials."""
    REPLACES = "assay.replaces"
    """On a trial trained again where that need not give the same numbers: the deleted run of the attempt before."""
    TRAINED_FROM = "assay.trained_from"
    """On a run of the stage train: the run whose candidate it trains longer."""
    WARNINGS = "assay.warnings"
    """On a trial with diagnostics: what its last checkup found unusual, a line each; absent where nothing was."""
    NOTE = "mlflow.note.content"


class Artifact:
    """Artifact paths. A parent holds what all its children share."""

    EXPERIMENT = "experiment.yaml"
    EXPERIMENT_PLAIN = "experiment.json"
    SPACE = "space.json"
    ENVIRONMENT = "environment.json"
    LOCK = "packages.txt"
    DIFF = "uncommitted.diff"
    ENVIRONMENTS = "environments"
    """Folder on the parent: <environment id>/ with the three files above, one for each later environment."""
    BLOCKS = "blocks"
    """Folder on the parent: the source of the user's own block modules."""
    DATA = "data"
    """Folder on the parent: <fingerprint>.safetensors."""
    CURVES = "curves"
    """Folder on the parent: Parquet shards of all readings."""
    TRIALS = "trials"
    """Folder on the parent: tables of ended trials, as Parquet, for who reads a large search (search_space.batches)."""
    REPORT = "report"
    EXPORT = "export"
    """Folder on a trial that was exported: the model as `assay export` wrote it."""
    SPEC = "spec.json"
    RESULT = "result.json"
    MUTATIONS = "mutations.json"
    """On a trial with such a tag: the same as data, and the settings of the whole way to its weights."""
    DIAGNOSTICS = "diagnostics.json"
    """On a trial with diagnostics: its checkups, a list."""
    MODEL = "model.safetensors"
    TRACEBACK = "last_lines.txt"


TERMINAL = {
    Status.OK: "FINISHED",
    Status.PRUNED: "FINISHED",
    Status.INFEASIBLE: "FAILED",
    Status.DIVERGED: "FINISHED",
    Status.OUT_OF_MEMORY: "FAILED",
    Status.PREEMPTED: "KILLED",
    Status.TIMED_OUT: "KILLED",
    Status.FAILED: "FAILED",
}
"""The MLflow run status of each trial status."""


def to_plain(record: Any) -> dict[str, Any]:
    """A record as plain JSON data, which shares nothing that can be changed with the record."""
    return {
        one.name: _plain(getattr(record, one.name))
        for one in dataclasses.fields(record)
        if not (one.metadata.get(ADDED) and getattr(record, one.name) == one.default)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return str(value) if isinstance(value, StrEnum) else value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    # Of a record within a record every field is kept.
    return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}


def spec_from_plain(plain: dict[str, Any]) -> TrialSpec:
    """The inverse of to_plain for a TrialSpec."""
    return TrialSpec(
        **{
            **plain,
            "budget": Budget(**plain["budget"]),
            "seeds": Seeds(**plain["seeds"]),
            "blocks": tuple(plain["blocks"]),
            "changes": tuple(plain.get("changes", ())),
        }
    )


def result_from_plain(plain: dict[str, Any]) -> TrialResult:
    """The inverse of to_plain for a TrialResult."""
    return TrialResult(
        **{
            **plain,
            "status": Status(plain["status"]),
            "curve": tuple(Reading(**reading) for reading in plain["curve"]),
            "checkups": tuple(checkup_from_plain(checkup) for checkup in plain.get("checkups", ())),
            "remarks": tuple(plain.get("remarks", ())),
            "document_losses": tuple(plain.get("document_losses", ())),
            "document_counts": tuple(plain.get("document_counts", ())),
        }
    )
