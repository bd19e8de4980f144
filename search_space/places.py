"""Where a tracking store, its artifacts and its studies lie, now; pure path logic shared by writer and reader."""

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from search_space.errors import UserError

SQLITE = "sqlite:///"
_SERVERS = ("http://", "https://")
_DATABASES = ("postgresql://", "postgresql+psycopg2://", "postgresql+psycopg://")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class PlaceError(UserError):
    """A tracking URI or a name that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tracking store and what lies beside it on this machine."""

    uri: str
    """Absolute tracking URI."""
    artifacts: Path
    """Where artifacts of a database store lie; a server keeps its own."""
    studies: Path

    @property
    def is_server(self) -> bool:
        """True when artifacts pass through an MLflow server."""
        return self.uri.startswith(_SERVERS)

    @property
    def database(self) -> Path | None:
        """The SQLite file, or None for servers and other databases."""
        return database_file(self.uri)


def locate(
    given: str = "", *, environment: Mapping[str, str] = os.environ, folder: Path | None = None, artifacts: str = ""
) -> Place:
    """The place of a tracking store: the given URI, else MLFLOW_TRACKING_URI, else mlruns/ under the folder.

    SQLite paths become absolute. Artifacts and studies lie beside the SQLite file, otherwise under mlruns/.
    """
    folder = (folder or Path.cwd()).absolute()
    uri = given or environment.get("MLFLOW_TRACKING_URI", "") or f"{SQLITE}{folder}/mlruns/mlflow.db"
    if uri.startswith(SQLITE):
        path, _, query = uri.removeprefix(SQLITE).partition("?")
        if not path or path == ":memory:" or query:
            raise PlaceError(f"tracking URI {uri!r}: a SQLite store is one file without options; {_remedy(folder)}")
        database = Path(os.path.normpath(folder / path))
        uri, beside = f"{SQLITE}{database}", database.parent
    elif uri.startswith(_SERVERS + _DATABASES):
        beside = folder / "mlruns"
    else:
        kinds = "sqlite:///, http://, https:// and postgresql://"
        raise PlaceError(f"tracking URI {uri!r}: only {kinds} stores are supported; {_remedy(folder)}")
    return Place(uri=uri, artifacts=Path(artifacts) if artifacts else beside / "artifacts", studies=beside / "studies")


def _remedy(folder: Path) -> str:
    return f"give --tracking-uri or MLFLOW_TRACKING_URI such as {SQLITE}{folder}/mlruns/mlflow.db"


def database_file(uri: str) -> Path | None:
    """The file of a SQLite URI, or None."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def driver_uri(uri: str) -> str:
    """The URI as SQLAlchemy takes it: a PostgreSQL one names the driver that is installed here.

    Without a name, SQLAlchemy 2.1 wants psycopg and earlier ones psycopg2.
    """
    if not uri.startswith(_DATABASES[0]):
        return uri
    for module in ("psycopg2", "psycopg"):
        if importlib.util.find_spec(module) is not None:
            return uri.replace("postgresql://", f"postgresql+{module}://", 1)
    raise PlaceError(f"{uri}: PostgreSQL needs a driver; install one with: pip install psycopg2-binary")


def study_uri(place: Place, name: str) -> str:
    """Where the study of a search lies unless the user names another place."""
    return f"{SQLITE}{place.studies / file_name(name)}.db"


def public_uri(uri: str) -> str:
    """The URI without credentials; a SQLite path is made absolute."""
    database = database_file(uri)
    if database is not None:
        return f"{SQLITE}{os.path.normpath(database.absolute())}"
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


def owner_mark(place: Place, studies: Path) -> str:
    """How a study in the folder names the store it serves; a database is named relative to it, so both can move."""
    return public_uri(place.uri) if place.database is None else os.path.relpath(place.database, studies)


def file_name(name: str) -> str:
    """The name, when it can safely be a file name; PlaceError otherwise."""
    if not _NAME.fullmatch(name):
        raise PlaceError(
            f"name {name!r}: a search is named by letters, digits, '.', '_' and '-', starts with a letter or digit "
            "and has at most 100 characters; choose such a name"
        )
    return name


def present_path(artifact_uri: str, place: Place) -> Path | None:
    """The folder of a run's artifacts as they lie now, or None when only a server can reach them.

    The store holds absolute URIs. After the store was moved, the last three parts (search, run, 'artifacts') are looked
    up beside the database; that place is taken first, so that a copy never reads the original.
    """
    parts = urlsplit(artifact_uri)
    if parts.scheme == "mlflow-artifacts" and place.database is not None:
        # Written through a server on this store, which keeps artifacts in the store's own folder.
        return place.artifacts / unquote(parts.path).lstrip("/")
    if place.is_server or parts.scheme not in ("", "file"):
        return None
    recorded = Path(unquote(parts.path))
    moved = place.artifacts.joinpath(*recorded.parts[-3:])
    if moved.exists() or recorded.exists():
        return moved if moved.exists() else recorded
    return recorded if place.database is None and recorded.parents[2].is_dir() else moved
