import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runners.tasks import TaskData
from runners.tasks.data import SPLITS, Stream
from runners.tasks.text_files import TextFiles, find_files


def tokens(data: TaskData, split: str) -> np.ndarray:
    stream = data.splits[split]
    assert isinstance(stream, Stream)
    return stream.tokens


def write_files(folder: Path, count: int) -> None:
    for number in range(count):
        file = folder / ("a" if number % 2 else "b") / f"{number}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"Only file {number} says {number * 7919} here.\n" * 8)


def test_text_files_split_by_file_when_there_are_enough(tmp_path: Path) -> None:
    write_files(tmp_path, 24)
    data = TextFiles(paths=(str(tmp_path),), seq_len=16).prepare()
    held = {
        split: {int(word) for word in tokens(data, split).tobytes().decode().split() if word.isdigit()}
        for split in SPLITS
    }
    assert all(held.values())
    numbers = {split: {n for n in held[split] if n < 24} for split in SPLITS}
    assert sum(map(len, numbers.values())) == len(set.union(*numbers.values())) == 24


def test_text_files_split_by_document_when_files_are_few(tmp_path: Path) -> None:
    rows = [json.dumps({"body": f"document {number} " * 20, "id": number}) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    data = TextFiles(paths=(str(tmp_path / "rows.jsonl"),), text_field="body", seq_len=16).prepare()
    held = [
        {int(word) for word in tokens(data, split).tobytes().decode().split() if word.isdigit()} for split in SPLITS
    ]
    assert [len(part) for part in held] == [36, 2, 2]
    assert len(set.union(*held)) == 40


def test_text_files_do_not_depend_on_where_the_folder_lies(tmp_path: Path) -> None:
    prints = set()
    for name in ("here", "with space"):
        (tmp_path / name).mkdir()
        write_files(tmp_path / name, 20)
        prints.add(TextFiles(paths=(str(tmp_path / name),), seq_len=16).prepare().fingerprint)
    assert len(prints) == 1


def test_files_of_one_name_in_two_folders_are_all_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.txt").write_text(f"words of {name}")
    files = find_files([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a" / "same.txt")])
    assert list(files.values()) == [tmp_path / "a" / "same.txt", tmp_path / "b" / "same.txt"]


def missing(folder: Path) -> TextFiles:
    return TextFiles(paths=(str(folder / "nowhere"),))


def empty(folder: Path) -> TextFiles:
    (folder / "empty.txt").write_text("")
    return TextFiles(paths=(str(folder),))


def wrong_field(folder: Path) -> TextFiles:
    (folder / "rows.jsonl").write_text('{"body": "x"}\n')
    return TextFiles(paths=(str(folder),))


def wrong_suffix(folder: Path) -> TextFiles:
    (folder / "a.bin").write_text("x")
    return TextFiles(paths=(str(folder / "a.bin"),))


def no_file(folder: Path) -> TextFiles:
    return TextFiles(paths=(str(folder),))


def short(folder: Path) -> TextFiles:
    (folder / "a.txt").write_text("a\n\nb\n\nc\n\nd")
    return TextFiles(paths=(str(folder),))


def latin(folder: Path) -> TextFiles:
    (folder / "a.txt").write_bytes(b"caf\xe9 \xff\xfe" * 50)
    return TextFiles(paths=(str(folder),))


def malformed(folder: Path) -> TextFiles:
    (folder / "a.jsonl").write_text('{"text": "x"}\n{"text": \n')
    return TextFiles(paths=(str(folder),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (missing, "nowhere does not exist; correct the path"),
        (empty, "hold 0 document"),
        (wrong_field, "has no such field; it has body"),
        (wrong_suffix, r"a\.bin ends in none of \.txt"),
        (no_file, r"no \.txt, .* file under"),
        (short, "too few for one window of 64"),
        (latin, r"a\.txt: cannot be read as text in UTF-8"),
        (malformed, r"a\.jsonl: cannot be read as json"),
    ],
)
def test_unusable_text_is_refused_with_a_remedy(
    make: Callable[[Path], TextFiles], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path).prepare()
