"""Which store a study serves, whether a driver holds it, and what deleting it deletes; files on this machine tell.

A study's folder names its store in a file, since stores that share a folder of studies must not clear each other's.
"""

import fcntl
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from search_space.places import Place, database_file, owner_mark

LOCK = "driver.lock"
"""File in a study's folder that its driver keeps locked."""
JOINED = "joined.lock"
"""File in a study's folder that drivers which joined keep locked together."""
_MARK = "store"
_DATABASE = ("", "-journal", "-wal", "-shm")


@dataclass(frozen=True, kw_only=True)
class StudyParts:
    """What deleting a search's study deletes."""

    paths: tuple[Path, ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    """(URI, search): a database that holds other searches too, of which only this one's trials go."""
    left: tuple[str, ...] = ()
    """What is not deleted, and why, in words."""


def mark_owner(folder: Path, place: Place) -> None:
    """Note in a study's folder which store the study serves."""
    (folder / _MARK).write_text(f"{owner_mark(place, folder.parent)}\n")


def serves(folder: Path, place: Place) -> bool | None:
    """Whether the study with this folder serves the store; None when nothing tells."""
    file = folder / _MARK
    return file.read_text().strip() == owner_mark(place, folder.parent) if file.is_file() else None


def is_driven(folder: Path) -> bool:
    """True while a driver holds the study with this folder."""
    return any(_is_held(folder / name) for name in (LOCK, JOINED))


def _is_held(lock: Path) -> bool:
    if not lock.is_file():
        return False
    with lock.open("rb") as handle:
        try:
            # Drivers that joined share their lock, so only a lock for one alone tells that nobody has it.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def searches_in(study: Path) -> set[str]:
    """The searches a study's database holds; the one it is named after when it cannot be read."""
    # Without a log nobody has it open; it is read without leaving one.
    mode = "mode=ro" if study.with_name(f"{study.name}-wal").exists() else "immutable=1"
    try:
        with closing(sqlite3.connect(f"{study.absolute().as_uri()}?{mode}", uri=True, timeout=5)) as connection:
            names = connection.execute("SELECT study_name FROM studies").fetchall()
    except sqlite3.Error:
        return {study.stem}
    return {name.partition("/")[0] for (name,) in names} or {study.stem}


def newest(study: Path) -> float:
    """When the study was last written: its database may be older than the log beside it.

    Reading alone touches the log's index, and leaves an empty log where there was none; neither counts.
    """
    written = [file.stat() for file in database_files(study) if not file.name.endswith("-shm")]
    return max(state.st_mtime for state in written if state.st_size or state is written[0])


def database_files(study: Path) -> list[Path]:
    """The database and SQLite's own files beside it."""
    files = [study.with_name(study.name + ending) for ending in _DATABASE]
    return [file for file in files if file.exists()]


def parts_of(name: str, uri: str, place: Place) -> StudyParts:
    """What belongs to the study of a search, at its usual place and at the URI that was recorded for it."""
    usual = place.studies / f"{name}.db"
    given = database_file(uri)
    found = _local(usual, name, place, certain=False)
    if not uri or given == usual:
        return found
    if given is not None:
        more = _local(given, name, place, certain=True)
    else:
        folder = Path("mlruns/studies").absolute() / name
        left = (
            f"left: study {uri} lies on a server; delete it there, each of its parts whose name begins with {name}/: "
            f"optuna delete-study --storage {uri} --study-name {name}/0"
        )
        more = StudyParts(paths=(folder,) if serves(folder, place) else (), left=(left,))
    return StudyParts(
        paths=tuple(dict.fromkeys(found.paths + more.paths)),
        shared=found.shared + more.shared,
        left=found.left + more.left,
    )


def _local(study: Path, name: str, place: Place, *, certain: bool) -> StudyParts:
    """Parts of a SQLite study; with `certain`, only when it is known to serve this store."""
    folder = study.parent / name
    files = database_files(study)
    mine = serves(folder, place)
    if mine is False or (certain and not mine):
        return StudyParts(left=(f"left: study {study}; it serves another store",) if files else ())
    folders = (folder,) if folder.is_dir() else ()
    if files and searches_in(study) - {name}:
        return StudyParts(paths=folders, shared=((f"sqlite:///{study}", name),))
    return StudyParts(paths=(*files, *folders))


def delete_from(uri: str, name: str) -> None:
    """Delete one search's trials from a database that holds others' too."""
    from runners.ledger import open_storage

    storage = open_storage(uri)
    for study in storage.get_all_studies():
        if study.study_name.startswith(f"{name}/"):
            storage.delete_study(study._study_id)
    storage.engine.dispose()
