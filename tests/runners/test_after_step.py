"""What placements do to weights after each step happens in trials."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from specs import SMALL, keep_going, prepare

from runners.train import run_trial
from search_space.records import Status


def test_unit_weights_are_unit_at_the_end_of_a_trial(tmp_path: Path) -> None:
    made = prepare(text=SMALL.replace("placement: pre", "placement: {ngpt: {weights: unit}}"))
    done = run_trial(made.spec, made.data, keep_going, weights=tmp_path / "model.safetensors")
    assert done.status == Status.OK, done.last_lines
    weights = load_file(tmp_path / "model.safetensors")
    rows = [tensor for name, tensor in weights.items() if name.endswith(("embedding", "query.weight", "w_in.weight"))]
    assert len(rows) == 3
    for tensor in rows:
        torch.testing.assert_close(tensor.norm(dim=1), torch.ones(len(tensor)))
