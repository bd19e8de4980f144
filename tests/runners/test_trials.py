"""A trial's time is its own: what a worker must load or compile lies before its first trial, or does not happen."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from studied import FINITE, experiment

from runners.candidate import make_spec, resolve
from runners.tasks import task_from_plain
from search_space.records import Seeds, to_plain
from search_space.space import default_point

HEAVY = ("torch", "sympy", "mpmath", "blocks", "runners", "search_space")
RUNS_TWO = """
import json, sys
from runners.trials import trained

run = trained()
job = json.loads(sys.argv[1])
before = set(sys.modules)
results = [run(job, lambda reading: True) for _ in range(2)]
loaded = sorted(set(sys.modules) - before)
compiler = sys.modules.get("torch._dynamo.utils")
compiled = {name: dict(counts) for name, counts in compiler.counters.items() if counts} if compiler else {}
print(json.dumps([[result.status for result in results], loaded, compiled]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_nothing_is_loaded_or_compiled_within_the_first_trial_of_a_worker(tmp_path: Path, optimizer: str) -> None:
    asked = experiment(*FINITE)
    data, file = task_from_plain(asked.task).prepare(), tmp_path / "data.safetensors"
    data.save(file)
    resolved = resolve(default_point(asked.space), asked, data.shape)
    spec = make_spec(resolved, asked, fingerprint=data.fingerprint, seeds=Seeds(init=1, data=2, dropout=3))
    if optimizer == "muon":
        spec = dataclasses.replace(spec, candidate={**spec.candidate, "optimizer": {"kind": "muon", "muon": {}}})
    job = {"spec": to_plain(spec), "data": str(file), "weights": str(tmp_path / "w"), "test": True}
    job |= {"micro_batch_tokens": 0, "checkpoint": None}
    words = [sys.executable, "-c", RUNS_TWO, json.dumps(job)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    statuses, loaded, compiled = json.loads(done.stdout)
    assert statuses == ["ok", "ok"]
    assert [name for name in loaded if name.partition(".")[0] in HEAVY] == []
    assert len(loaded) < 5, loaded
    assert compiled == {}
