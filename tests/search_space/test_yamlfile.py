"""The reader takes plain YAML 1.2 data, knows the line of everything, and refuses the rest in words."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_space.errors import ExperimentError
from search_space.yamlfile import MOST_BYTES, Dumper, parse, read_text


def data(text: str) -> Any:
    return parse(text, "file").data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("12", 12),
        ("-7", -7),
        ("+7", 7),
        ("010", 10),
        ("1_000", 1000),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("off", "off"),
        ("y", "y"),
        ("none", "none"),
        ("130k", "130k"),
        ("2.5M", "2.5M"),
        ("1e", "1e"),
        ("0x10", "0x10"),
        ("12:30:00", "12:30:00"),
        ("2026-11-29", "2026-11-29"),
        ("'1e-3'", "1e-3"),
        ("!!str 12", "12"),
        ("=", "="),
    ],
)
def test_scalars_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    read = data(f"a: {text}")["a"]
    assert read == value
    assert type(read) is type(value)


def test_infinities_and_nan_are_read_as_floats_for_the_checks_to_refuse() -> None:
    assert data("a: [.inf, -.inf]")["a"] == [math.inf, -math.inf]
    assert math.isnan(data("a: .nan")["a"])


def test_anchors_and_aliases_are_expanded() -> None:
    assert data("a: &x {b: 1}\nc: *x")["c"] == {"b": 1}


TEXT = """\
# comment
model:
  layers:
    - 2
    - 4
  mixer:
    - softmax
    - linear:
        heads: 2
  "model.position": none
search: {trials: 3,
  seed: 1}
"""


@pytest.mark.parametrize(
    ("path", "item", "line"),
    [
        ("", None, 2),
        ("model", None, 2),
        ("model.layers", None, 3),
        ("model.layers", 1, 5),
        ("model.mixer.softmax", None, 7),
        ("model.mixer.linear.heads", None, 9),
        ("model.mixer", 1, 8),
        ("model.model.position", None, 10),
        ("search.seed", None, 12),
        ("search.absent.deeper", None, 11),
        ("absent", None, 2),
    ],
)
def test_every_path_has_the_line_of_its_key_or_of_what_is_nearest_above(path: str, item: int | None, line: int) -> None:
    assert parse(TEXT, "file").line(path, item) == line


def write(folder: Path, raw: bytes) -> Path:
    path = folder / "file.yaml"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"a: 1\nb: \xff\n", "file.yaml:2: holds the byte 0xff, which is not UTF-8"),
        ("a: 1".encode("utf-16"), "not UTF-8"),
        (bytes(range(256)), "not UTF-8"),
        (b"a: 1\n" * (MOST_BYTES // 5 + 1), "larger than 256 KiB"),
        (b"x" * 10_000_000, "larger than 256 KiB"),
    ],
    ids=["latin", "utf16", "binary", "long", "10MB"],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    with pytest.raises(ExperimentError, match=r"file\.yaml") as caught:
        read_text(write(tmp_path, raw))
    assert words in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    assert data(read_text(write(tmp_path, b"\xef\xbb\xbfa: 1"))) == {"a": 1}


def test_a_missing_file_a_folder_and_a_device_are_refused(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "directory"), (Path("/dev/zero"), "256")):
        with pytest.raises(ExperimentError, match=words):
            read_text(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("a: \x00", "control character U+0000"),
        ("a: " + "[" * 1000, "nested deeper"),
        ("a: " + "{b: " * 1000, "nested deeper"),
        ("- " * 1000 + "a", "nested deeper"),
        ("&a [*a]", "contains it"),
        ('a: "\\ud800"', "no character"),
        ('a: "\\UFFFFFFFF"', "no character"),
        ("a: " + "9" * 5000, "at most 60"),
        ("? [1, 2]\n: 3", "a key is a name"),
        ("null: 3", "a key is a name"),
        ("'': 3", "a key is a name"),
        ("true: 3", "a key is a name"),
        ("a: !!binary aGk=", "remove it"),
        ("a: !!set {b}", "remove it"),
        ("a: !own 3", "remove it"),
        ("a: !!bool maybe", "remove it"),
        ("%YAML 9.1\n---\na: 1", "not valid YAML"),
        ("a: @b", "quote text that begins with a special character"),
        ("a: `b`", "quote text that begins with a special character"),
        ("a: *b", "define the anchor"),
        ("a: 'b", "close the quote"),
    ],
)
def test_a_text_that_is_no_plain_data_is_refused(text: str, words: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        data(text)
    assert words in str(caught.value)


def test_a_bomb_of_aliases_is_refused_at_once() -> None:
    lines = ["x0: &x0 [y, y, y, y, y, y, y, y, y, y]"]
    lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, 30)]
    started = time.perf_counter()
    with pytest.raises(ExperimentError, match="aliases expanded"):
        data("\n".join(lines))
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    "value",
    ["1e-3", "no", "yes", "true", "null", "~", "130k", "010", "1_0", "", "a: b", "#x", "é\n", 1e-8, 1e22, 3, True],
)
def test_what_is_dumped_is_read_back_unchanged(value: object) -> None:
    read = data(yaml.dump({"a": value}, Dumper=Dumper, allow_unicode=True))["a"]
    assert read == value
    assert type(read) is type(value)
