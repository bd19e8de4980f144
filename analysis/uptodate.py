"""The runs of a large search on a server: those read before, and the few that may have changed since.

Rows come from this machine's own cache, or from the tables of ended trials that the search keeps on its parent
(search_space.batches). What may have changed is asked for by its batch, its state and its deletion: so many requests
whatever the number of trials. The server then confirms the number of runs and a sample of rows; where it does not, or
the search was written without batches, everything is read.
"""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from analysis import webread
from analysis.fastread import RunRow
from analysis.server import Server, by_id
from search_space.batches import (
    COLUMNS,
    COVERS,
    SIZE,
    Coverage,
    batch_name,
    coverage,
    is_settled,
    joined,
    newest,
    own_place,
)
from search_space.canon import digest
from search_space.records import Artifact, Stage, Status, Tag

FEWEST = 1_000
"""Trials from which rows are kept, here and in the cache; fewer are read as fast."""
_MOST_BATCHES = 24
"""Batches asked for one by one; for more, everything is read."""
_FEW = 100
"""Runs that one request names."""
_SAMPLE = 16
"""Rows that the server confirms."""
ANEW = "read anew"
_ATTEMPTS = 3
"""Readings of a search in which trials begin and end meanwhile, after which everything is read."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What an earlier reading left."""

    count: int
    """Runs there were, deleted ones not counted."""
    coverage: Coverage
    files: frozenset[str]
    """Tables that it has taken in."""
    rows: Callable[[], list[RunRow]]
    """All runs that were seen, deleted ones too."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search holds now."""

    state: str
    """A digest, equal for equal searches; `ANEW` where none was taken."""
    rows: list[RunRow] | None
    """Its runs, oldest first; None when nothing has changed."""
    known: Known | None
    """What to keep for the next reading; None when that has to read everything again."""


@dataclass(frozen=True, kw_only=True)
class _Live:
    """What is asked for each time."""

    rows: dict[str, RunRow]
    gone: frozenset[str]
    parent: RunRow | None

    @property
    def newest(self) -> dict[str, int]:
        return newest(self.parent.tags) if self.parent else {}

    def state(self, recent: Sequence[RunRow]) -> str:
        """A digest of all that may change, but for the beats of a driver."""
        rows = {**self.rows, **{row.run_id: row for row in recent}}
        plain = {run_id: vars(row) | {"tags": {**row.tags, Tag.BEAT: ""}} for run_id, row in rows.items()}
        return digest([plain, sorted(self.gone)])


def read(uri: str, name: str, experiment: str, state: str = "", known: Known | None = None) -> Found:
    """The runs of a search as a server has them now; `state` and `known` are what an earlier reading left."""
    with Server(uri) as server:
        reading = _Reading(server, name, experiment, state, known)
        for _ in range(_ATTEMPTS):
            live = reading.live()
            if sum(live.newest.values()) * SIZE < FEWEST:
                break
            found = reading.found(live)
            if found is not None:
                return found
            if live.parent is None or live.parent.state != "RUNNING":
                return reading.everything(live)
        else:
            return reading.everything(live)
    now = digest(webread.state(uri, experiment))
    return Found(state=now, rows=None if now == state else webread.runs(uri, [experiment]), known=None)


class _Reading:
    """One reading of a search; it may be tried again while trials begin and end under it."""

    def __init__(self, server: Server, name: str, experiment: str, state: str, known: Known | None) -> None:
        self._server = server
        self._state = state
        self._names = {experiment: name}
        self._experiment = experiment
        self._known = known
        self._covered = known.coverage if known else Coverage()
        self._files = known.files if known else frozenset()
        self._held: dict[str, RunRow] | None = None
        self._unsure: set[str] = set()

    def live(self) -> _Live:
        """Parents, what runs, what will run again, what has a driver of its own, and what was deleted."""
        asked = [
            f"tags.`{Tag.KIND}` = 'search'",
            "attributes.status = 'RUNNING'",
            f"tags.`{Tag.STATUS}` = '{Status.PREEMPTED}'",
            f"tags.`{Tag.STAGE}` = '{Stage.TRAIN}'",
        ]
        rows = webread.ask(self._server, self._names, *asked)
        parents = sorted((row for row in rows if row.tags.get(Tag.KIND) == "search"), key=lambda row: row.start)
        return _Live(
            rows={row.run_id: row for row in rows},
            gone=frozenset(row.run_id for row in webread.ask(self._server, self._names, "", deleted=True)),
            parent=parents[-1] if parents else None,
        )

    def found(self, live: _Live) -> Found | None:
        """What the tables, the cache and a few answers say together; None when the server does not confirm that."""
        known, ends = self._known, {batch_name(number, who) for who, number in live.newest.items()}
        if live.parent is not None and (known is None or set(self._covered.lacking(live.newest)) - ends):
            self._take_tables(live.parent)
        lacking = self._covered.lacking(live.newest)
        if len(lacking) > _MOST_BATCHES:
            return None
        recent = webread.ask(self._server, self._names, *(f"tags.`{Tag.BATCH}` = '{batch}'" for batch in lacking))
        state = live.state([row for row in recent if row.tags.get(Tag.BATCH) in ends])
        if known is not None and self._state == state:
            if webread.counts(self._server, self._experiment, known.count):
                return Found(state=state, rows=None, known=known)
            return None
        whole = self._merged({row.run_id: row for row in recent} | live.rows, live.gone)
        if whole is None or not webread.counts(self._server, self._experiment, len(whole.keys() - live.gone)):
            return None
        return self._told(live, state, whole)

    def everything(self, live: _Live) -> Found:
        """All runs, read anew; the batches were looked up before, so none that is still written is taken for whole."""
        rows = webread.runs(self._server.uri, [self._experiment])
        return self._told(live, ANEW, {row.run_id: row for row in rows})

    def _told(self, live: _Live, state: str, whole: dict[str, RunRow]) -> Found:
        left = [row for key, row in whole.items() if key not in live.gone]
        through = {who: max(number - 1, self._covered.through.get(who, 0)) for who, number in live.newest.items()}
        known = Known(
            count=len(left),
            coverage=Coverage(through=through),
            files=self._files,
            rows=lambda: list(whole.values()),
        )
        return Found(state=state, rows=sorted(left, key=lambda row: (row.start, row.run_id)), known=known)

    def _merged(self, fresh: dict[str, RunRow], gone: frozenset[str]) -> dict[str, RunRow] | None:
        """All rows as they are now; None when the server has others than the tables or the cache say."""
        held = self._rows()
        loose = {key for key, row in held.items() if not is_settled(row.state, row.tags)} | self._unsure
        unsure = loose - fresh.keys() - gone
        sure = sorted(held.keys() - fresh.keys() - gone - unsure)
        sample = sure[:: max(1, len(sure) // _SAMPLE)][:_SAMPLE]
        asked = [*sorted(unsure), *sample]
        parts = [asked[first : first + _FEW] for first in range(0, len(asked), _FEW)]
        seen = {row.run_id: row for row in webread.ask(self._server, self._names, *map(by_id, parts))}
        if any(seen.get(key) != held[key] for key in sample):
            return None
        return {key: row for key, row in held.items() if key not in unsure} | seen | fresh

    def _rows(self) -> dict[str, RunRow]:
        if self._held is None:
            self._held = {row.run_id: row for row in self._known.rows()} if self._known else {}
        return self._held

    def _take_tables(self, parent: RunRow) -> None:
        """Take in the tables on the parent that were not taken in yet; where they contradict, the server is asked."""
        paths = {PurePosixPath(entry["path"]).name: entry["path"] for entry in self._listed(parent)}
        asked = [paths[file] for file in sorted(paths.keys() - self._files)]
        held = self._rows()
        for content in webread.fetched(self._server, parent.run_id, asked):
            if content is not None:
                covers, rows = table_rows(content, parent)
                self._covered = joined([self._covered, covers])
                self._unsure |= {row.run_id for row in rows if held.setdefault(row.run_id, row) != row}
        self._files |= paths.keys()

    def _listed(self, parent: RunRow) -> list[dict[str, Any]]:
        return webread.listed(self._server, parent.run_id, Artifact.TRIALS)


def table_rows(content: bytes, parent: RunRow) -> tuple[Coverage, list[RunRow]]:
    """What a table of trials covers, and its rows."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(io.BytesIO(content), columns=list(COLUMNS))
    columns = table.to_pydict()
    cells = zip(*(columns[name] for name in ("params", "metrics", "tags")), strict=True)
    loaded = [(json.loads(params), json.loads(metrics), json.loads(tags)) for params, metrics, tags in cells]
    heads = zip(*(columns[name] for name in ("run_id", "name", "state", "start", "end", "artifact_uri")), strict=True)
    rows = [
        RunRow(
            run_id=run_id,
            name=name,
            state=state,
            start=start,
            end=end,
            artifact_uri=place or own_place(parent.artifact_uri, parent.run_id, run_id),
            experiment_id=parent.experiment_id,
            search=parent.search,
            params=params,
            metrics=metrics,
            tags=tags,
        )
        for (run_id, name, state, start, end, place), (params, metrics, tags) in zip(heads, loaded, strict=True)
    ]
    return coverage((table.schema.metadata or {}).get(COVERS, Coverage().to_text())), rows


def rows_table(rows: Sequence[RunRow], covers: Coverage, parent: RunRow) -> bytes:
    """The inverse of table_rows."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    columns = {
        "run_id": [row.run_id for row in rows],
        "name": [row.name for row in rows],
        "state": [row.state for row in rows],
        "start": [row.start for row in rows],
        "end": [row.end for row in rows],
        "artifact_uri": [
            "" if row.artifact_uri == own_place(parent.artifact_uri, parent.run_id, row.run_id) else row.artifact_uri
            for row in rows
        ],
        **{name: [json.dumps(getattr(row, name)) for row in rows] for name in ("params", "metrics", "tags")},
    }
    table = arrow.table(columns).replace_schema_metadata({COVERS: covers.to_text()})
    sink = io.BytesIO()
    parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue()
