import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tracked import Searched, searched, store_uri, train_search

from runners.comparison import CLOCK, compare, spread_of
from runners.connecting import StoreError
from runners.replay import ReplayError, imposed_environment, replay
from runners.store import Store
from search_space.places import locate
from search_space.records import Artifact, Metric, Stage, Status, Tag, TrialResult


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store that was filled in one folder and then moved to another."""
    folder = tmp_path_factory.mktemp("trained")
    train_search(store_uri(folder / "made"), trials=2, prune_at={1: 4096})
    shutil.move(folder / "made", folder / "moved")
    return store_uri(folder / "moved")


def test_a_run_replays_bit_for_bit_from_a_moved_store_in_another_folder(
    trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = replay("tiny/0", trained)
    assert report.bit_equal, report.text()
    assert report.good
    assert report.deterministic
    assert report.compared > 15
    assert report.recorded_loss == report.replayed_loss
    assert report.text().startswith("tiny: 000 tiny")
    assert json.loads(json.dumps(report.plain()))["good"] is True


def test_a_pruned_run_replays_to_the_point_where_it_was_pruned(trained: str) -> None:
    report = replay("tiny/1", trained)
    assert report.recorded_status == report.replayed_status == "pruned"
    assert report.bit_equal, report.text()


def test_a_record_that_was_altered_is_told_apart_by_number_and_place(trained: str, tmp_path: Path) -> None:
    shutil.copytree(Path(trained.removeprefix("sqlite:///")).parent, tmp_path / "mlruns")
    uri = store_uri(tmp_path)
    store = Store(locate(uri))
    file = store.artifact(store.find_run("tiny/0"), Artifact.RESULT)
    assert file is not None
    plain = json.loads(file.read_text())
    plain["curve"][-1]["loss"] += 1e-12
    file.write_text(json.dumps(plain))
    report = replay("tiny/0", uri)
    assert not report.good
    assert [deviation.name for deviation in report.deviations] == [Metric.VALIDATION_CURVE]
    assert "so this is a failure" in report.text()


@pytest.mark.slow
def test_data_the_store_lacks_is_prepared_again_or_named_and_checked(trained: str, tmp_path: Path) -> None:
    shutil.copytree(Path(trained.removeprefix("sqlite:///")).parent, tmp_path / "mlruns")
    (data,) = tmp_path.rglob("*.safetensors")
    data.unlink()
    assert replay("tiny/0", store_uri(tmp_path)).bit_equal


@pytest.mark.slow
def test_data_with_another_fingerprint_is_refused(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog, and the dog sleeps on\n\n"
    (tmp_path / "a.txt").write_text("".join(f"{number} {text}" for number in range(60)))
    (tmp_path / "b.txt").write_text("".join(f"{number} other {text}" for number in range(60)))
    task = f"{{text_files: {{paths: ['{tmp_path / 'a.txt'}'], seq_len: 32}}}}"
    search = searched("words", task=task)
    uri = store_uri(tmp_path)
    train_search(uri, trials=1, search=search)
    (data,) = (tmp_path / "mlruns").rglob("*.safetensors")
    data.unlink()
    with pytest.raises(ReplayError, match="fingerprint"):
        replay("words/0", uri, str(tmp_path / "b.txt"))
    assert replay("words/0", uri, str(tmp_path / "a.txt")).bit_equal


def test_a_run_without_a_result_is_refused(tmp_path: Path) -> None:
    from runners.tracking import Tracker

    search, tracker = searched(), Tracker(store_uri(tmp_path))
    search.start(tracker)
    search.start_trial(tracker, 0)
    with pytest.raises(StoreError, match="continue the search 'tiny' first"):
        replay("tiny/0", store_uri(tmp_path))


BLOCK = """
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from blocks.families import AbstractNorm, Role, mark
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Plain(AbstractNorm):
    \"\"\"A layer norm of one's own.\"\"\"

    kind: ClassVar[str] = "own_norm"
    paper: ClassVar[str] = "none"

    def build(self, width: int) -> nn.Module:
        norm = nn.LayerNorm(width, bias=False)
        mark(norm.weight, Role.GAIN)
        return norm
"""


@pytest.mark.slow
def test_a_users_block_is_refused_when_changed_and_run_from_the_store_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "own_norm_block.py").write_text(BLOCK)
    monkeypatch.syspath_prepend(str(own))
    monkeypatch.setenv("PYTHONPATH", str(own))
    try:
        search = searched("own", norm="own_norm", blocks="[own_norm_block]")
        uri = store_uri(tmp_path)
        train_search(uri, trials=1, search=search)
        assert replay("own/0", uri).bit_equal
        (own / "own_norm_block.py").write_text(BLOCK.replace("bias=False", "bias=False, eps=1.0"))
        with pytest.raises(ReplayError, match="recorded-blocks"):
            replay("own/0", uri)
        report = replay("own/0", uri, recorded_blocks=True)
        assert report.bit_equal
        assert any("own_norm_block" in line for line in report.code)
    finally:
        forget("own_norm_block")


def forget(module: str) -> None:
    """Take a test's own block out of the registry and of the imported modules."""
    from blocks import registry

    sys.modules.pop(module, None)
    for kinds in registry._VARIANTS.values():
        for kind in [kind for kind, config in kinds.items() if config.__module__ == module]:
            del kinds[kind]


def one() -> tuple[Searched, TrialResult]:
    from tracked import result

    return searched(), result(environment={"cpu_capability": "AVX2", "threads": "1", "env/MKL_CBWR": "AVX2"})


def test_recorded_conditions_are_imposed_and_unrecorded_ones_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    search, recorded = one()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    spec, _ = search.trial(0)
    imposed = imposed_environment(replace(spec, threads=3), recorded)
    assert imposed["ATEN_CPU_CAPABILITY"] == "avx2"
    assert imposed["OMP_NUM_THREADS"] == imposed["MKL_NUM_THREADS"] == "3"
    assert imposed["MKL_CBWR"] == "AVX2"
    assert imposed["ONEDNN_MAX_CPU_ISA"] == "AVX2"


@pytest.mark.parametrize(("shift", "good"), [(0.01, True), (0.5, False)])
def test_a_record_that_promises_nothing_is_held_to_the_spread_of_its_search(shift: float, good: bool) -> None:
    search, recorded = one()
    spec = replace(search.trial(0)[0], deterministic=False)
    again = replace(recorded, metrics={**recorded.metrics, Metric.LOSS: recorded.metrics[Metric.LOSS] + shift})
    spread = spread_of({"a": [2.0, 2.1, 2.2], "b": [3.0, 3.1]})
    report = compare(run="r", spec=spec, recorded=recorded, replayed=again, spread=spread, code=[])
    assert not report.bit_equal
    assert report.good is good
    strict = compare(
        run="r", spec=replace(spec, deterministic=True), recorded=recorded, replayed=again, spread=spread, code=[]
    )
    assert not strict.good


def test_an_unknown_spread_is_said_and_proves_nothing() -> None:
    search, recorded = one()
    spec = replace(search.trial(0)[0], deterministic=False)
    again = replace(recorded, metrics={**recorded.metrics, Metric.LOSS: 0.0})
    report = compare(run="r", spec=spec, recorded=recorded, replayed=again, spread=spread_of({"a": [1.0]}), code=[])
    assert report.within_spread is None
    assert not report.good
    assert "spread is unknown" in report.text()


def test_clocks_and_memory_are_not_compared_but_everything_else_is() -> None:
    search, recorded = one()
    spec = search.trial(0)[0]
    recorded = replace(recorded, metrics={**recorded.metrics, Metric.PEAK_BYTES: 1.0, Metric.PARAMS: 5.0})
    for name in (*CLOCK, Metric.PARAMS):
        again = replace(recorded, metrics={**recorded.metrics, name: 77.0})
        report = compare(run="r", spec=spec, recorded=recorded, replayed=again, spread=spread_of({}), code=[])
        assert report.bit_equal is (name in CLOCK), name


def test_another_ending_is_never_equal() -> None:
    search, recorded = one()
    again = replace(recorded, status=Status.DIVERGED)
    report = compare(run="r", spec=search.trial(0)[0], recorded=recorded, replayed=again, spread=spread_of({}), code=[])
    assert not report.good
    assert "recorded ok, replayed diverged" in report.text()


@pytest.mark.slow
def test_finals_replay_with_their_test_reading(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    train_search(uri, trials=1, stage=Stage.FINAL)
    store = Store(locate(uri))
    assert Metric.TEST_LOSS in store.result(store.find_run("tiny/final/0")).metrics
    assert store.find_run("tiny/final/0").data.tags[Tag.STAGE] == "final"
    assert replay("tiny/final/0", uri).bit_equal
