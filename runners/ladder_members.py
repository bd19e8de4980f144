"""The candidates that a ladder takes from runs of earlier searches."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blocks.model import ModelConfig
from blocks.registry import decode, encode
from runners.candidate import full_space
from runners.tasks import TASKS
from search_space.canon import unflatten
from search_space.domains import Choice, Domain, IntRange, Scalar
from search_space.errors import UserError
from search_space.experiment import Experiment, from_plain
from search_space.records import Artifact, Metric, Tag, TrialSpec
from search_space.space import walk

if TYPE_CHECKING:
    from runners.store import Store

_WIDTH = "model.d_model"
_LONGEST = 40
"""Characters of a label."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A candidate as it was found in a run of an earlier search."""

    label: str
    run: str
    """NAME/NUMBER and the like, as it was typed."""
    run_id: str
    experiment: Experiment
    spec: TrialSpec
    point: Mapping[str, Scalar]
    """Its flat point without a width."""
    params: float

    @property
    def width(self) -> int:
        """d_model of the run."""
        return int(self.spec.candidate["model"]["d_model"])

    @property
    def rate_path(self) -> str:
        """Where its learning rate stands in the point."""
        return f"optimizer.{self.point['optimizer.kind']}.learning_rate"


def members(store: "Store", runs: Sequence[str]) -> tuple[Member, ...]:
    """The candidates of the runs; UserError unless all of them were trained on the same data."""
    found = [_member(store, run) for run in runs]
    first = found[0]
    for other in found[1:]:
        if other.spec.data_fingerprint != first.spec.data_fingerprint or other.spec.task != first.spec.task:
            raise UserError(
                f"assay ladder: {first.run} and {other.run} were trained on different data "
                f"({first.spec.data_fingerprint[:12]}, {other.spec.data_fingerprint[:12]}); a ladder compares "
                f"candidates on the same; name runs of one search, or of searches with the same task"
            )
        if other.spec.candidate == first.spec.candidate:
            raise UserError(f"assay ladder: {first.run} and {other.run} are the same candidate; name another")
    return tuple(dataclasses.replace(one, label=label) for one, label in zip(found, _labels(found), strict=True))


def _member(store: "Store", text: str) -> Member:
    run = store.find_run(text)
    plain = json.loads(store.text(store.parent_of(run), Artifact.EXPERIMENT_PLAIN))
    experiment = from_plain(plain, full_space, TASKS)
    spec = store.spec(run)
    point = _point(run.data.params, experiment, text)
    model = spec.candidate["model"]
    sizes = {name: model[name] for name in ("vocab_size", "train_len", "max_len", "d_ff", "d_model")}
    again = decode(ModelConfig, unflatten(point)["model"], **sizes).canonical()
    if encode(again) != model:
        raise UserError(
            f"run {text}: its point no longer gives the model that was trained ({run.data.tags[Tag.ARCH]}); "
            f"bring the blocks back that it was trained with, or train it anew"
        )
    params = run.data.metrics.get(Metric.PARAMS)
    if params is None:
        raise UserError(f"run {text}: has not ended, so its size is not known; let it end, or name another run")
    return Member(
        label="", run=text, run_id=run.info.run_id, experiment=experiment, spec=spec, point=point, params=params
    )


def _point(params: Mapping[str, str], experiment: Experiment, run: str) -> dict[str, Scalar]:
    """The flat point that a run's parameters tell, without a width."""

    def ask(path: str, domain: Domain) -> Scalar:
        if path not in params:
            raise UserError(f"run {run}: the store holds no {path}, so its candidate is not known; name another run")
        text = params[path]
        if isinstance(domain, Choice):
            # A ladder's own runs hold numbers of heads that no file offers.
            return next((option for option in domain.options if str(option) == text), type(domain.options[0])(text))
        return int(text) if isinstance(domain, IntRange) else float(text)

    point = walk(experiment.full, ask)
    point.pop(_WIDTH, None)
    return point


def _labels(found: Sequence[Member]) -> list[str]:
    """What sets the candidates apart, in few words; their runs where that is nothing or too much."""
    paths = list(dict.fromkeys(path for one in found for path in one.point))
    rates = {one.rate_path for one in found}
    differing = [path for path in paths if path not in rates and len({str(one.point.get(path)) for one in found}) > 1]
    kinds = [path for path in differing if path.endswith(".kind")] or differing
    labels = ["+".join(_words(path, one.point[path]) for path in kinds if path in one.point) for one in found]
    fits = all(0 < len(label) <= _LONGEST for label in labels) and len(set(labels)) == len(labels)
    return labels if fits else [one.run for one in found]


def _words(path: str, value: Scalar) -> str:
    return str(value) if path.endswith(".kind") else f"{path.rpartition('.')[2]}={value}"
