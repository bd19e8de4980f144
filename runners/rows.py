"""How a search and its trials look in MLflow: parameters, tags, notes, and the texts kept as artifacts."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from search_space import space as spaces
from search_space.canon import canonical_json
from search_space.checkup import Checkup
from search_space.domains import Scalar
from search_space.records import Artifact, Metric, Reading, Stage, Tag, TrialResult, result_from_plain, to_plain

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

    from blocks.cost import Cost
    from runners.candidate import Resolved
    from runners.environment import Environment
    from runners.tasks.data import TaskData
    from search_space.experiment import Experiment

VIEW_KEY = "assay"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
VIEW_PARAMS = 8
"""Searched paths shown as columns of the table of runs."""
PARAM_LIMIT = 6000
TAG_LIMIT = 8000
"""Characters beyond which MLflow cuts a value with only a warning; we cut first and say where the whole text is."""
_CUT = " ... (cut; the whole text is among the artifacts)"
_SIZES = ("d_model", "d_ff", "vocab_size", "train_len", "max_len")
_COSTS = {
    Metric.PARAMS: "params",
    Metric.ACTIVE_PARAMS: "active_params",
    Metric.BODY_PARAMS: "body_params",
    Metric.FLOPS: "flops_per_token",
    Metric.FLOPS_CAUSAL: "flops_per_token_causal",
    Metric.STATE_BYTES: "state_bytes_per_token",
    Metric.FIXED_STATE_BYTES: "fixed_state_bytes",
}


def is_finite(value: float) -> bool:
    """True for what MLflow can hold as a metric."""
    return math.isfinite(value)


def cut_param(value: str) -> str:
    """A parameter value that MLflow keeps whole."""
    return value if len(value) <= PARAM_LIMIT else value[: PARAM_LIMIT - len(_CUT)] + _CUT


def cut_tag(value: str) -> str:
    """A tag value that MLflow keeps whole."""
    return value if len(value) <= TAG_LIMIT else value[: TAG_LIMIT - len(_CUT)] + _CUT


def trial_params(flat: Mapping[str, Scalar], candidate: Mapping[str, Any]) -> dict[str, str]:
    """The walked point, and the sizes that were solved or came from the task."""
    sizes = {f"model.{name}": candidate["model"][name] for name in _SIZES if name in candidate["model"]}
    return {path: str(value) for path, value in {**sizes, **flat}.items()}


def parent_params(experiment: "Experiment") -> dict[str, str]:
    """The settings of a search that may not change under its name."""
    plain = experiment.plain()
    sections = {name: plain[name] for name in ("task", "budget", "search") if name in plain}
    flat = _leaves(sections, "")
    flat.pop("search.trials", None)
    return {**flat, "objectives": ", ".join(experiment.objectives)}


def _leaves(value: Any, path: str) -> dict[str, str]:
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, child in value.items():
            found.update(_leaves(child, f"{path}.{key}" if path else key))
        return found
    return {path: value if isinstance(value, str) else json.dumps(value)}


def costs(cost: "Cost") -> dict[str, float]:
    """A model's cost under its metric names."""
    return {metric: float(getattr(cost, name)) for metric, name in _COSTS.items()}


def result_tags(result: TrialResult) -> dict[str, str]:
    """How a trial ended, as tags."""
    tags = {Tag.STATUS: str(result.status)}
    if result.reason:
        tags[Tag.REASON] = cut_tag(result.reason)
    if result.remarks:
        tags[Tag.REMARKS] = cut_tag("\n".join(result.remarks))
    if result.first_nonfinite_step:
        tags[Tag.FIRST_NONFINITE] = str(result.first_nonfinite_step)
    return tags


def finite_curve(curve: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """The readings whose losses are numbers."""
    return tuple(reading for reading in curve if math.isfinite(reading.loss) and math.isfinite(reading.train_loss))


def result_json(result: TrialResult) -> str:
    """A result as JSON text; floats survive bit for bit."""
    return canonical_json(to_plain(dataclasses.replace(result, curve=finite_curve(result.curve))))


def checkups_json(result: TrialResult) -> str:
    """The checkups of a result as JSON text, a list."""
    return canonical_json([to_plain(checkup) for checkup in result.checkups])


def curve_of(text: str) -> tuple[Reading, ...]:
    """The curve in the JSON text of a result."""
    return result_from_plain(json.loads(text)).curve


def dataset(task: Mapping[str, Any], data: "TaskData") -> "DatasetInput":
    """The data of a search as an MLflow input."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    kind = str(task["kind"])
    profile = {
        "fingerprint": data.fingerprint,
        "unit": data.unit,
        "bytes": data.size_bytes,
        "bigram_loss": data.bigram_loss,
    }
    described = Dataset(
        name=kind,
        digest=data.fingerprint[:12],
        source_type="assay_task",
        source=json.dumps(dict(task), sort_keys=True),
        profile=json.dumps(profile),
    )
    return DatasetInput(described, [InputTag("mlflow.data.context", "training")])


def experiment_files(experiment: "Experiment") -> dict[str, str]:
    """The artifacts that describe a search."""
    return {
        Artifact.EXPERIMENT: experiment.text,
        Artifact.EXPERIMENT_PLAIN: json.dumps(experiment.plain(), indent=1, sort_keys=True),
        Artifact.SPACE: json.dumps(spaces.plain(experiment.space), indent=1),
    }


def environment_files(environment: "Environment") -> dict[str, str]:
    """The artifacts that describe the code; empty ones are left out."""
    files = {
        Artifact.ENVIRONMENT: json.dumps(environment.plain(), indent=1),
        Artifact.LOCK: environment.lock(),
        Artifact.DIFF: environment.diff,
        **{f"{Artifact.BLOCKS}/{path}": text for path, text in environment.sources.items()},
    }
    return {path: text for path, text in files.items() if text}


def table_view(experiment: "Experiment") -> str:
    """The state of MLflow's table of runs that compares trials: best first, what was searched beside it.

    MLflow opens it through the tag VIEW_TAG and the query `viewStateShareKey`.
    """
    space = experiment.space
    conditional = spaces.conditional(space)
    always = [path for path in spaces.searched(space) if path not in conditional]
    always.sort(key=lambda path: not path.endswith(".kind"))
    metrics = [Metric.LOSS, Metric.PARAMS, Metric.FLOPS]
    state = {
        "searchFilter": "",
        "orderByKey": f"metrics.`{Metric.LOSS}`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": [
            *(f"metrics.`{name}`" for name in metrics),
            *(f"params.`{path}`" for path in always[:VIEW_PARAMS]),
            f"tags.`{Tag.STATUS}`",
            f"tags.`{Tag.STAGE}`",
        ],
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "compareRunsMode": "TABLE",
        "viewMaximized": False,
        "runListHidden": False,
        "groupBy": None,
    }
    return json.dumps(state)


def parent_note(experiment: "Experiment", data: "TaskData") -> str:
    """What a reader of the parent's page wants to know first."""
    name = experiment.name
    budget = experiment.budget
    lines = [
        f"### {name}",
        experiment.description.strip(),
        "",
        f"- task: `{experiment.task['kind']}`, data `{data.fingerprint[:12]}`",
        f"- budget: {budget.tokens:,} training tokens a trial, {budget.batch_tokens:,} a step",
        f"- objectives: {', '.join(experiment.objectives)}; "
        f"sampler {experiment.search.sampler}, seed {experiment.search.seed}",
    ]
    if data.bigram_loss is not None:
        lines.append(f"- bigram baseline: {data.bigram_loss:.4f} nats per {data.unit}")
    lines += ["", f"`assay report {name}` writes the verdicts, `assay replay {name}/NUMBER` trains a run again."]
    return cut_tag("\n".join(lines))


def cautioned(resolved: "Resolved") -> dict[str, str]:
    """The tag that says what is doubtful about a legal model; none where nothing is."""
    from blocks.cautions import cautions

    found = cautions(resolved.candidate.model)
    return {Tag.CAUTIONS: cut_tag("\n".join(found))} if found else {}


def child_note(search: str, number: int, stage: Stage, resolved: "Resolved") -> str:
    """What a reader of a trial's page wants to know first."""
    name = f"{search}/{number}" if stage == Stage.SEARCH else f"{search}/{stage}/{number}"
    cost = resolved.cost
    lines = [
        f"### {name}",
        f"{cost.params:,} parameters ({cost.body_params:,} without embeddings), "
        f"{cost.flops_per_token:,.0f} FLOPs per token",
        "",
        f"architecture `{resolved.arch_id}`",
        "",
        f"`assay show {name}`, `assay replay {name}`, `assay export {name} --to FOLDER`",
    ]
    return cut_tag("\n".join(lines))


def warned(note: str, checkup: Checkup) -> str:
    """A trial's note with what its last checkup says."""
    said = [f"- {words}" for words in (*checkup.warnings, *checkup.notes)] or ["- nothing unusual"]
    return cut_tag("\n".join([note, "", f"diagnostics at {checkup.tokens:,} tokens", "", *said]))
