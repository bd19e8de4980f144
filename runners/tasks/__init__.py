"""Tasks: where tokens come from."""

from collections.abc import Mapping
from typing import Any

from runners.tasks.data import AbstractTask, TaskData, TaskShape
from runners.tasks.mqar import Mqar
from runners.tasks.python_source import PythonSource
from runners.tasks.text_files import TextFiles
from search_space.errors import UserError
from search_space.space import unknown

TASKS: Mapping[str, type[AbstractTask]] = {task.kind: task for task in (PythonSource, TextFiles, Mqar)}
"""Task classes by kind."""


def task_from_plain(plain: Mapping[str, Any]) -> AbstractTask:
    """The task of {'kind': k, k: {field: value}}; lists become tuples."""
    kind = plain["kind"]
    if kind not in TASKS:
        raise UserError(f"task.kind={kind!r} {unknown('task', str(kind), TASKS)}")
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in (plain.get(kind) or {}).items()
    }
    return TASKS[kind](**fields)


__all__ = ["TASKS", "AbstractTask", "TaskData", "TaskShape", "task_from_plain"]
