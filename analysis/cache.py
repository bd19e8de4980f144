"""Large searches kept on this machine, so that looking again takes a moment.

What is kept belongs to one state of the store and is used for no other: of a SQLite file its size, times and change
counter, of a server its newest, running and deleted runs (analysis.webread.state). A tag that somebody edits by hand on
a server, on a trial that ended long ago, changes none of these; ASSAY_CACHE=off reads anew, and ASSAY_CACHE=FOLDER
keeps elsewhere than in the user's cache folder. Files are Parquet and JSON: reading them runs nothing.
"""

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from analysis import webread
from analysis.fastread import RunRow
from search_space.canon import digest
from search_space.places import database_file

if TYPE_CHECKING:
    from analysis.frame import Search

FEWEST = 1_000
"""Trials from which a search is kept."""
_VERSION = 1
_MOST = 20
"""Searches kept; the one used longest ago goes first."""
_SETTLED_SECONDS = 2.0
"""A file written this shortly ago may be written again within the same tick of its clock, so it is not trusted."""


def state_of(uri: str, experiment_id: str) -> str:
    """What tells one state of a search from another; empty when that cannot be told, and nothing is kept then."""
    if os.environ.get("ASSAY_CACHE") == "off":
        return ""
    store = database_file(uri)
    if store is not None:
        return _file_state(store)
    return webread.state(uri, experiment_id) if webread.speaks_to(uri) else ""


def recall(uri: str, name: str, state: str) -> "Search | None":
    """The search as it was kept in this state, or None."""
    from analysis.frame import Parent, Search, retyped

    folder = _folder(uri, name)
    head = folder / "search.json"
    if not state or not head.is_file():
        return None
    import pandas as pd

    plain = json.loads(head.read_text(encoding="utf-8"))
    if plain["version"] != _VERSION or plain["state"] != digest(state):
        return None
    os.utime(folder)
    parent = Parent(run=RunRow(**plain["run"]), experiment=plain["experiment"], environment=plain["environment"])
    frame = retyped(pd.read_parquet(folder / "frame.parquet"))
    return Search(uri=uri, name=name, frame=frame, curves=pd.read_parquet(folder / "curves.parquet"), parent=parent)


def keep(search: "Search", state: str) -> None:
    """Keep a search of many trials; where the folder cannot be written, nothing is kept."""
    from analysis.frame import as_texts

    if not state or len(search.frame) < FEWEST:
        return
    folder = _folder(search.uri, search.name)
    plain = {
        "version": _VERSION,
        "state": digest(state),
        "run": asdict(search.parent.run),
        "experiment": search.parent.experiment,
        "environment": search.parent.environment,
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
        as_texts(search.frame).to_parquet(fresh / "frame.parquet")
        search.curves.to_parquet(fresh / "curves.parquet")
        (fresh / "search.json").write_text(json.dumps(plain), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
        held = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in held[:-_MOST]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return


def _folder(uri: str, name: str) -> Path:
    place = os.environ.get("ASSAY_CACHE", "")
    base = Path(place) if place else Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "assay"
    return base / "searches" / digest([uri, name])


def _file_state(store: Path) -> str:
    found: list[object] = []
    for path in (store, store.with_name(store.name + "-wal")):
        if not path.exists():
            continue
        about = path.stat()
        if time.time() - about.st_mtime < _SETTLED_SECONDS:
            return ""
        with path.open("rb") as file:
            found += [path.name, about.st_ino, about.st_size, about.st_mtime_ns, file.read(32).hex()]
    return json.dumps(found)
