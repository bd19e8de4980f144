"""What is read back can run no code, what is served stays on this machine, and no name leads out of its folder."""

import ast
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from made_up import FOLDER, TRIALS
from servers import TrackingServer
from studied import experiment, uri
from tracked import store_uri, train_search

from runners.checkpoints import HEADER, CheckpointRefused, find
from runners.cli import main
from runners.dashboard import HOST
from runners.search import run_search
from runners.tasks.data import TaskData
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.places import PlaceError, file_name

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("runners", "blocks", "analysis", "search_space", "benchmarks")
    for path in ROOT.glob(f"{folder}/**/*.py")
)
RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
"""Modules that no source may import."""
NAMES = [
    "../out",
    "/etc/out",
    "a/../../out",
    "a\nb",
    "x" * 5000,
    "\N{PARTY POPPER}",
    "a'b",
    'a"b',
    "a`b",
    "%s%n",
    "a b",
    "",
]


def danger(call: ast.Call) -> str:
    """Why a call may run code that a file holds; empty when it cannot."""
    called = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if called == "torch.load" and given.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if called in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
        return "np.load with pickles allowed"
    if called == "pd.read_pickle" or called.endswith(".to_pickle"):
        return called
    if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all") and "Safe" not in str(given):
        return called
    return called if called in ("eval", "exec") else ""


def dangers(source: str) -> list[str]:
    """What in a module may run code that a file holds, or serve other machines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (why := danger(node)):
            found.append(why)
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.partition(".")[0] in RUNS_CODE]
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in RUNS_CODE:
            found.append(f"from {node.module}")
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            found.append("an address of all interfaces")
    return found


def test_no_source_loads_what_may_run_code_or_serves_other_machines() -> None:
    assert len(SOURCES) > 200
    assert {str(path): found for path in SOURCES if (found := dangers(path.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(t)",
        "eval(t)",
        "import pickle",
        "from joblib import load",
        "host = '0.0.0.0'",
    ],
)
def test_the_scan_finds_what_it_is_for(line: str) -> None:
    assert dangers(line)


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return Path.mkdir, (self.mark,)  # type: ignore[return-value]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "exploded"


@pytest.fixture
def bombs(mark: Path, tmp_path: Path) -> list[bytes]:
    """A bare pickle, and one in PyTorch's archive; both go off when they are loaded."""
    torch.save({"weight": Bomb(mark)}, tmp_path / "bomb.pt")
    made = [pickle.dumps(Bomb(mark)), (tmp_path / "bomb.pt").read_bytes()]
    pickle.loads(made[0])
    mark.rmdir()
    torch.load(tmp_path / "bomb.pt", weights_only=False)
    mark.rmdir()
    return made


def test_pickles_for_data_and_checkpoints_are_refused(tmp_path: Path, mark: Path, bombs: list[bytes]) -> None:
    for number, bomb in enumerate(bombs):
        data = tmp_path / f"{number}.safetensors"
        data.write_bytes(bomb)
        with pytest.raises(UserError, match=r"safetensors"):
            TaskData.load(data)
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / HEADER).write_bytes(bomb)
        (folder / "1.safetensors").write_bytes(bomb)
        with pytest.raises(CheckpointRefused):
            find(folder, "spec", 128)
    assert not mark.exists()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and a study of a real search whose trials were made up, and a store of a trained one."""
    folder = tmp_path_factory.mktemp("node")
    train_search(store_uri(folder), trials=1, keep_weights=(0,))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setenv("FAKE_TRIAL_SECONDS", "0")
        asked = experiment("search.trials=2", "search.sampler=random")
        run_search(asked, tracker=Tracker(store_uri(folder)), study_uri=uri(folder / "mlruns"), trials=TRIALS)
    return folder


def planted(node: Path, to: Path, bomb: bytes) -> Path:
    """A copy in which every file but the databases holds the bomb."""
    shutil.copytree(node, to)
    files = [file for file in to.rglob("*") if file.is_file() and ".db" not in file.name]
    assert {"model.safetensors", "result.json", "spec.json"} <= {file.name for file in files}
    for file in files:
        file.write_bytes(bomb)
    return to


@pytest.mark.slow
def test_pickles_in_every_file_of_a_run_never_go_off(
    node: Path,
    tmp_path: Path,
    mark: Path,
    bombs: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, bomb in enumerate(bombs):
        copy = planted(node, tmp_path / f"copy-{number}", bomb)
        monkeypatch.chdir(copy)
        for words in (
            ["show", "tiny/0"],
            ["replay", "tiny/0"],
            ["export", "tiny/0", "--to", str(tmp_path / f"out-{number}")],
            ["best", "tiny", "--as-file"],
            ["report", "tiny"],
            ["compare", "small/0", "small/1"],
            ["runs", "small"],
            ["train", "tiny/0", "--tokens", "1k"],
            ["retry", "small", "--failed"],
            ["sync", "small", "--study", uri(copy / "mlruns"), "--tracking-uri", f"sqlite:///{tmp_path}/{number}.db"],
        ):
            assert main(words) in (0, 1, 2), words
            assert not mark.exists(), words
            told = capsys.readouterr()
            assert "Traceback" not in told.err, (words, told.err)


def _listening(port: int) -> set[str]:
    """Local addresses in /proc/net/tcp on which a port is listened on."""
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    fields = [row.split() for row in rows]
    return {
        row[1].rpartition(":")[0] for row in fields if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TrackingServer]:
    made = TrackingServer(tmp_path)
    yield made
    made.stop()


@pytest.mark.slow
def test_the_server_that_helpers_start_listens_on_loopback_alone(server: TrackingServer) -> None:
    assert HOST == "127.0.0.1"
    server.start()
    assert _listening(int(server.uri.rpartition(":")[2])) == {"0100007F"}


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_no_name_of_a_search_leads_out_of_its_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(PlaceError):
        file_name(name)
    file = folder / "tiny.yaml"
    file.write_text(experiment().text)
    before = set(tmp_path.rglob("*"))
    (folder / "mlruns" / "studies").mkdir(parents=True)
    for words in (
        ["search", "tiny.yaml", "--name", name or "."],
        ["search", "tiny.yaml", "--warm-start", name or "."],
        ["search", "tiny.yaml", "--set", f"final.contrasts={{{name!r}: {{}}}}"],
        ["audit", name],
        ["sync", name, "--from", "mlruns"],
        ["report", name],
        ["rm", name, "--yes"],
        ["show", f"{name}/0"],
        ["train", f"{name}/0", "--tokens", "1k"],
        ["retry", f"{name}/0"],
    ):
        assert main(words) == 2, words
        told = capsys.readouterr().err
        assert "Traceback" not in told, words
        assert len(told) < 20_000, words
    left = {path for path in tmp_path.rglob("*") if path.is_file() and path not in before}
    assert [path for path in left if not path.is_relative_to(folder / "mlruns")] == []
