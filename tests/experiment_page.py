"""docs/experiments.md: every key of an experiment file, read off the code that reads it.

What a key takes and its default are recorded while the reader reads; what a key is for, an example, and what the reader
does not state in one place stand in experiment_keys. Run as a program, this writes the page.
"""

import ast
import contextlib
import dataclasses
import inspect
import math
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from experiment_keys import BASE, BRED, KEYS, TASK_EXAMPLES

from runners.candidate import full_space
from runners.tasks import TASKS
from search_space import domains, experiment, settings
from search_space.reading import SECTIONS
from search_space.section import Section
from search_space.space import OneOf, Space, join
from search_space.values import Parser

PAGE = Path(__file__).parents[1] / "docs" / "experiments.md"
WRONG = -1
"""What no key of the reader takes; the refusal says what it does take."""


@contextlib.contextmanager
def recorded() -> Iterator[tuple[set[str], dict[str, tuple[Parser, Any]]]]:
    """Keys that sections know, and the parser and default of each that is taken, while something is read."""
    known: set[str] = set()
    taken: dict[str, tuple[Parser, Any]] = {}
    make, take = Section.__init__, Section.take

    def recording_make(self: Section, faults: Any, path: str, data: Any, keys: Any) -> None:
        keys = tuple(keys)
        known.update(join(path, key) for key in keys)
        make(self, faults, path, data, keys)

    def recording_take(self: Section, key: str, parse: Parser, default: Any) -> Any:
        taken.setdefault(join(self.path, key), (parse, default))
        return take(self, key, parse, default)

    Section.__init__, Section.take = recording_make, recording_take  # type: ignore[method-assign]
    try:
        yield known, taken
    finally:
        Section.__init__, Section.take = make, take  # type: ignore[method-assign]


def read(data: Mapping[str, Any]) -> experiment.Experiment:
    """The experiment of a file that holds these data."""
    return experiment.read(yaml.safe_dump(dict(data)), full_space=full_space, tasks=TASKS)


def beside(data: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The data with one key set, its neighbours kept."""
    first, _, rest = path.partition(".")
    if not rest:
        return {**data, first: value}
    inner = data.get(first)
    return {**data, first: beside(inner if isinstance(inner, Mapping) else {}, rest, value)}


def with_key(path: str) -> dict[str, Any]:
    """A file with the example of a key."""
    return beside(base_of(path), path, yaml.safe_load(KEYS[path].example))


def base_of(path: str) -> Mapping[str, Any]:
    """Enough of a file for the key."""
    return BRED if path.startswith("search.pruner.pbt.") else BASE


def keys_of_the_reader() -> tuple[set[str], dict[str, tuple[Parser, Any]]]:
    """Every key outside tasks and the space, and what is recorded of those taken in one step."""
    pruners = [beside(base_of(f"search.pruner.{kind}."), "search.pruner", {kind: None}) for kind in settings.PRUNERS]
    sizes = [{"model": {"size": {measure: 100_000}}} for measure in settings.MEASURES]
    with recorded() as (known, taken):
        for pruner in pruners:
            read(pruner)
        for change in ({}, *sizes):
            read({**BASE, **change})
    sections = {key.rpartition(".")[0] for key in known} | {"model.size"}
    spaces = set(full_space().fields)
    leaves = {key for key in known if key not in sections and key.partition(".")[0] not in ("task", *spaces)}
    leaves |= {"task"} | {f"model.size.{measure}" for measure in settings.MEASURES}
    return leaves | {"search.pruner"}, taken


def takes(parse: Parser) -> str:
    """What a parser takes, in the words of its refusal."""
    try:
        parse(WRONG)
    except ValueError as error:
        return str(error).partition("; got")[0].removeprefix("takes ")
    raise AssertionError(f"{WRONG} is taken; the page needs another wrong value")


def words(value: Any) -> str:
    """A default as an experiment file has it."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(words, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and math.isfinite(value):
        return str(int(value))
    return f"{value}" if value != "" else "empty"


def row(path: str, taken: Mapping[str, tuple[Parser, Any]]) -> str:
    """The line of one key."""
    key = KEYS[path]
    kind = key.takes or takes(taken[path][0])
    default = key.default or words(taken[path][1])
    return f"| `{path}` | {kind} | {default} | `{key.example}` | {key.meaning} |"


def task_rows(task: type) -> list[str]:
    """The lines of a task's fields, with the docstrings of its source."""
    (node,) = ast.parse(inspect.getsource(task)).body
    assert isinstance(node, ast.ClassDef)
    notes = {
        field.target.id: note.value.value.replace("\n    ", " ")
        for field, note in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant)
    }
    kinds = {int: "a whole number", str: "text", tuple[int, ...]: "whole numbers", tuple[str, ...]: "texts"}
    hints = typing.get_type_hints(task)
    return [
        f"| `task.{task.kind}.{field.name}` | {kinds[hints[field.name]]} | {words(field.default)} | "  # type: ignore[attr-defined]
        f"`{TASK_EXAMPLES[field.name]}` | {notes[field.name]} |"
        for field in dataclasses.fields(task)
    ]


def space_example(node: domains.Domain | OneOf) -> Any:
    """A narrowing that the node takes: the default variant, the first options, or a part of its range."""
    if isinstance(node, OneOf):
        return [node.default]
    if isinstance(node, domains.Choice):
        return list(node.options[:2])
    low = node.default
    high = node.high if isinstance(node, domains.FloatRange) else min(low + 4 * node.step, node.high)
    return {"low": low, "high": high} if low < high else low


def space_examples(path: str, node: domains.Domain | OneOf | Space) -> dict[str, Any]:
    """The example of every path that the page lists."""
    inner: Iterator[tuple[str, Any]] = iter(())
    if isinstance(node, Space):
        inner = iter(node.fields.items())
    elif isinstance(node, OneOf) and not path.startswith("model."):
        inner = iter(node.variants.items())
    own = {} if isinstance(node, Space) else {path: space_example(node)}
    return own | {key: value for name, child in inner for key, value in space_examples(join(path, name), child).items()}


def space_rows(path: str, node: domains.Domain | OneOf | Space) -> list[str]:
    """The lines of a part of the space; families of blocks are one line each."""
    if isinstance(node, Space):
        return [line for name, child in node.fields.items() for line in space_rows(join(path, name), child)]
    fixed = "fixed" if node.opt_in else "searched"
    example = yaml.safe_dump(space_example(node), default_flow_style=True, sort_keys=False).split("\n...")[0].strip()
    if isinstance(node, OneOf):
        family = path.removeprefix("model.")
        where = "[its variants](blocks.md)" if path != family else f"one of {', '.join(node.variants)}"
        lines = [f"| `{path}` | {where} | {node.default} | {fixed} | `{example}` | {node.help} |"]
        inner = [line for kind, space in node.variants.items() for line in space_rows(join(path, kind), space)]
        return lines + (inner if path == family else [])
    return [f"| `{path}` | {domains.describe(node)} | {words(node.default)} | {fixed} | `{example}` | {node.help} |"]


TEXT = """# The experiment file

Written by `make docs` from the code that reads experiment files. An experiment is YAML: a task, a budget, what may
vary, and how it is searched. `assay check FILE` reads one and trains nothing; mistakes are named with line, rule, value
and remedy.

```yaml
{example}```

## How values are written

| written | means |
|---|---|
| `layers: 2` | fixed |
| `head_dim: [16, 32]` | one of these |
| `learning_rate: {{low: 1e-3, high: 2e-2, log: true}}` | a range; `step` likewise |
| `position: [none, rotary]` | one of these variants, each with its declared domains |
| `mixer: {{softmax: {{kv_heads: 2}}, linear: }}` | one of these variants; fields below a name are narrowed |
| `130k`, `2.5M`, `1B`, `64KiB`, `1e6` | whole numbers with units |

Fields that a file does not name keep their domain, but for those that the tables call fixed: they stay at their default
unless named. Every key can be set from the command line too: `assay search FILE --set budget.tokens=1M`.
"""


def page() -> str:
    """docs/experiments.md."""
    known, taken = keys_of_the_reader()
    assert known == KEYS.keys(), f"KEYS lacks {sorted(known - KEYS.keys())}, the reader {sorted(KEYS.keys() - known)}"
    example = (experiment.PRESETS / "quickstart.yaml").read_text()
    parts = [TEXT.format(example=example)]
    head = "| key | takes | default | example | what for |\n|---|---|---|---|---|"
    top = [key for key in SECTIONS if key in KEYS]
    parts.append("\n".join(["## Top level", "", head, *(row(key, taken) for key in top)]))
    for section in ("budget", "search", "engine", "final", "limits", "model.size"):
        rows = [row(key, taken) for key in KEYS if key.startswith(f"{section}.")]
        parts.append("\n".join([f"## {section}", "", head, *rows]))
    for kind, task in TASKS.items():
        note = (task.__doc__ or "").split("\n")[0]
        parts.append("\n".join([f"## task.{kind}", "", note, "", head, *task_rows(task)]))
    table = "| key | domain | default | unless named | example | what for |\n|---|---|---|---|---|---|"
    for name, node in full_space().fields.items():
        parts.append("\n".join([f"## {name}", "", table, *space_rows(name, node)]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
