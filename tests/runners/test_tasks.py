import itertools
import math
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from runners.tasks import TASKS, TaskData, task_from_plain
from runners.tasks.data import IGNORED, SPLITS, Examples, Stream, TaskShape, bigram_loss, fingerprint, from_streams
from runners.tasks.mqar import Mqar
from runners.tasks.python_source import PythonSource, sources, split_of
from runners.tasks.text_files import TextFiles
from search_space.errors import UserError

MQAR_FINGERPRINT = "2965cfdec45ea9c035f92b2bc9b5b0bd6677401b22072807233635483aad6730"
SMALL_MQAR = Mqar(seq_len=64, pairs=8, vocabulary=64, examples=200, held_out=40, seed=3)


@pytest.fixture(scope="module")
def source() -> TaskData:
    return PythonSource(seq_len=32, eval_lengths=(128,), max_bytes=2**20).prepare()


def tokens(data: TaskData, split: str) -> np.ndarray:
    stream = data.splits[split]
    assert isinstance(stream, Stream)
    return stream.tokens


def test_python_source_leaves_out_tests_and_site_packages() -> None:
    found = list(sources(Path(sysconfig.get_paths()["stdlib"])))
    assert "argparse.py" in found
    assert "json/decoder.py" in found
    assert not [name for name in found if {"test", "tests", "site-packages", "idle_test"} & set(name.split("/"))]


def test_python_source_splits_by_file_without_overlap(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"m{number}.py").write_text(f"# file {number:03d}\n" * 40)
    data = PythonSource(seq_len=16).prepare(str(tmp_path))
    held = {split: {line for line in tokens(data, split).tobytes().splitlines() if line} for split in SPLITS}
    assert sum(map(len, held.values())) == 60
    assert not held["train"] & held["validation"]
    assert not held["train"] & held["test"]
    assert not held["validation"] & held["test"]
    assert b"# file 007" in held[split_of("m7.py")]


def test_python_source_keeps_within_max_bytes_and_takes_whole_files(source: TaskData) -> None:
    assert 0.9 * 2**20 < source.size_bytes <= 2**20
    assert source.size_bytes == sum(len(tokens(source, split)) for split in SPLITS)


def test_python_source_is_the_same_in_every_process(source: TaskData) -> None:
    code = "from runners.tasks.python_source import PythonSource as P; print(P(max_bytes=2**20).prepare().fingerprint)"
    other = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == source.fingerprint


def test_fingerprint_depends_on_the_bytes_and_on_the_split_they_are_in() -> None:
    a, b = np.arange(50, dtype=np.uint8), np.arange(50, 100, dtype=np.uint8)
    first = fingerprint({"train": Stream(tokens=a), "validation": Stream(tokens=b), "test": Stream(tokens=b)})
    swapped = fingerprint({"train": Stream(tokens=b), "validation": Stream(tokens=a), "test": Stream(tokens=b)})
    changed = fingerprint({"train": Stream(tokens=a + 1), "validation": Stream(tokens=b), "test": Stream(tokens=b)})
    assert len({first, swapped, changed}) == 3


def test_bigram_loss_is_the_smoothed_count_ratio() -> None:
    train = np.frombuffer(b"ababac", dtype=np.uint8)
    validation = np.frombuffer(b"abz", dtype=np.uint8)
    after_a = (2 + 0.1) / (3 + 25.6)
    after_b = 0.1 / (2 + 25.6)
    assert bigram_loss(train, validation) == pytest.approx(-(math.log(after_a) + math.log(after_b)) / 2)


def test_bigram_loss_of_python_source_lies_between_one_and_three_nats(source: TaskData) -> None:
    assert source.bigram_loss is not None
    assert 1.0 < source.bigram_loss < 3.0


def test_train_batches_depend_on_step_and_seed_alone(source: TaskData) -> None:
    inputs, targets = source.batch(5, 4, seed=1)
    again, _ = source.batch(5, 4, seed=1)
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.equal(again)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert not inputs.equal(source.batch(6, 4, seed=1)[0])
    assert not inputs.equal(source.batch(5, 4, seed=2)[0])


def test_train_windows_start_anywhere_in_the_split() -> None:
    shape = TaskShape(vocab_size=256, train_len=4, max_len=4)
    data = from_streams({split: np.arange(20, dtype=np.uint8) for split in SPLITS}, shape)
    firsts = {int(row[0]) for step in range(200) for row in data.batch(step, 4, seed=0)[0]}
    assert firsts == set(range(16))


def test_evaluation_windows_are_fixed_spread_and_disjoint(source: TaskData) -> None:
    batches = list(source.evaluation("validation", 4096 + 128, 128))
    rows = np.concatenate([inputs.numpy() for inputs, _ in batches])
    assert rows.shape == (33, 128)
    stream = tokens(source, "validation").tobytes()
    places = [stream.find(row.astype(np.uint8).tobytes()) for row in rows]
    assert places[0] == 0
    assert all(later - earlier >= 128 for earlier, later in itertools.pairwise(places))
    assert places[-1] > 0.9 * len(stream)
    for inputs, targets in batches:
        assert inputs[:, 1:].equal(targets[:, :-1])


def test_evaluation_never_takes_more_than_the_split_holds() -> None:
    shape = TaskShape(vocab_size=256, train_len=4, max_len=8)
    data = from_streams({split: np.arange(30, dtype=np.uint8) for split in SPLITS}, shape)
    assert sum(len(inputs) for inputs, _ in data.evaluation("test", 10**6, 4)) == 6


def test_every_length_predicts_the_same_tokens(source: TaskData) -> None:
    targets = {
        length: np.concatenate(
            [targets.numpy().ravel() for _, targets in source.evaluation("validation", 4096, length)]
        )
        for length in (32, 64, 128)
    }
    assert len(targets[128]) == 4096
    assert targets[32].tolist() == targets[64].tolist() == targets[128].tolist()


@pytest.mark.parametrize("task", [SMALL_MQAR, PythonSource(seq_len=32, max_bytes=2**17)])
def test_data_survive_a_file(task: Mqar | PythonSource, tmp_path: Path) -> None:
    data = task.prepare()
    data.save(tmp_path / "d.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["d.safetensors"]
    loaded = task.prepare(str(tmp_path / "d.safetensors"))
    assert (loaded.fingerprint, loaded.shape, loaded.unit) == (data.fingerprint, data.shape, data.unit)
    assert (loaded.bigram_loss, loaded.reports_accuracy) == (data.bigram_loss, data.reports_accuracy)
    assert all(a.equal(b) for a, b in zip(loaded.batch(3, 5, 0), data.batch(3, 5, 0), strict=True))


def test_changed_data_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    SMALL_MQAR.prepare().save(path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"d\.safetensors: the data's fingerprint is .* recorded was"):
        TaskData.load(path)


def test_a_file_that_holds_no_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    path.write_text("nothing of the kind")
    with pytest.raises(ValueError, match="no readable data file"):
        TaskData.load(path)


def mqar_arrays(split: str = "train", length: int = 64) -> tuple[np.ndarray, np.ndarray]:
    examples = SMALL_MQAR.prepare().splits[split]
    assert isinstance(examples, Examples)
    return examples.inputs[length], examples.targets[length]


def test_mqar_asks_each_key_once_for_the_value_it_was_bound_to() -> None:
    for inputs, targets in zip(*mqar_arrays(), strict=True):
        bound = dict(zip(inputs[0:16:2].tolist(), inputs[1:16:2].tolist(), strict=True))
        queries = np.flatnonzero(targets != IGNORED)
        assert len(bound) == 8
        assert queries.min() >= 16
        assert sorted(inputs[queries].tolist()) == sorted(bound)
        assert [bound[key] for key in inputs[queries].tolist()] == targets[queries].tolist()


def test_mqar_fillers_are_never_live_keys_or_values() -> None:
    seen = 0
    for inputs, targets in zip(*mqar_arrays(), strict=True):
        live = set(inputs[:16].tolist())
        fillers = inputs[16:][targets[16:] == IGNORED].tolist()
        seen += len(fillers)
        assert not live & set(fillers)
        assert all(0 < token < 64 for token in inputs.tolist())
    assert seen == 200 * 40


def test_mqar_queries_come_in_random_order() -> None:
    inputs, targets = mqar_arrays()
    orders = {
        tuple(row[:16:2].tolist().index(key) for key in row[t != IGNORED])
        for row, t in zip(inputs, targets, strict=True)
    }
    assert len(orders) > 190


def test_mqar_splits_share_no_sequence() -> None:
    rows = {split: {row.tobytes() for row in mqar_arrays(split)[0]} for split in SPLITS}
    assert [len(rows[split]) for split in SPLITS] == [200, 40, 40]
    assert len(rows["train"] | rows["validation"] | rows["test"]) == 280


def test_mqar_is_fixed_by_its_own_seed_in_every_process_and_release() -> None:
    assert SMALL_MQAR.prepare().fingerprint == MQAR_FINGERPRINT
    np.random.seed(7)
    assert SMALL_MQAR.prepare().fingerprint == MQAR_FINGERPRINT
    assert Mqar(seq_len=64, pairs=8, vocabulary=64, examples=200, held_out=40, seed=4).prepare().fingerprint != (
        MQAR_FINGERPRINT
    )


def test_mqar_trains_on_each_sequence_once_before_any_again() -> None:
    data = SMALL_MQAR.prepare()
    rows = [row.numpy().tobytes() for step in range(25) for row in data.batch(step, 16, seed=1)[0]]
    assert len(set(rows[:200])) == 200
    assert sorted(rows[:200]) == sorted(rows[200:])
    assert rows[:200] != rows[200:]


def test_mqar_evaluates_longer_sequences_too() -> None:
    data = Mqar(seq_len=32, pairs=4, vocabulary=32, examples=10, held_out=6, eval_lengths=(64,)).prepare()
    assert data.shape.max_len == 64
    ((inputs, targets),) = data.evaluation("validation", 10**6, 64)
    assert inputs.shape == (6, 64)
    assert int((targets != IGNORED).sum()) == 24


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("mqar", {"pairs": 40}, "40 pairs and their queries need 160 tokens"),
        ("mqar", {"vocabulary": 60}, "leave no filler"),
        ("mqar", {"eval_lengths": [64]}, "the shortest sequence has 64"),
        ("mqar", {"examples": 0}, "takes a whole number from 1"),
        ("python_source", {"seq_len": 1}, "takes whole numbers from 2"),
        ("python_source", {"max_bytes": 10}, "takes 65536 to"),
        ("text_files", {}, "is empty; list one or more"),
        ("text_files", {"paths": "corpus"}, "takes a list"),
    ],
)
def test_task_fields_are_checked(kind: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"task\.{kind}\..*{message}"):
        task_from_plain({"kind": kind, kind: fields})


def test_an_unknown_task_is_named_with_near_matches() -> None:
    with pytest.raises(ValueError, match="did you mean 'mqar'"):
        task_from_plain({"kind": "mqr"})


def test_shapes_are_known_without_data() -> None:
    assert set(TASKS) == {"python_source", "text_files", "mqar"}
    shape = TextFiles(paths=("/nowhere",), seq_len=32, eval_lengths=(64, 48)).shape()
    assert (shape.vocab_size, shape.train_len, shape.max_len) == (256, 32, 64)


@pytest.mark.parametrize("max_bytes", [2**16, 2**18, 2**20])
def test_a_small_python_corpus_keeps_every_split_in_its_share(max_bytes: int) -> None:
    data = PythonSource(max_bytes=max_bytes).prepare()
    held = {name: len(tokens(data, name)) for name in SPLITS}
    assert sum(held.values()) <= max_bytes
    for name in ("validation", "test"):
        assert 0.04 < held[name] / max_bytes <= 0.08


def test_a_data_file_takes_the_lengths_of_the_task_that_reads_it(source: TaskData, tmp_path: Path) -> None:
    source.save(tmp_path / "source.safetensors")
    longer = PythonSource(seq_len=64, max_bytes=2**20).prepare(str(tmp_path / "source.safetensors"))
    assert longer.shape == TaskShape(vocab_size=256, train_len=64, max_len=64)
    assert longer.fingerprint == source.fingerprint
    SMALL_MQAR.prepare().save(tmp_path / "mqar.safetensors")
    with pytest.raises(UserError, match="was made for"):
        Mqar(seq_len=32, pairs=8, vocabulary=64).prepare(str(tmp_path / "mqar.safetensors"))
