"""Shows trials to the tracking store as they run. The store failing costs the view, never the study."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runners.candidate import Resolved
from search_space.records import Reading, Stage, Status, TrialResult, TrialSpec

if TYPE_CHECKING:
    from runners.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One trial as the tracking store is to show it."""

    number: int
    stage: Stage
    generation: int
    spec: TrialSpec
    resolved: Resolved
    name: str
    tags: Mapping[str, str]
    weights: Path | None
    anew: bool = False
    """True when the trial is trained from its start now, whatever an earlier attempt has shown."""

    @property
    def key(self) -> str:
        """Unique within a search."""
        return f"{self.generation}/{self.stage}/{self.number}"


def short_name(resolved: Resolved) -> str:
    """A candidate in a few words: 'linear+rotary swiglu 2L'."""
    model = resolved.candidate.model
    return f"{model.mixer.kind}+{model.position.kind} {model.ffn.kind} {model.layers}L"


class Recorder:
    """Begins, follows and ends the runs of trials, and keeps count of those whose end could not be written."""

    def __init__(
        self,
        tracker: "Tracker",
        warn: Callable[[str], None],
        missed: Sequence[str],
        remember: Callable[[list[str]], None],
    ) -> None:
        """`missed` names what earlier drivers could not write; `remember` stores the names when they change."""
        from mlflow.exceptions import MlflowException

        self._errors = (MlflowException, OSError)
        self._tracker = tracker
        self._warn = warn
        self._runs: dict[str, str] = {}
        self._warned = False
        self._missed = set(missed)
        self._remember = remember

    def begin(self, trial: Shown) -> None:
        """Open the trial's run, or take it up again."""
        self._attempt(lambda: self._begin(trial))

    def reading(self, trial: Shown, reading: Reading) -> None:
        """Add a reading to its curve."""
        run = self._runs.get(trial.key)
        if run is not None:
            self._attempt(lambda: self._tracker.log_reading(run, reading))

    def finish(self, trial: Shown, result: TrialResult) -> None:
        """Close its run; weights that are stored are deleted here."""

        def write() -> None:
            if trial.key not in self._runs:
                self._begin(trial)
            weights = trial.weights
            kept = weights if weights is not None and result.status is Status.OK and weights.exists() else None
            self._tracker.finish_trial(self._runs.pop(trial.key), result, kept)
            if weights is not None:
                weights.unlink(missing_ok=True)

        missed = self._missed - {trial.key} if self._attempt(write) else self._missed | {trial.key}
        if missed != self._missed:
            self._missed = missed
            self._remember(sorted(missed))

    @property
    def any_missed(self) -> bool:
        """True when the end of some trial is not in the tracking store."""
        return bool(self._missed)

    def has_missed(self, trial: Shown) -> bool:
        """True when the trial's end is not in the tracking store although the study may have settled it."""
        return trial.key in self._missed

    def preempt(self, trial: Shown, reason: str) -> None:
        """Mark a trial that did not end and will be run again."""
        if trial.key in self._runs:
            result = TrialResult(status=Status.PREEMPTED, reason=reason)
            self._attempt(lambda: self._tracker.finish_trial(self._runs.pop(trial.key), result, None))

    def drop_weights(self, trial: Shown, why: str) -> None:
        """Delete the trained model of a trial that has ended."""
        self._attempt(lambda: self._tracker.drop_weights(trial.number, trial.stage, trial.generation, why))

    def close(self, status: str, metrics: Mapping[str, float]) -> None:
        """Close the search's own run."""
        self._attempt(lambda: self._tracker.finish_search(status, metrics))

    def _begin(self, trial: Shown) -> None:
        self._runs[trial.key] = self._tracker.start_trial(
            trial.number,
            trial.stage,
            trial.generation,
            trial.spec,
            trial.resolved,
            trial.name,
            trial.tags,
            anew=trial.anew,
        )

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except self._errors as error:
            if not self._warned:
                self._warn(
                    f"the tracking store cannot be written ({type(error).__name__}: {str(error).splitlines()[0]}); "
                    "the search goes on; its results are safe in the study and reach the store when the same command "
                    "runs again"
                )
            self._warned = True
            return False
        return True
