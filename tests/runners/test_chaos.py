"""Random SIGKILLs over drivers, workers and a tracking server change nothing: the short form of benchmarks/chaos.py."""

import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
SEED = "ASSAY_KILL_SEED"
"""Environment variable that holds the seed of the kills; otherwise it is new, and printed where they fail."""


@pytest.mark.fault
@pytest.mark.parametrize(("engine", "kills", "trials"), [("local", 20, 25), ("ray", 8, 16)])
def test_random_kills_change_nothing(tmp_path: Path, engine: str, kills: int, trials: int) -> None:
    words = [
        sys.executable,
        str(CHAOS),
        "--engine",
        engine,
        "--kills",
        str(kills),
        "--trials",
        str(trials),
        "--state",
        str(tmp_path / "state.json"),
        "--verbose",
    ]
    given = ["--seed", os.environ[SEED]] if SEED in os.environ else []
    done = subprocess.run([*words, *given], capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("PASSED: ")
    assert f"engine {engine}: {kills} SIGKILLs" in last
    assert re.search(r" 0 lost, 0 doubled, 0 runs RUNNING", last)
    assert last.endswith("0 faults")


def test_kills_of_several_calls_add_up_and_one_line_says_what_came_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CHAOS.parent))
    from chaos_checks import Found
    from chaos_state import State

    file = tmp_path / "new/state.json"
    state = State(engine="local", seed=7, trials=80)
    for kills in (30, 40):
        state.calls += 1
        state.add({"worker": kills, "server": 1}, 5, 60.0, Found(trials=80, audited=80))
        state.write(file)
        state = State.read(file)
    line = state.verdict(100)
    assert line.startswith("NOT DONE (72 of 100): chaos, engine local: 72 SIGKILLs (70 workers, 0 drivers, 2 tracking")
    assert "over 2 searches in 120 s and 2 call(s)" in line
    assert line.endswith("160 proposals proved, 0 faults")
    assert state.verdict(72).startswith("PASSED: ")
    state.add({"driver": 40}, 41, 60.0, Found(trials=80, lost=1, faults=["chaos-2: lost trial 3"]))
    assert state.verdict(100).startswith("FAILED: ")


def test_a_run_is_not_gone_on_with_under_other_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHAOS.parent))
    from chaos import begun

    file = tmp_path / "state.json"
    file.write_text('{"engine": "local", "seed": 7, "trials": 80, "calls": 1, "pieces": []}')
    asked = Namespace(engine="local", state=file, anew=False, seed=None, trials=None)
    assert begun(asked).calls == 1
    asked.seed = 8
    with pytest.raises(SystemExit, match="was begun with --seed 7, this is 8; add --anew"):
        begun(asked)
    asked.anew = True
    assert begun(asked).calls == 0
