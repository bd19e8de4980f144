"""A user's own block that fails in training, on demand; its tests load it in a process of its own."""

import json
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blocks.families import AbstractPremixer, Context, Dims, MixerModule, PositionModule, State
from blocks.registry import register
from search_space.domains import choice

FAULTS = ("nan", "memory", "error", "evaluation", "none")


class FaultyModule(MixerModule):
    """Passes its input on, until the fourth pass in training."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.passes = 0

    def forward(self, x: Tensor, position: PositionModule, context: Context) -> Tensor:
        self.passes += self.training
        if self.fault == "evaluation":
            return x if self.training or not self.passes else x * float("nan")
        if self.passes < 4:
            return x
        if self.fault == "memory":
            return x + torch.empty(2**50)
        if self.fault == "error":
            raise KeyError("the fourth pass always fails")
        return x * float("nan") if self.fault == "nan" else x

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        return {}

    def step(self, x: Tensor, state: State, position: PositionModule, start: int) -> tuple[Tensor, State]:
        return x, {}


@register
@dataclass(frozen=True, kw_only=True)
class Faulty(AbstractPremixer):
    """Fails in training."""

    kind: ClassVar[str] = "faulty"
    paper: ClassVar[str] = "none: a test's own block"
    fault: str = choice(*FAULTS, default="none", help="what goes wrong")

    def build(self, dims: Dims) -> MixerModule:
        return FaultyModule(self.fault)

    def flops_per_token(self, dims: Dims) -> float:
        return 0.0


def main() -> None:
    """Print {fault: result}."""
    from runners.train import run_trial
    from search_space.records import to_plain
    from tests.runners.specs import SMALL, prepare

    text = "blocks: [tests.runners.faulty_blocks]\n" + SMALL
    results = {}
    for fault in FAULTS:
        made = prepare(f"model.premixer={{faulty: {{fault: {fault}}}}}", "budget.eval_every=2560", text=text)
        results[fault] = to_plain(run_trial(made.spec, made.data, lambda reading: True))
    print(json.dumps(results))
