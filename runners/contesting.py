"""The driver of a contest: opens the study, lines up, trains what the judge asks for, and ends cleanly."""

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runners.contest import STAGES, ContestSource, ledger_of
from runners.contestants import Baseline, line_up
from runners.engine import Interrupts
from runners.engines import open_engine, with_jobs
from runners.environment import capture
from runners.owners import mark_owner
from runners.progress import Progress
from runners.recorder import Recorder
from runners.search import SECONDS
from runners.shared import kept_data
from runners.study import Study, study_folder
from runners.sync import keep_for_sync
from runners.tasks import task_from_plain
from runners.trials import TRAINED
from search_space.contest import Judge
from search_space.records import Tag
from search_space.settings import ContestSpec

if TYPE_CHECKING:
    from runners.tracking import Tracker
    from search_space.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class ContestOutcome:
    """How a contest stands when its driver returns."""

    interrupted: str
    """Name of the signal that ended it; empty when it ended by itself."""
    is_over: bool
    """False when the same command has more to train."""
    trained: int
    """Trainings that have ended, those of earlier drivers included."""
    unshown: int
    """Ends that the tracking store does not show, because it could not be written."""


def run_contest(
    experiment: "Experiment",
    spec: ContestSpec,
    judge: Judge,
    baseline: Baseline,
    *,
    tracker: "Tracker",
    study_uri: str,
    jobs: int = 0,
    data_path: str = "",
    address: str = "",
    within_hours: bool = False,
    progress: Progress | None = None,
    trials: str = TRAINED,
) -> ContestOutcome:
    """Run the finals of a search's best candidates against a baseline, or go on with them.

    Arguments are those of `run_search`; `within_hours` holds the contest to what the search has left of its max_hours.
    Raises UserError for what the user can mend, EngineError when no worker can start.
    """
    shown = Progress() if progress is None else progress
    experiment = with_jobs(experiment, jobs)
    with Study.open(study_uri, experiment) as study:
        folder = study_folder(study_uri, experiment.name)
        mark_owner(folder, tracker.place)
        data = task_from_plain(experiment.task).prepare(data_path)
        study.bind(data.shape, data.fingerprint)
        file = kept_data(data, folder)
        environment = capture(experiment.blocks)
        keep_for_sync(study, folder, environment)
        ledgers = {stage: ledger_of(study, stage) for stage in STAGES}
        lineup = line_up(study, ledgers[STAGES[-1]], spec, baseline, judge)

        def open_search() -> str:
            run = tracker.start_search(experiment, experiment.space.id, data, environment, study_uri)
            tracker.tag_search({Tag.CONTEST: lineup.shown})
            return run

        recorder = Recorder(tracker, open_search, shown.note)
        recorder.open(needed=False)
        source = ContestSource(study, ledgers, lineup, judge, recorder, shown)
        if within_hours and math.isfinite(experiment.max_hours):
            source.deadline = time.monotonic() + experiment.max_hours * 3600 - float(study.noted(SECONDS, 0.0))
        status, unshown = "FAILED", 0
        try:
            with (
                Interrupts() as interrupts,
                open_engine(experiment, address=address, data=file, folder=folder, trials=trials) as engine,
            ):
                source.catch_up()
                engine.drive(source, interrupts)
                source.show(now=True)
                engine.stop()
                source.cut_off(interrupts.asked or "max_hours")
            status = "KILLED" if interrupts.asked else "FINISHED"
        finally:
            shown.end()
            others = study.crew.others_as_last_known()
            unshown = recorder.close(lambda: tracker.finish_search(status, {}, others), hurried=status != "FINISHED")
            source.settle_shown()
        return ContestOutcome(
            interrupted=interrupts.asked, is_over=source.is_over(), trained=source.done(), unshown=unshown
        )
