"""When a trial has diverged: NaN, infinity, or a loss that stays far above where it began; or is out of memory."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from search_space.records import Status

SUSTAINED = 20
"""Consecutive steps over the limit that make a divergence; shorter excursions are seen to recover."""
RISE_NATS = 2.0
RISE_SHARE = 0.5
"""The limit is the first loss plus the larger of these nats and this share of it."""
ADVICE = "a lower learning rate or more warm-up may help"
CPU_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


class TrialEnd(Exception):
    """A trial that stops before its budget is spent, for a reason that is no error of the program."""

    def __init__(self, status: Status, reason: str, *, first_nonfinite: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.first_nonfinite = first_nonfinite


class Watch:
    """Training losses and gradient norms of every step, kept on the device until somebody looks."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._unseen: list[Tensor] = []
        self._losses: list[float] = []
        self._read_up_to = 0
        self._over = 0

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Note one step, without waiting for the device."""
        self._unseen.append(torch.stack((loss, norm)))

    def check(self) -> None:
        """Look at the steps since the last look; raises TrialEnd when one of them is a divergence."""
        steps = torch.stack(self._unseen).tolist() if self._unseen else []
        self._unseen.clear()
        for loss, norm in steps:
            self._losses.append(loss)
            tokens = len(self._losses) * self._batch_tokens
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the training loss is {loss}"
                raise TrialEnd(Status.DIVERGED, f"{what} at {tokens} tokens; {ADVICE}", first_nonfinite=tokens)
            start = self._losses[0]
            limit = start + max(RISE_NATS, RISE_SHARE * start)
            self._over = self._over + 1 if loss > limit else 0
            if self._over >= SUSTAINED:
                raise TrialEnd(
                    Status.DIVERGED,
                    f"the training loss stayed above {limit:.3f} for {SUSTAINED} steps, up to {tokens} tokens; "
                    f"it began at {start:.3f}; {ADVICE}",
                )

    def losses(self) -> list[float]:
        """Training loss of every step so far."""
        self.check()
        return list(self._losses)

    def plain(self) -> dict[str, int]:
        """What else a later attempt must know, as JSON data."""
        return {"read_up_to": self._read_up_to, "over": self._over}

    def restore(self, losses: list[float], plain: Mapping[str, int]) -> None:
        """Go on from what `losses` and `plain` said."""
        self._losses = losses
        self._read_up_to, self._over = plain["read_up_to"], plain["over"]

    def first_loss(self) -> float:
        """Training loss of the untrained model."""
        self.check()
        return self._losses[0]

    def mean_since_reading(self) -> float:
        """Mean training loss of the steps since this was last asked."""
        fresh = self._losses[self._read_up_to :]
        self._read_up_to = len(self._losses)
        return sum(fresh) / len(fresh)


def is_out_of_memory(error: Exception) -> bool:
    """True where an error says that a device or this machine has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_OUT_OF_MEMORY)
