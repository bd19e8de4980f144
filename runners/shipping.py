"""The code that workers on other machines need: this project's packages and the user's block modules, in a folder."""

import importlib.util
import shutil
from pathlib import Path

from runners.environment import NUMERIC_PACKAGES, ROOT, SOURCES, module_sources


def pack_code(folder: Path, blocks: tuple[str, ...]) -> Path:
    """Copy it all into the folder; whoever has the folder on the module path can run trials."""
    for package in NUMERIC_PACKAGES:
        _copy(ROOT / package, folder / package)
    for module in blocks:
        top = module.partition(".")[0]
        spec = importlib.util.find_spec(top)
        if spec is not None and spec.submodule_search_locations:
            for place in spec.submodule_search_locations:
                _copy(Path(place), folder / top)
        else:
            for name, text in module_sources(module).items():
                (folder / name).write_text(text)
    return folder


def _copy(source: Path, target: Path) -> None:
    """The sources of a package."""
    for file in sorted(source.rglob("*")):
        if file.suffix in SOURCES and "__pycache__" not in file.parts:
            copied = target / file.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied)
