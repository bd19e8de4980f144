"""A user's block that crashes, ends or hangs where its cost is measured costs its point, not the driver."""

import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.entities import Run
from studied import EXPERIMENT, SHAPE, experiment, opened

from runners.guard import Guard
from runners.store import Store
from search_space.places import locate
from search_space.records import Tag

HERE = Path(__file__).parent
BLOCK = """
import ctypes
import os
import time
from dataclasses import dataclass
from typing import ClassVar

from blocks.families import AbstractPremixer, Dims, MixerModule
from blocks.premixers.none import Passing
from blocks.registry import register
from search_space.domains import choice

WAYS = {
    "sound": lambda: None,
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(3600),
}


@register
@dataclass(frozen=True, kw_only=True)
class Unsafe(AbstractPremixer):
    'Goes wrong as soon as it is built, on any device.'

    kind: ClassVar[str] = "unsafe"
    paper: ClassVar[str] = "none: a test's own block"
    way: str = choice(*WAYS, default="sound", help="How it goes wrong")

    def build(self, dims: Dims) -> MixerModule:
        WAYS[self.way]()
        return Passing()

    def flops_per_token(self, dims: Dims) -> float:
        return 0.0
"""
SCRIPT = """
import sys
sys.path[:0] = [{here!r}, {folder!r}]
from runners import guard
inner = guard.Guard.check
def check(self, point, shape):
    guard.MEASURE_SECONDS = 1.0 if point.get("model.premixer.unsafe.way") == "hang" else 60.0
    inner(self, point, shape)
guard.Guard.check = check
from pathlib import Path
from drive import main
sys.exit(main(Path({folder!r}), Path({folder!r}) / "small.yaml", {asked!r}))
"""


def runs(folder: Path) -> list[Run]:
    store = Store(locate(f"sqlite:///{folder}/mlflow.db"))
    return store.children(store.parent("small"))


@pytest.mark.fault
def test_the_driver_survives_blocks_that_crash_or_hang_when_they_are_measured(tmp_path: Path) -> None:
    (tmp_path / "unsafe.py").write_text(BLOCK)
    premixer = "  premixer: {none: {}, unsafe: {way: [sound, segfault, exit, hang]}}\n"
    (tmp_path / "small.yaml").write_text(EXPERIMENT.replace("  ffn:", f"{premixer}  ffn:") + "blocks: [unsafe]\n")
    asked = ["search.sampler=grid", "optimizer.adamw.learning_rate=0.003", "model.position=none"]
    script = SCRIPT.format(here=str(HERE), folder=str(tmp_path), asked=asked)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ways = {run.data.params.get("model.premixer.unsafe.way", "none") for run in runs(tmp_path)}
    assert ways == {"none", "sound"}
    assert {run.data.tags[Tag.STATUS] for run in runs(tmp_path)} == {"ok"}


@pytest.mark.slow
def test_what_is_refused_says_how_it_ended_and_is_tried_once(tmp_path: Path) -> None:
    (tmp_path / "unsafe.py").write_text(BLOCK)
    code = f"""
import sys
sys.path[:0] = [{str(HERE)!r}, {str(tmp_path)!r}]
import runners.guard as guard
from blocks.families import InfeasibleArchitecture
from search_space.space import default_point
from studied import SHAPE, experiment, EXPERIMENT
text = EXPERIMENT.replace("  ffn:", "  premixer: {{unsafe: {{way: [sound, segfault, hang]}}}}\\n  ffn:")
text += "blocks: [unsafe]"
asked = experiment(text=text)
started = []
sys.addaudithook(lambda event, given: started.append(given) if event == "subprocess.Popen" else None)
held = guard.Guard(asked)
point = default_point(asked.space)
for way in ("sound", "segfault", "hang", "segfault", "hang"):
    guard.MEASURE_SECONDS = 1.0 if way == "hang" else 60.0
    refused = "not refused"
    try:
        held.check({{**point, "model.premixer.unsafe.way": way}}, SHAPE)
    except InfeasibleArchitecture as error:
        refused = str(error)
    print(len(started), way, refused)
held.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sound, segfault, hang, *again = done.stdout.splitlines()
    assert sound == "1 sound not refused"
    assert "ended the process by signal SIGSEGV" in segfault
    assert "model.premixer.unsafe.way='segfault'" in segfault
    assert "took more than 1 s and was ended" in hang
    # What broke took its process along, so that whatever is tried then costs a new one.
    assert [line.split()[0] for line in (segfault, hang)] == ["1", "2"]
    assert again == [f"2{line[1:]}" for line in (segfault, hang)]


def test_points_without_blocks_of_the_users_own_cost_no_process(tmp_path: Path) -> None:
    asked = experiment()
    guard = Guard(asked)
    with opened(tmp_path) as study:
        proposed = study.propose()
        assert proposed is not None
    guard.check(proposed.resolved.flat, SHAPE)
    assert guard._child is None
