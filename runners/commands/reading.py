"""Reading an experiment for a command: a file or a preset, with the overrides of the command line."""

import argparse
import sys
from pathlib import Path

from runners.candidate import full_space
from runners.tasks import TASKS
from search_space.errors import UserError
from search_space.experiment import Experiment, preset_path, presets, read
from search_space.space import unknown


def read_experiment(arguments: argparse.Namespace, overrides: tuple[str, ...] = ()) -> Experiment:
    """The experiment named by `arguments.file`, a path or a preset; its folder may hold the user's own blocks."""
    path = locate(arguments.file)
    sys.path.append(str(path.absolute().parent))
    return read(
        path,
        full_space=full_space,
        tasks=TASKS,
        overrides=(*arguments.overrides, *overrides),
        name=getattr(arguments, "name", ""),
    )


def locate(file: str) -> Path:
    """The path of an experiment file or preset; UserError when there is neither."""
    path = Path(file)
    if path.is_file():
        return path
    if file in presets():
        return preset_path(file)
    if path.is_dir():
        raise UserError(f"{file}: is a folder; name an experiment file, or a preset: {', '.join(presets())}")
    raise UserError(f"{file}: there is no such file, and it {unknown('preset', file, presets())}")
