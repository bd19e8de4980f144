"""What limits promise: whatever is measured, costly or slow, no trial beyond a limit is ever started."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from studied import SHAPE, experiment, made_up, opened
from test_broken_trials import runs, text_of

from blocks.cost import count_parameters
from blocks.families import InfeasibleArchitecture
from runners.candidate import resolve
from runners.guard import Guard
from runners.stopwatch import Speed, Stopwatch
from runners.study import Proposed
from search_space.settings import Limits
from search_space.space import random_point

WIDE = ("model.layers={low: 1, high: 8}", "model.d_model={low: 16, high: 512, step: 16}")


def two_percent(measure: str) -> float:
    """The limit that one random point of the wide space in fifty keeps."""
    wide, rng, found = experiment(*WIDE), random.Random(5), list[float]()
    while len(found) < 150:
        try:
            resolved = resolve(random_point(wide.space, rng), wide, SHAPE)
        except InfeasibleArchitecture:
            continue
        cost = resolved.cost
        assert count_parameters(resolved.candidate.model).total == cost.params
        found.append(float(cost.params) if measure == "max_params" else cost.state_bytes(SHAPE.train_len))
    return sorted(found)[len(found) // 50 - 1]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_of_a_space_that_is_feasible_in_two_percent_only_feasible_trials_start(tmp_path: Path, sampler: str) -> None:
    limit = int(two_percent("max_params"))
    with opened(tmp_path, *WIDE, f"limits.max_params={limit}", f"search.sampler={sampler}") as study:
        seconds = []
        for _ in range(12):
            began = time.process_time()
            proposed = study.propose()
            seconds.append(time.process_time() - began)
            assert proposed is not None
            study.tell(proposed.number, made_up(proposed))
        redraws = [entry.marks["redraws"].get("infeasible", 0) for entry in study.trials()]
        params = [entry.cost["params"] for entry in study.trials()]
    print(f"{sampler}: {sum(redraws)} draws refused for 12 trials, {max(seconds):.2f} s at most for one")
    assert max(params) <= limit
    assert sum(redraws) > 100, "two percent of the space"
    assert max(seconds) < 5


DEEP = (
    "model.layers=[1, 32]",
    "model.d_model=64",
    "model.mixer={softmax: {kv_heads: 1, queries_per_kv: 1, head_dim: 8, qk_norm: none}}",
    "model.position=none",
)


def first(folder: Path, layers: int) -> Proposed:
    folder.mkdir()
    with opened(folder, *DEEP, f"model.layers={layers}", "search.sampler=random") as study:
        proposed = study.propose()
    assert proposed is not None
    return proposed


@pytest.fixture
def guard() -> Iterator[Guard]:
    held = Guard(experiment())
    yield held
    held.close()


@pytest.fixture(scope="module")
def speeds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Speed]:
    """Of one layer and of thirty-two."""
    folder = tmp_path_factory.mktemp("speeds")
    specs = {layers: first(folder / str(layers), layers).spec for layers in (1, 32)}
    held = Guard(experiment())
    # By the child that studies ask too: in this process tests check every shape, which takes most of the time.
    found = {layers: Speed(**held.figures(spec)) for layers, spec in specs.items()}
    held.close()
    return found


def test_a_deeper_model_is_slower(speeds: dict[int, Speed]) -> None:
    assert speeds[32].latency_ms > 4 * speeds[1].latency_ms
    assert speeds[32].tokens_per_second < speeds[1].tokens_per_second / 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["max_latency_ms", "min_tokens_per_second"])
def test_a_model_measured_as_too_slow_is_never_a_trial(tmp_path: Path, speeds: dict[int, Speed], name: str) -> None:
    figure = name.removeprefix("max_").removeprefix("min_")
    between = (getattr(speeds[1], figure) * getattr(speeds[32], figure)) ** 0.5
    asked = (*DEEP, f"limits.{name}={between}", "search.sampler=random")
    with opened(tmp_path, *asked) as study:
        for _ in range(6):
            proposed = study.propose()
            assert proposed is not None
            study.tell(proposed.number, made_up(proposed))
        trials = study.trials()
    assert {entry.point["model.layers"] for entry in trials} == {1}
    assert sum(entry.marks["redraws"].get("infeasible", 0) for entry in trials) > 0
    assert all(entry.marks["measured"][figure] > 0 for entry in trials)
    kept = (tmp_path / "small" / "speeds.jsonl").read_text()
    with opened(tmp_path, *asked) as study:
        for _ in range(4):
            assert study.propose() is not None
        assert {entry.point["model.layers"] for entry in study.trials()} == {1}
    assert (tmp_path / "small" / "speeds.jsonl").read_text() == kept, "two architectures, each measured once"


@pytest.mark.slow
def test_a_figure_cut_off_by_a_kill_is_measured_again(tmp_path: Path, guard: Guard) -> None:
    proposed, file = first(tmp_path / "one", 1), tmp_path / "speeds.jsonl"
    limits = Limits(max_latency_ms=1e6)
    Stopwatch(file, limits, guard).check(proposed.spec)
    whole = file.read_text()
    file.write_text(whole.rstrip()[:-20])
    again = Stopwatch(file, limits, guard)
    assert again.speed(proposed.spec) == Stopwatch(file, limits, guard).speed(proposed.spec)
    assert len([line for line in file.read_text().splitlines() if line]) == 2


WAYS = ("none", "segfault", "raise", "hang")
SCRIPT = """
import sys
sys.path[:0] = [{here!r}, {folder!r}]
from runners import guard
guard.MEASURE_SECONDS = 10.0
from pathlib import Path
from drive import main
sys.exit(main(Path({folder!r}), Path({folder!r}) / "small.yaml", {asked!r}))
"""


@pytest.mark.fault
def test_the_driver_survives_models_that_crash_or_hang_when_they_are_timed(tmp_path: Path) -> None:
    text = text_of(f"    misbehaving: {{way: [{', '.join(WAYS)}]}}\n")
    (tmp_path / "small.yaml").write_text(text)
    asked = ["search.sampler=grid", "optimizer.adamw.learning_rate=0.003", "limits.max_latency_ms=1e6"]
    script = SCRIPT.format(here=str(Path(__file__).parent), folder=str(tmp_path), asked=asked)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [run.data.params["model.mixer.misbehaving.way"] for run in runs(tmp_path)] == ["none"]
    kept = [json.loads(line) for line in (tmp_path / "small/speeds.jsonl").read_text().splitlines() if line]
    reasons = [each["refused"] for each in kept if "refused" in each]
    for words in ("SIGSEGV: about to segfault", "this mixer always raises", "took more than 10 s"):
        assert [words in reason for reason in reasons].count(True) == 1, reasons
    assert all(reason.endswith("shrink it, or correct the module (misbehaving)") for reason in reasons)
    assert len(kept) == len(WAYS)


def test_without_such_a_limit_nothing_is_measured(tmp_path: Path, guard: Guard) -> None:
    proposed, file = first(tmp_path / "one", 1), tmp_path / "speeds.jsonl"
    watch = Stopwatch(file, Limits(max_params=1e9), guard)
    watch.check(proposed.spec)
    assert watch.marks(proposed.spec) == {}
    assert not file.exists()
