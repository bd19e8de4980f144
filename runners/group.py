"""The processes that train one model together: which rows each takes, and how their sums become those of one.

Each process takes equal consecutive rows of every batch, with every loss divided by the targets of the whole batch, so
gradients are summed and never averaged. An ordinary trial is trained by one process alone, where nothing here acts.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from blocks.families import RoutedFFN
from blocks.ffn.routing import rebalance
from runners.sharding import laid_like, whole
from runners.tasks.data import IGNORED, Batch
from search_space.canon import seed_from

if TYPE_CHECKING:
    from blocks.model import DecoderLM


def _never(tokens: int) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Group:
    """One process's view of them. Its methods are to be called by all processes, in the same order."""

    rank: int = 0
    size: int = 1
    strategy: str = "ddp"
    """'ddp': every process holds the whole model; 'fsdp': weights, gradients and optimiser state are shared out."""
    seeds_parts: bool = False
    """Whether each micro-batch has a random stream of its own.

    Dropout is then the same on any number of processes whose rows are whole micro-batches.
    """
    wants_end: Callable[[int], bool] = _never
    """Asked every few steps, on the first process, with the tokens trained on; True ends the training there."""

    @property
    def leads(self) -> bool:
        """True on the process that writes and reports."""
        return self.rank == 0

    @property
    def _shards(self) -> bool:
        return self.size > 1 and self.strategy == "fsdp"

    def spread(self, model: "DecoderLM") -> nn.Module:
        """What to call in place of the model while it trains; its parameters may be others than before."""
        if self.size == 1:
            return model
        if self._shards:
            return _shard(model)
        return _replicate(model)

    def rows(self, batch: Batch) -> Batch:
        """This process's rows of a batch."""
        each = len(batch[0]) // self.size
        mine = slice(self.rank * each, (self.rank + 1) * each)
        return batch[0][mine], batch[1][mine]

    def part(self, model: nn.Module, seed: int, step: int, row: int, *, last: bool) -> AbstractContextManager[None]:
        """Around both passes over a micro-batch that begins at a row of the whole batch; the last sums gradients."""
        if self.seeds_parts:
            torch.manual_seed(seed_from("part", seed, step, row))
        if self._shards:
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            return nullcontext()
        return nullcontext() if self.size == 1 or last else model.no_sync()  # type: ignore[operator]

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor, become the sum over all processes."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def total(self, values: tuple[float, ...], device: str) -> tuple[float, ...]:
        """The sums of numbers over all processes."""
        if self.size == 1:
            return values
        return tuple(self.sum(torch.tensor(values, dtype=torch.float64, device=device)).tolist())

    def ends(self, tokens: int, device: str) -> bool:
        """True when the first process is asked to end the training."""
        asked = float(self.leads and self.wants_end(tokens))
        return self.total((asked,), device)[0] > 0

    def clip(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        """The norm of all gradients, which are scaled down where it is over the limit."""
        norm = clip_grad_norm_(parameters, limit, foreach=True)
        return whole(norm) if self._shards else norm

    def rebalance(self, model: nn.Module) -> None:
        """`routing.rebalance` by the tokens of all processes; integer buffers of routed networks are their counts."""
        routed = [module for module in model.modules() if isinstance(module, RoutedFFN)] if self.size > 1 else []
        counts = [each for module in routed for each in module.buffers(recurse=False) if not each.is_floating_point()]
        for count in counts:
            self.sum(count)
        rebalance(model)
        for count in counts:
            # The first process alone goes on with sums, which would else be summed again.
            if not self.leads:
                count.zero_()

    def shared(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """This process's batches of an evaluation; where it has none left, one in which nothing counts."""
        if self.size == 1:
            yield from batches
            return
        row: list[Batch] = []
        for batch in batches:
            row.append(batch)
            if len(row) == self.size:
                yield row[self.rank]
                row = []
        if row:
            inputs, targets = row[min(self.rank, len(row) - 1)]
            yield inputs, targets if self.rank < len(row) else torch.full_like(targets, IGNORED)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as one process would hold them."""
        return {name: whole(tensor) for name, tensor in tensors.items()} if self._shards else dict(tensors)

    def placed(
        self, tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        """The inverse of `whole` for what `checkpoints.State` packs: each tensor lies as its parameter does."""
        if not self._shards:
            return dict(tensors)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        like: dict[str, Tensor] = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
        for name in tensors:
            if name.startswith("optimizer/state/"):
                like[name] = parameters[int(name.split("/")[2])]
        return {
            name: laid_like(tensor, like[name]) if name in like and like[name].shape == tensor.shape else tensor
            for name, tensor in tensors.items()
        }

    def gathered(self, model: "DecoderLM") -> "DecoderLM":
        """The model with whole parameters, to be saved."""
        if not self._shards:
            return model
        entire = self.whole(dict([*model.named_parameters(), *model.named_buffers()]))
        copy = model.config.build(0, "cpu")
        with torch.no_grad():
            for name, tensor in [*copy.named_parameters(), *copy.named_buffers()]:
                tensor.copy_(entire[name])
        return copy


ALONE = Group()


def _replicate(model: "DecoderLM") -> nn.Module:
    """The model with gradients summed over all processes as the backward pass makes them."""
    from torch.nn.parallel import DistributedDataParallel

    # TODO(torch>=2.13 required): the newer name alone.
    names = inspect.signature(DistributedDataParallel).parameters
    buffers: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False
    }
    spread = DistributedDataParallel(model, gradient_as_bucket_view=True, **buffers)
    spread.register_comm_hook(None, _summed)
    return spread


def _summed(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """The sum of a bucket of gradients over all processes; DDP's own would be the mean."""
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[list[Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])


def _shard(model: "DecoderLM") -> nn.Module:
    """The model with each layer's parameters, and those outside of layers, shared out over all processes."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    marks = {name: vars(parameter) for name, parameter in model.named_parameters()}
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for name, parameter in model.named_parameters():
        vars(parameter).update(marks[name])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model
