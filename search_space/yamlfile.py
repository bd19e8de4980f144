"""Reads YAML 1.2 scalars safely, and remembers the line of every key and value.

Plain data only: no tags, no merge keys, no timestamps; `no`, `on` and `yes` are words; `1e-3` is a number.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from search_space.errors import ExperimentError, Problem

MOST_BYTES = 256 * 1024
MOST_DEPTH = 40
MOST_VALUES = 20_000
MOST_DIGITS = 60
EMPTY = "is empty; write at least `task:` and `budget:`"

_STR, _NULL, _BOOL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_MAP, _SEQ = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"

_RESOLVERS: tuple[tuple[str, str, list[str | None]], ...] = (
    (_NULL, r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    (_BOOL, r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    (_INT, r"^[-+]?[0-9][0-9_]*$", list("-+0123456789")),
    (
        _FLOAT,
        r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
)


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"is nested deeper than {MOST_DEPTH}", problem_mark=self.peek_event().start_mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class Dumper(yaml.SafeDumper):
    """Writes what `parse` reads back unchanged."""


for _class in (_Loader, Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _RESOLVERS:
        _class.add_implicit_resolver(_tag, re.compile(_pattern), _first)
Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_list(value))


class Document:
    """The plain data of one YAML text, and where each part of it stands."""

    def __init__(self, *, file: str, root: yaml.Node, data: Any) -> None:
        self.file = file
        self.data = data
        self._root = root

    def line(self, path: str, item: int | None = None) -> int:
        """The line of the key at a dotted path, or of what comes nearest above it; `item` is an index into a list."""
        node, line, rest = self._descend(path)
        if item is not None and not rest and isinstance(node, yaml.SequenceNode) and item < len(node.value):
            line = node.value[item].start_mark.line + 1
        return line

    def holds(self, path: str) -> bool:
        """True when the text itself has the path."""
        return not self._descend(path)[2]

    def _descend(self, path: str) -> tuple[yaml.Node, int, list[str]]:
        """The node nearest to a path, its line, and the names of the path that were not found."""
        node, line, rest = self._root, self._root.start_mark.line + 1, path.split(".") if path else []
        while rest:
            step = _step(node, rest)
            if step is None:
                break
            used, line, node = step
            rest = rest[used:]
        return node, line, rest


def _step(node: yaml.Node, rest: list[str]) -> tuple[int, int, yaml.Node] | None:
    """How many names of the path a child of the node takes up, the child's line, and the child."""
    if isinstance(node, yaml.MappingNode):
        for used in range(len(rest), 0, -1):
            for key, value in node.value:
                if key.value == ".".join(rest[:used]):
                    return used, key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            if isinstance(entry, yaml.ScalarNode) and entry.value == rest[0]:
                return 1, entry.start_mark.line + 1, entry
            if isinstance(entry, yaml.MappingNode):
                found = _step(entry, rest)
                if found is not None:
                    return found
    return None


def read_text(path: Path) -> str:
    """The text of a file; ExperimentError when it cannot be an experiment."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise fault(str(path), 0, f"cannot be read: {error.strerror}; give the path of a YAML file") from error
    if len(raw) > MOST_BYTES:
        raise fault(
            str(path), 0, f"is larger than {MOST_BYTES // 1024} KiB; give an experiment file, data belongs elsewhere"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise fault(
            str(path), line, f"holds the byte 0x{raw[error.start]:02x}, which is not UTF-8; save the file as UTF-8 text"
        ) from error


def fault(file: str, line: int, message: str) -> ExperimentError:
    """An error with one problem in the text itself."""
    return ExperimentError([Problem(file=file, line=line, path="", message=message)])


def parse(text: str, file: str) -> Document:
    """The document of a YAML text; ExperimentError with the line for anything that is not plain, finite data."""
    if len(text) > MOST_BYTES:
        raise fault(file, 0, f"is larger than {MOST_BYTES // 1024} KiB; give an experiment file")
    root = _compose(text, file)
    if root is None:
        raise fault(file, 1, EMPTY)
    return Document(file=file, root=root, data=_Builder(file).build(root, ()))


def _compose(text: str, file: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{ord(text[error.position]):04X}" if error.position < len(text) else "a character"
        raise fault(
            file, line, f"holds the control character {character}; remove it, the file is plain text"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        raise fault(file, line, f"is not valid YAML: {_explain(error)}") from error
    except (ValueError, OverflowError) as error:
        raise fault(file, 1, f"holds an escape that is no character ({error}); write the character itself") from error


_REMEDIES = (
    ("'\\t'", "indent with spaces, never with tabs"),
    ("nested deeper", "flatten it, no experiment needs that"),
    ("single document", "keep one document, remove the `---` and what follows"),
    ("undefined alias", "define the anchor (&name) before the alias (*name)"),
    ("mapping values are not allowed", "quote text that holds a colon, or correct the indentation"),
    ("expected ',' or", "close the bracket or brace, and separate entries by commas"),
    ("expected <block end>", "align keys of one mapping in one column"),
    ("could not find expected ':'", "write `key: value`, with a colon after the key"),
    ("end of stream", "close the quote, bracket or brace"),
    ("unexpected end", "close the quote, bracket or brace"),
    ("cannot start any token", "quote text that begins with a special character"),
)


def _explain(error: yaml.MarkedYAMLError) -> str:
    text = ", ".join(part for part in (error.context, error.problem) if part)
    remedy = next((remedy for sign, remedy in _REMEDIES if sign in text), "correct the syntax on or above this line")
    return f"{text}; {remedy}"


class _Builder:
    """Turns composed nodes into plain data, within bounds: aliases are expanded, so they are counted each time."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._count = 0
        self._outermost = 1
        """Line of the top-level key that is being built."""

    def build(self, node: yaml.Node, above: tuple[int, ...]) -> Any:
        line = node.start_mark.line + 1
        self._count += 1
        if self._count > MOST_VALUES:
            raise fault(
                self._file,
                self._outermost,
                f"holds more than {MOST_VALUES} values with its aliases expanded; use fewer",
            )
        if id(node) in above:
            raise fault(self._file, line, "holds an alias to something that contains it; write the value out")
        if len(above) > MOST_DEPTH:
            raise fault(self._file, line, f"is nested deeper than {MOST_DEPTH} with its aliases expanded; flatten it")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, line)
        if node.tag not in (_MAP, _SEQ):
            raise self._tag(node, line)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(entry, (*above, id(node))) for entry in node.value]
        assert isinstance(node, yaml.MappingNode)
        return self._mapping(node, above)

    def _mapping(self, node: yaml.MappingNode, above: tuple[int, ...]) -> dict[str, Any]:
        built: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self.build(key_node, above) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str) or not key:
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise fault(self._file, line, f"has the key {shown!r}; a key is a name, quote it if it is meant as one")
            if key == "<<":
                raise fault(self._file, line, "has a merge key (<<), which YAML 1.2 dropped; write the fields out")
            if key in built:
                raise fault(
                    self._file, line, f"has the key {key!r} twice, first on line {first[key]}; keep one of them"
                )
            first[key] = line
            if not above:
                self._outermost = line
            built[key] = self.build(value_node, (*above, id(node)))
        return built

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Any:
        text: str = node.value
        if node.tag == _STR:
            if any(0xD800 <= ord(character) <= 0xDFFF or character == "\0" for character in text):
                raise fault(self._file, line, "holds an escape that is no character; write the character itself")
            return text
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if node.tag in (_INT, _FLOAT):
            return self._number(node, line)
        raise self._tag(node, line)

    def _number(self, node: yaml.ScalarNode, line: int) -> int | float:
        digits = node.value.replace("_", "").lower()
        if len(digits) > MOST_DIGITS:
            raise fault(self._file, line, f"has a number of {len(digits)} characters; at most {MOST_DIGITS} are read")
        if digits.lstrip("+-") in (".inf", ".nan"):
            digits = digits.replace(".", "")
        try:
            return int(digits) if node.tag == _INT else float(digits)
        except ValueError as error:
            raise fault(self._file, line, f"has {node.value!r} under a number tag; remove the tag") from error

    def _tag(self, node: yaml.Node, line: int) -> ExperimentError:
        return fault(self._file, line, f"has the tag {node.tag!r}; remove it, experiments are plain data")
