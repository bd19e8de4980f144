"""Large searches kept on this machine, so that looking again takes a moment.

What is kept belongs to one state of the store and is used for no other: of a SQLite file its size, times and change
counter, of a server what analysis.uptodate asks it. Of a server the rows are kept too, so that only changed ones are
read again. A tag that somebody edits by hand on a server, on a trial that ended long ago, changes no state;
ASSAY_CACHE=off reads anew, and ASSAY_CACHE=FOLDER keeps elsewhere than in the user's cache folder. Files are Parquet
and JSON: reading them runs nothing.
"""

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.fastread import RunRow
from analysis.uptodate import FEWEST, Known, rows_table, table_rows
from search_space.batches import Coverage, coverage
from search_space.canon import digest
from search_space.places import database_file

if TYPE_CHECKING:
    import pandas as pd

    from analysis.assembling import Earlier
    from analysis.frame import Search

_VERSION = 2
_MOST = 20
"""Searches kept; the one used longest ago goes first."""
_SETTLED_SECONDS = 2.0
"""A file written this shortly ago may be written again within the same tick of its clock, so it is not trusted."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A search as it was kept."""

    uri: str
    name: str
    folder: Path
    plain: dict[str, Any]

    @property
    def state(self) -> str:
        """The state that it belongs to."""
        return str(self.plain["state"])

    @property
    def known(self) -> Known | None:
        """Its rows, where they were kept."""
        told = self.plain["known"]
        if told is None:
            return None
        return Known(
            count=told["count"],
            coverage=coverage(told["coverage"]),
            files=frozenset(told["files"]),
            rows=self._rows,
        )

    @property
    def earlier(self) -> "Earlier":
        """Its curves, and the shards that they came from."""
        from analysis.assembling import Earlier

        return Earlier(curves=self._curves, shards=frozenset(self.plain["shards"]))

    def search(self) -> "Search":
        """The search itself."""
        import pandas as pd

        from analysis.frame import Parent, Search, retyped

        os.utime(self.folder)
        plain = self.plain
        parent = Parent(run=RunRow(**plain["run"]), experiment=plain["experiment"], environment=plain["environment"])
        frame = retyped(pd.read_parquet(self.folder / "frame.parquet"))
        return Search(uri=self.uri, name=self.name, frame=frame, curves=self._curves, parent=parent)

    @cached_property
    def _curves(self) -> "pd.DataFrame":
        import pandas as pd

        return pd.read_parquet(self.folder / "curves.parquet")

    def _rows(self) -> list[RunRow]:
        return table_rows((self.folder / "rows.parquet").read_bytes(), RunRow(**self.plain["run"]))[1]


def recall(uri: str, name: str) -> Kept | None:
    """The search as it was kept, whatever its state; None when it was not."""
    folder = _folder(uri, name)
    head = folder / "search.json"
    if os.environ.get("ASSAY_CACHE") == "off" or not head.is_file():
        return None
    plain = json.loads(head.read_text(encoding="utf-8"))
    return Kept(uri=uri, name=name, folder=folder, plain=plain) if plain["version"] == _VERSION else None


def keep(search: "Search", state: str, *, shards: frozenset[str] = frozenset(), known: Known | None = None) -> None:
    """Keep a search of many trials; where the folder cannot be written, nothing is kept."""
    from analysis.frame import as_texts

    if not state or len(search.frame) < FEWEST or os.environ.get("ASSAY_CACHE") == "off":
        return
    folder, told = _folder(search.uri, search.name), None
    if known is not None:
        told = {
            "count": known.count,
            "coverage": known.coverage.to_text(),
            "files": sorted(known.files),
        }
    plain = {
        "version": _VERSION,
        "state": state,
        "run": asdict(search.parent.run),
        "experiment": search.parent.experiment,
        "environment": search.parent.environment,
        "shards": sorted(shards),
        "known": told,
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
        as_texts(search.frame).to_parquet(fresh / "frame.parquet")
        search.curves.to_parquet(fresh / "curves.parquet")
        if known is not None:
            (fresh / "rows.parquet").write_bytes(rows_table(known.rows(), Coverage(), search.parent.run))
        (fresh / "search.json").write_text(json.dumps(plain), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
        held = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in held[:-_MOST]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return


def file_state(uri: str) -> str:
    """What tells one state of a SQLite store from another; empty when that cannot be told, and nothing is kept then."""
    store = database_file(uri)
    found: list[object] = []
    for path in () if store is None else (store, store.with_name(store.name + "-wal")):
        if not path.exists():
            continue
        about = path.stat()
        if time.time() - about.st_mtime < _SETTLED_SECONDS:
            return ""
        with path.open("rb") as file:
            found += [path.name, about.st_ino, about.st_size, about.st_mtime_ns, file.read(32).hex()]
    return digest(found) if found else ""


def _folder(uri: str, name: str) -> Path:
    place = os.environ.get("ASSAY_CACHE", "")
    base = Path(place) if place else Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "assay"
    return base / "searches" / digest([uri, name])
