"""The only reader of the tracking store: searches, their runs as plain rows, artifacts, and one DataFrame row a trial.

A SQLite store is read by analysis.fastread, a server by analysis.webread, any other by the tracking client in
analysis.clientread; all give the same rows. The client and pandas are imported where they are needed, so that a listing
answers at once.
"""

import atexit
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from analysis import clientread, fastread, webread
from analysis.fastread import RunRow, StoreError
from analysis.server import Server, speaks_to
from search_space.places import locate, present_path
from search_space.records import Metric, Stage, Status, Tag
from search_space.space import unknown

if TYPE_CHECKING:
    import pandas as pd

    from analysis.frame import Search

_WHOLE_ID = re.compile(r"[0-9a-f]{32}")


class Reader(Protocol):
    """How the runs of one kind of store are read."""

    def experiments(self, uri: str) -> dict[str, str]:
        """Name to id of every live experiment."""

    def runs(self, uri: str, experiment_ids: Sequence[str]) -> list[RunRow]:
        """Every live run of the experiments, oldest first."""

    def runs_by_id(self, uri: str, run_ids: Sequence[str]) -> list[RunRow]:
        """The live runs with these ids."""


@dataclass(frozen=True, kw_only=True)
class SearchRow:
    """One search in a listing."""

    name: str
    run_id: str
    state: str
    start: float
    end: float
    trials: dict[str, int]
    """Search trials by status."""
    finals: int
    """Finals of the newest generation that has any."""
    best_loss: float | None
    """Lowest final validation loss of a finished trial, or None when none has finished."""
    best: str
    """NAME/NUMBER of that trial, or ''."""
    driver: str
    """The process that runs or ran it, as it was recorded."""


def list_searches(uri: str) -> list[SearchRow]:
    """Every search of a store, newest first."""
    names = _experiments(uri)
    rows = _runs(uri, list(names.values()))
    found = [_summary(parent, rows) for parent in rows if parent.tags.get(Tag.KIND) == "search"]
    return sorted(found, key=lambda row: -row.start)


def list_runs(uri: str, name: str) -> list[RunRow]:
    """The trials of one search: search stage first, then finals and replays, each by number."""
    rows = [row for row in _search_runs(uri, name) if row.is_trial]
    order = [str(stage) for stage in Stage]
    return sorted(rows, key=lambda row: (order.index(row.stage), row.number, row.generation, row.start))


def find_run(uri: str, text: str) -> RunRow:
    """The run named NAME/NUMBER, NAME/best, NAME/final/NUMBER, or by its id or a unique beginning of it.

    Of a number that several generations hold, the newest one's.
    """
    if "/" not in text:
        return _by_prefix(uri, text)
    name, *stage, which = text.split("/")
    rows = list_runs(uri, name)
    if which == "best":
        done = [row for row in rows if _has_finished(row)]
        if not done:
            raise StoreError(f"{text}: no trial of {name!r} has finished yet; `assay runs {name}` shows their states")
        return min(done, key=lambda row: row.metrics[Metric.LOSS])
    wanted = stage[0] if stage else str(Stage.SEARCH)
    found = sorted((row for row in rows if row.stage == wanted), key=lambda row: row.generation)
    held = {str(row.number): row for row in found}
    if which not in held:
        span = f"0 to {max(map(int, held))}" if held else "none"
        raise StoreError(f"{text}: search {name!r} has no {wanted} run number {which!r}; it has {span}")
    return held[which]


def trials(name: str, tracking_uri: str = "") -> "pd.DataFrame":
    """The search stage of a search: one row a trial, with every path, metric, id and status."""
    return search(name, tracking_uri).trials


def search(name: str, tracking_uri: str = "") -> "Search":
    """A whole search from the store at the URI, else at MLFLOW_TRACKING_URI, else in mlruns/ of the working folder."""
    return load_search(locate(tracking_uri).uri, name)


def load_search(uri: str, name: str) -> "Search":
    """A whole search: one row per child run, the curves, and what the parent holds."""
    from analysis import cache, uptodate
    from analysis.assembling import assemble

    experiment, kept = _experiment(uri, name), cache.recall(uri, name)
    if _reader(uri) is webread:
        state, known = (kept.state, kept.known) if kept else ("", None)
        found = uptodate.read(uri, name, experiment, state, known)
    else:
        state = cache.file_state(uri)
        unchanged = kept is not None and kept.state == state != ""
        found = uptodate.Found(state=state, rows=None if unchanged else _runs(uri, [experiment]), known=None)
    if found.rows is None:
        assert kept is not None, "only what was kept can be unchanged"
        return kept.search()
    held, earlier = assemble(uri, name, found.rows, kept.earlier if kept and found.known else None)
    cache.keep(held, found.state, shards=earlier.shards, known=found.known)
    return held


def runs_by_id(uri: str, run_ids: Sequence[str]) -> list[RunRow]:
    """The live runs with these ids, in their order."""
    found = {row.run_id: row for row in _reader(uri).runs_by_id(uri, run_ids)} if run_ids else {}
    return [found[run_id] for run_id in run_ids if run_id in found]


def artifact(uri: str, row: RunRow, path: str) -> Path | None:
    """A file or folder that the run keeps, found from the store's present place; None when it keeps no such thing."""
    root = present_path(row.artifact_uri, locate(uri))
    if root is not None:
        return root / path if (root / path).exists() else None
    if speaks_to(uri):
        try:
            found = webread.download(uri, row, path, _downloads())
        except FileNotFoundError:
            return None
        if found is not None:
            return found
    return clientread.download(uri, row, path, _downloads())


def new_files(uri: str, row: RunRow, folder: str, known: frozenset[str]) -> tuple[list[Path], frozenset[str]]:
    """The files in a folder that the run keeps whose names are not known yet, by name; the names of all."""
    root = present_path(row.artifact_uri, locate(uri))
    if root is None and known and speaks_to(uri):
        with Server(uri) as server:
            paths = sorted(entry["path"] for entry in webread.listed(server, row.run_id, folder))
            asked = [path for path in paths if PurePosixPath(path).name not in known]
            contents = webread.fetched(server, row.run_id, asked)
        if None not in contents:
            place = Path(tempfile.mkdtemp(dir=_downloads()))
            files = [place / PurePosixPath(path).name for path in asked]
            for file, content in zip(files, contents, strict=True):
                file.write_bytes(content or b"")
            return files, known | {PurePosixPath(path).name for path in paths}
    whole = artifact(uri, row, folder)
    files = [file for file in sorted(whole.iterdir()) if file.is_file()] if whole is not None else []
    return [file for file in files if file.name not in known], known | {file.name for file in files}


def histories(uri: str, rows: Sequence[RunRow], keys: Sequence[str]) -> list[tuple[str, str, int, float]]:
    """(run id, metric, step, value) of whole metric histories."""
    reader = _reader(uri)
    if reader is fastread:
        return fastread.histories(uri, [row.run_id for row in rows], keys)
    found = webread.histories(uri, rows, keys) if reader is webread else None
    return clientread.histories(uri, rows, keys) if found is None else found


@once
def _downloads() -> Path:
    """A folder for what servers send; it lives as long as the process."""
    folder = tempfile.mkdtemp(prefix="assay-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _reader(uri: str) -> Reader:
    if fastread.reads(uri):
        return fastread
    return webread if speaks_to(uri) else clientread


def _has_finished(row: RunRow) -> bool:
    return row.stage == Stage.SEARCH and row.status == Status.OK and Metric.LOSS in row.metrics


def _summary(parent: RunRow, rows: list[RunRow]) -> SearchRow:
    trials = [row for row in rows if row.is_trial and row.experiment_id == parent.experiment_id]
    done = [row for row in trials if _has_finished(row)]
    best = min(done, key=lambda row: row.metrics[Metric.LOSS], default=None)
    finals = [row.generation for row in trials if row.stage == Stage.FINAL]
    return SearchRow(
        name=parent.search,
        run_id=parent.run_id,
        state=parent.state,
        start=parent.start,
        end=parent.end,
        trials=dict(Counter(row.status for row in trials if row.stage == Stage.SEARCH)),
        finals=finals.count(max(finals, default=0)),
        best_loss=best.metrics[Metric.LOSS] if best else None,
        best=f"{parent.search}/{best.number}" if best else "",
        driver=parent.tags.get(Tag.DRIVER, ""),
    )


def _experiment(uri: str, name: str) -> str:
    names = _experiments(uri)
    if name in names:
        return names[name]
    known = {row.name: row for row in list_searches(uri)}
    if not known:
        raise StoreError(f"search {name!r}: the store {uri} holds no search yet; run one: assay search quickstart")
    raise StoreError(f"search {name!r}: {unknown('search', name, known)} (store {uri})")


def _experiments(uri: str) -> dict[str, str]:
    return _reader(uri).experiments(uri)


def _runs(uri: str, experiment_ids: list[str]) -> list[RunRow]:
    return _reader(uri).runs(uri, experiment_ids)


def _search_runs(uri: str, name: str) -> list[RunRow]:
    experiment = _experiment(uri, name)
    if _reader(uri) is not webread:
        return _runs(uri, [experiment])
    from analysis import uptodate

    return uptodate.read(uri, name, experiment).rows or []


def _by_prefix(uri: str, prefix: str) -> RunRow:
    if fastread.reads(uri):
        found = fastread.runs_by_prefix(uri, prefix)
    elif _WHOLE_ID.fullmatch(prefix):
        found = runs_by_id(uri, [prefix])
    else:
        rows = _runs(uri, list(_experiments(uri).values()))
        found = [row for row in rows if row.run_id.startswith(prefix)]
    if len(found) == 1 and prefix:
        return found[0]
    if not found:
        raise StoreError(f"run {prefix!r}: no run id starts so; name a run as NAME/NUMBER (`assay runs` lists them)")
    ids = ", ".join(row.run_id[:12] for row in found[:5])
    raise StoreError(f"run {prefix!r}: {len(found)} run ids start so ({ids}, ...); give more of the id, or NAME/NUMBER")
