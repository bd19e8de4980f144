"""Reading back from the tracking store what replay, export and housekeeping need."""

import json
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from runners.connecting import StoreError, connect
from search_space.errors import UserError
from search_space.places import Place, present_path
from search_space.records import (
    Artifact,
    Metric,
    Stage,
    Status,
    Tag,
    TrialResult,
    TrialSpec,
    result_from_plain,
    spec_from_plain,
)
from search_space.space import unknown

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run
    from mlflow.tracking import MlflowClient

Made = TypeVar("Made")

PAGE = 1000


def every_run(
    client: "MlflowClient", experiments: list[str], query: str = "", order: tuple[str, ...] = ()
) -> "list[Run]":
    """Every active run of the experiments that matches a query."""
    found: list[Run] = []
    token = None
    while True:
        page = client.search_runs(experiments, query, max_results=PAGE, order_by=list(order), page_token=token)
        found += page
        token = page.token
        if not token:
            return found


class Store:
    """The read side of one tracking store; it never creates a store."""

    def __init__(self, place: Place) -> None:
        if place.database is not None and not place.database.is_file():
            raise StoreError(
                f"tracking store {place.uri}: there is no such file; run a search first, or correct --tracking-uri"
            )
        self.place = place
        self._temporary: Path | None = None
        self.client = connect(place)

    def searches(self) -> dict[str, "Run"]:
        """The parent run of every search by name, newest first."""
        experiments = [experiment.experiment_id for experiment in self._experiments()]
        parents = self.runs(experiments, f"tags.`{Tag.KIND}` = 'search'") if experiments else []
        return {run.data.tags[Tag.SEARCH]: run for run in parents}

    def _experiments(self) -> "list[Experiment]":
        found: list[Experiment] = []
        token = None
        while True:
            page = self.client.search_experiments(max_results=PAGE, page_token=token)
            found += page
            token = page.token
            if not token:
                return found

    def parent(self, name: str) -> "Run":
        """The parent run of a search; StoreError with near matches when there is none."""
        experiment = self.client.get_experiment_by_name(name)
        parents = self.runs([experiment.experiment_id], f"tags.`{Tag.KEY}` = '{name}'") if experiment else []
        if not parents:
            raise StoreError(f"{name!r} {unknown('search', name, self.searches())} (store {self.place.uri})")
        return parents[0]

    def children(self, parent: "Run") -> "list[Run]":
        """The trials of a search, in order of key."""
        found = self.runs(
            [parent.info.experiment_id],
            f"tags.`{Tag.KIND}` = 'trial' and tags.`{Tag.SEARCH}` = '{parent.info.run_name}'",
        )
        return sorted(found, key=lambda run: (run.data.tags[Tag.STAGE], int(run.data.tags[Tag.NUMBER])))

    def runs(self, experiments: list[str], query: str = "", order: tuple[str, ...] = ()) -> "list[Run]":
        """Every active run that matches a query."""
        return every_run(self.client, experiments, query, order)

    def find_run(self, name: str) -> "Run":
        """The trial named '<search>/<number>', '<search>/final/<number>', '<search>/best', or by its run id."""
        search, _, rest = name.partition("/")
        if rest:
            return self._find_in(self.parent(search), rest)
        if re.fullmatch(r"[0-9a-f]{4,32}", name):
            experiments = [experiment.experiment_id for experiment in self._experiments()]
            matches = self.runs(experiments, f"attributes.run_id LIKE '{name}%'") if experiments else []
            trials = [run for run in matches if run.data.tags.get(Tag.KIND) == "trial"]
            if len(trials) == 1:
                return trials[0]
            if trials:
                ids = ", ".join(run.info.run_id for run in trials[:5])
                raise StoreError(f"run {name!r}: {len(trials)} runs begin so ({ids}); give more characters")
        raise StoreError(
            f"run {name!r}: no trial has this name in {self.place.uri}; name one as SEARCH/NUMBER, SEARCH/best, or by "
            f"the beginning of its run id ('assay runs' lists them). Searches: {', '.join(self.searches()) or 'none'}"
        )

    def _find_in(self, parent: "Run", rest: str) -> "Run":
        search = parent.info.run_name
        stage, _, number = rest.rpartition("/")
        trials = self.children(parent)
        if rest == "best":
            good = [run for run in trials if _is_contender(run)]
            if not good:
                raise StoreError(f"{search}/best: no trial of this search ended well yet; see 'assay runs {search}'")
            return min(good, key=lambda run: (run.data.metrics[Metric.LOSS], int(run.data.tags[Tag.NUMBER])))
        wanted = (stage or Stage.SEARCH, number)
        matches = [run for run in trials if (run.data.tags[Tag.STAGE], run.data.tags[Tag.NUMBER]) == wanted]
        if not matches:
            numbers = [int(run.data.tags[Tag.NUMBER]) for run in trials if run.data.tags[Tag.STAGE] == wanted[0]]
            held = f"{min(numbers)} to {max(numbers)}" if numbers else "none"
            raise StoreError(
                f"run {search}/{rest}: the search holds no {wanted[0]} trial {number!r}; trials there: {held}; "
                f"'assay runs {search}' lists them"
            )
        return max(matches, key=lambda run: int(run.data.tags.get(Tag.GENERATION, "0")))

    def artifact(self, run: "Run", path: str, *, required: bool = True) -> Path | None:
        """An artifact as a local file or folder, from the store's present place; None when absent and not required."""
        folder = present_path(run.info.artifact_uri, self.place)
        if folder is not None:
            local = folder / path
            if local.exists():
                return local
        elif self._listed(run, path):
            return Path(self.client.download_artifacts(run.info.run_id, path, str(self._downloads(run.info.run_id))))
        if required:
            raise StoreError(
                f"run {run.info.run_name} ({run.info.run_id[:8]}): the store holds no artifact {path!r}"
                + (f" under {folder}; move artifacts/ together with the database" if folder else "")
            )
        return None

    def _downloads(self, run_id: str) -> Path:
        """A folder for what a server sends; it lives as long as the Store."""
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="assay-artifacts-"))
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        folder = self._temporary / run_id
        folder.mkdir(exist_ok=True)
        return folder

    def _listed(self, run: "Run", path: str) -> bool:
        parent = str(Path(path).parent) if "/" in path else None
        return any(entry.path == path for entry in self.client.list_artifacts(run.info.run_id, parent))

    def text(self, run: "Run", path: str) -> str:
        """The text of an artifact; StoreError when absent."""
        local = self.artifact(run, path)
        assert local is not None
        return self._read(run, path, local, str)

    def _read(self, run: "Run", path: str, file: Path, make: Callable[[str], Made]) -> Made:
        """What a text artifact says; StoreError when it is damaged."""
        try:
            return make(file.read_text())
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"run {run.info.run_name} ({run.info.run_id[:8]}): its artifact {path!r} is damaged "
                f"({type(error).__name__}: {str(error)[:200]}); bring back an intact copy of {file}"
            ) from error

    def record(self, run: "Run", path: str, make: Callable[[Any], Made]) -> Made:
        """What is made of a JSON artifact; StoreError when it is absent or damaged."""
        local = self.artifact(run, path)
        assert local is not None
        return self._read(run, path, local, lambda text: make(json.loads(text)))

    def spec(self, run: "Run") -> TrialSpec:
        """The full spec of a trial."""
        return self.record(run, Artifact.SPEC, spec_from_plain)

    def result(self, run: "Run") -> TrialResult:
        """The full result of a finished trial; StoreError for one that has not ended."""
        status = run.data.tags.get(Tag.STATUS, "")
        if self.artifact(run, Artifact.RESULT, required=False) is None:
            search = run.data.tags.get(Tag.SEARCH, "")
            raise StoreError(
                f"run {run.info.run_name} ({run.info.run_id[:8]}): has no result (status {status or 'running'}); "
                f"continue the search {search!r} first"
            )
        return self.record(run, Artifact.RESULT, result_from_plain)

    def parent_of(self, run: "Run") -> "Run":
        """The search a trial belongs to."""
        return self.client.get_run(run.data.tags["mlflow.parentRunId"])

    def environment_file(self, run: "Run", name: str) -> Path | None:
        """A file or folder that describes the code a trial was trained with; None when the store has none."""
        parent = self.parent_of(run)
        later = f"{Artifact.ENVIRONMENTS}/{run.data.tags.get(Tag.ENVIRONMENT, '')}"
        if self.artifact(parent, f"{later}/{Artifact.ENVIRONMENT}", required=False) is not None:
            return self.artifact(parent, f"{later}/{name}", required=False)
        return self.artifact(parent, name, required=False)

    def environment(self, run: "Run") -> dict[str, Any]:
        """What the driver recorded of its own code when this trial was trained."""
        file = self.environment_file(run, Artifact.ENVIRONMENT)
        return self._read(run, Artifact.ENVIRONMENT, file, lambda text: dict(json.loads(text))) if file else {}


def _is_contender(run: "Run") -> bool:
    tags = run.data.tags
    return tags[Tag.STAGE] == Stage.SEARCH and tags.get(Tag.STATUS) == Status.OK and Metric.LOSS in run.data.metrics
