"""Points drawn from presets at a small size, as a search draws them."""

import functools
import random
from collections.abc import Iterator

from blocks import size
from blocks.families import InfeasibleArchitecture
from blocks.model import ModelConfig
from runners.candidate import Resolved, full_space, resolve
from runners.tasks import TASKS, task_from_plain
from search_space.canon import unflatten
from search_space.domains import Scalar
from search_space.experiment import Experiment, preset_path, read
from search_space.space import random_point

TRAIN_LEN = 40
VOCABULARY, WIDTH = 48, 32
SMALL = (
    "model.size={params: 150k}",
    f"task.python_source.seq_len={TRAIN_LEN}",
    f"budget={{tokens: {80 * TRAIN_LEN}, batch_tokens: {8 * TRAIN_LEN}, eval_tokens: {8 * TRAIN_LEN}}}",
    "search.pruner=none",
)
"""What makes a preset small; its space stays as it is."""

Point = dict[str, Scalar]


@functools.cache
def experiment(preset: str, *overrides: str) -> Experiment:
    """The preset at a small size."""
    return read(preset_path(preset), full_space=full_space, tasks=TASKS, overrides=(*SMALL, *overrides))


def resolved(point: Point, of: Experiment) -> Resolved:
    """The candidate of a point, as a search makes it."""
    return resolve(point, of, task_from_plain(of.task).shape())


def config_of(point: Point, max_len: int = TRAIN_LEN) -> ModelConfig:
    """The config of a point at one width, not yet canonical; InfeasibleArchitecture where it is refused."""
    model = {**unflatten(point)["model"], "d_model": WIDTH}
    return size.sized(model, vocab_size=VOCABULARY, train_len=TRAIN_LEN, max_len=max_len)


def draws(of: Experiment, seed: int) -> Iterator[tuple[Point, Resolved | InfeasibleArchitecture]]:
    """Points without end, each with its candidate or the refusal."""
    rng = random.Random(seed)
    while True:
        point = random_point(of.space, rng)
        try:
            yield point, resolved(point, of)
        except InfeasibleArchitecture as refusal:
            yield point, refusal
