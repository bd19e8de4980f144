"""What code and packages a search ran with: versions, commit, uncommitted changes, digests of every source file."""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from search_space.canon import digest
from search_space.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
OWN_PACKAGES = ("search_space", "blocks", "runners", "analysis")
NUMERIC_PACKAGES = ("blocks", "runners", "search_space")
"""Packages whose source can change a trial's numbers."""
SOURCES = (".py", ".yaml")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A driver's code and packages."""

    python: str
    platform: str
    packages: dict[str, str]
    """Installed distributions by name."""
    commit: str
    """Git commit of the checkout; empty when the code is not in one."""
    diff: str
    """Uncommitted changes against the commit, new source files included."""
    package_digest: str
    """sha256 over this project's own sources that can change numbers."""
    blocks: dict[str, str]
    """sha256 of each of the user's block modules."""
    sources: dict[str, str]
    """Source text of the user's block modules and of the packages around them, by relative path."""

    @cached_property
    def id(self) -> str:
        """Twelve hex digits over everything."""
        return digest(dataclasses.asdict(self))

    def plain(self) -> dict[str, Any]:
        """As JSON data, without the long texts that are artifacts of their own."""
        plain = dataclasses.asdict(self)
        del plain["sources"], plain["diff"]
        return {**plain, "id": self.id, "diff_digest": text_digest(self.diff) if self.diff else ""}

    def lock(self) -> str:
        """The installed packages, one 'name==version' a line."""
        return "".join(f"{name}=={version}\n" for name, version in self.packages.items())


def capture(blocks: tuple[str, ...] = ()) -> Environment:
    """The environment of this process; `blocks` are the user's modules, which must be importable."""
    sources: dict[str, str] = {}
    digests: dict[str, str] = {}
    for module in blocks:
        found = module_sources(module)
        digests[module] = _texts_digest(found)
        sources.update(found)
    commit = _git("rev-parse", "HEAD").strip()
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        packages=installed(),
        commit=commit,
        diff=_uncommitted() if commit else "",
        package_digest=package_digest(),
        blocks=digests,
        sources=sources,
    )


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def installed() -> dict[str, str]:
    """Installed distributions and their versions, by name."""
    found = {entry.metadata["Name"].lower(): entry.version for entry in importlib.metadata.distributions()}
    return dict(sorted(found.items()))


def package_digest(root: Path = ROOT) -> str:
    """sha256 over the names and texts of the sources that can change a trial's numbers."""
    files = (file for package in NUMERIC_PACKAGES for file in (root / package).rglob("*") if file.suffix in SOURCES)
    return _texts_digest({file.relative_to(root).as_posix(): file.read_text() for file in files})


def module_sources(module: str) -> dict[str, str]:
    """The source of a module and of each package around it, by relative path; UserError when it cannot be found."""
    parts = module.split(".")
    texts: dict[str, str] = {}
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        try:
            spec = importlib.util.find_spec(name)
        except ImportError as error:
            raise UserError(f"blocks: {module!r} cannot be imported ({error}); {_import_remedy(parts[0])}") from error
        if spec is None:
            raise UserError(f"blocks: {module!r} cannot be imported: no module {name!r}; {_import_remedy(parts[0])}")
        if spec.origin is None or not spec.origin.endswith(".py"):
            continue
        relative = "/".join(parts[:depth]) + ("/__init__.py" if spec.submodule_search_locations else ".py")
        texts[relative] = Path(spec.origin).read_text()
    return texts


def _import_remedy(top: str) -> str:
    return f"install the package {top!r}, or run from the folder that holds it (sys.path starts with {sys.path[0]!r})"


def module_digest(module: str) -> str:
    """sha256 of a user's block module as it can be imported now."""
    return _texts_digest(module_sources(module))


def differences(recorded: dict[str, Any], now: Environment) -> list[str]:
    """What differs between a recorded environment (its `plain` form) and this one, one readable line each."""
    lines = []
    current = now.plain()
    for name in ("python", "platform", "package_digest", "commit", "diff_digest"):
        if recorded.get(name, "") != current[name]:
            lines.append(f"{name}: recorded {_short(recorded.get(name, ''))}, here {_short(current[name])}")
    for kind in ("packages", "blocks"):
        before, after = recorded.get(kind, {}), current[kind]
        for name in _changed(before, after):
            lines.append(f"{kind}.{name}: recorded {_short(before.get(name, ''))}, here {_short(after.get(name, ''))}")
    return lines


def _changed(before: dict[str, str], after: dict[str, str]) -> Iterable[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _short(value: str) -> str:
    if not value:
        return "none"
    return value[:12] if len(value) in (40, 64) and " " not in value else value


def text_digest(text: str) -> str:
    """sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _texts_digest(texts: dict[str, str]) -> str:
    total = hashlib.sha256()
    for name in sorted(texts):
        total.update(f"{name}\0{len(texts[name])}\0{texts[name]}".encode())
    return total.hexdigest()


def _git(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """Output of a read-only git command in the checkout; empty where there is no git or no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "--no-optional-locks", *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode in codes else ""


def _uncommitted() -> str:
    """The diff of tracked files, then each new source file of our packages as a diff against nothing."""
    listed = _git(
        "ls-files", "--others", "--exclude-standard", "--", *OWN_PACKAGES, "pyproject.toml", "constraints.txt"
    )
    new = [_git("diff", "--no-index", "--", "/dev/null", name, codes=(1,)) for name in sorted(listed.splitlines())]
    return _git("diff", "HEAD") + "".join(new)
