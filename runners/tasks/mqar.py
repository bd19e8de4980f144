"""Multi-query associative recall: can a mixer look up, anywhere in its past, what a key was bound to?"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from runners.tasks.data import IGNORED, AbstractTask, Examples, TaskData, TaskShape, check_lengths, fingerprint
from search_space.canon import seed_from
from search_space.errors import UserError

GAP_POWER = 0.01
"""Exponent of the gap distribution; small values put most queries soon after the bindings."""


@dataclass(frozen=True, kw_only=True)
class Mqar(AbstractTask):
    """Key-value bindings, then every key once as a query in random order; the target at a query is its value.

    Arora et al. 2023, Zoology: Measuring and Improving Recall in Efficient Language Models, section 3.1 and
    procedure 1. The positions between queries hold fillers, which are never a key or value of their own sequence.
    """

    kind: ClassVar[str] = "mqar"
    unit: ClassVar[str] = "token"

    seq_len: int = 128
    """Sequence length; bindings take the first 2 * pairs tokens, queries at most every second one after them."""
    pairs: int = 32
    """Bindings per sequence."""
    vocabulary: int = 256
    """Tokens; the lower half are keys, the upper half values."""
    examples: int = 25600
    """Training sequences."""
    held_out: int = 512
    """Sequences of the validation split, and again of the test split, at each length."""
    seed: int = 0
    """Seed of the data; no other seed touches it."""
    eval_lengths: tuple[int, ...] = ()
    """Further lengths at which the final model is evaluated."""

    def __post_init__(self) -> None:
        check_lengths(self.kind, self.seq_len, self.eval_lengths)
        for name, low, high in (
            ("pairs", 1, 2**12),
            ("vocabulary", 8, 2**15),
            ("examples", 1, 2**20),
            ("held_out", 1, 2**16),
            ("seed", 0, 2**31),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise UserError(f"task.{self.kind}.{name}: takes a whole number from {low} to {high}; got {value!r}")
        half = self.vocabulary // 2
        if self.pairs >= half - 1:
            raise UserError(
                f"task.{self.kind}.pairs: {self.pairs} pairs leave no filler among {half - 1} keys and {half} values; "
                f"use at most {half - 2} pairs or a larger vocabulary"
            )
        shortest = min(self.seq_len, *self.eval_lengths, self.seq_len)
        if 4 * self.pairs > shortest:
            raise UserError(
                f"task.{self.kind}.pairs: {self.pairs} pairs and their queries need {4 * self.pairs} tokens, "
                f"the shortest sequence has {shortest}; use at most {shortest // 4} pairs or longer sequences"
            )

    def shape(self) -> TaskShape:
        return TaskShape(
            vocab_size=self.vocabulary, train_len=self.seq_len, max_len=max(self.seq_len, *self.eval_lengths, 0)
        )

    def prepare(self, path: str = "") -> TaskData:
        """The data, generated; `path` may name a data file written by a search."""
        if path:
            return TaskData.load(Path(path)).shaped(self.shape())
        lengths = sorted({self.seq_len, *self.eval_lengths})
        splits = {
            "train": self._examples("train", self.examples, [self.seq_len]),
            "validation": self._examples("validation", self.held_out, lengths),
            "test": self._examples("test", self.held_out, lengths),
        }
        return TaskData(
            shape=self.shape(),
            unit=self.unit,
            splits=splits,
            bigram_loss=None,
            reports_accuracy=True,
            fingerprint=fingerprint(splits),
        )

    def _examples(self, split: str, count: int, lengths: list[int]) -> Examples:
        made = {
            length: generate(
                count, length, self.pairs, self.vocabulary, seed=seed_from("mqar", self.seed, split, length)
            )
            for length in lengths
        }
        return Examples(
            inputs={length: inputs for length, (inputs, _) in made.items()},
            targets={length: targets for length, (_, targets) in made.items()},
        )


def generate(
    count: int, length: int, pairs: int, vocabulary: int, seed: int
) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Inputs and targets, [count, length]; from raw generator bits, so that every numpy gives the same."""
    bits = np.random.PCG64(seed)

    def uniform(*shape: int) -> NDArray[np.float64]:
        """Reals inside (0, 1)."""
        raw = bits.random_raw(math.prod(shape)).reshape(shape)
        return ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    half = vocabulary // 2
    key_order = np.argsort(uniform(count, half - 1), axis=1, kind="stable") + 1
    value_order = np.argsort(uniform(count, vocabulary - half), axis=1, kind="stable") + half
    keys, values = key_order[:, :pairs], value_order[:, :pairs]
    unused = np.concatenate([key_order[:, pairs:], value_order[:, pairs:]], axis=1)

    slots = (length - 2 * pairs) // 2
    weight = np.arange(1, slots + 1, dtype=np.float64) ** (GAP_POWER - 1.0)
    # The largest log(weight) + Gumbel noise are a weighted draw without replacement, in order.
    noise = np.log(weight) - np.log(-np.log(uniform(count, slots)))
    slot = np.argsort(-noise, axis=1, kind="stable")[:, :pairs]
    at = 2 * pairs + 2 * slot

    pick = (uniform(count, length) * unused.shape[1]).astype(np.int64)
    inputs = np.take_along_axis(unused, pick, axis=1)
    inputs[:, 0 : 2 * pairs : 2] = keys
    inputs[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(inputs, at, keys, axis=1)
    targets = np.full((count, length), IGNORED, dtype=np.int64)
    np.put_along_axis(targets, at, values, axis=1)
    return inputs.astype(np.int16), targets.astype(np.int16)
