"""One process of a long training: the launcher tells it its place among the others, one job file tells it the rest.

`python -m runners.long_worker JOB` trains; with a number of processes after it, it launches so many through torch's
launcher. The first process appends what happens to a file of events; each writes its end to a file of its own. They
meet through a file and talk over the loopback interface, so that no other machine can reach them.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runners.worker import die_with, encode
from search_space.records import Reading, TrialResult, spec_from_plain, to_plain

EVENTS, STOP, EXITS, WEIGHTS, CHECKPOINT = "events.jsonl", "stop", "exits.json", "model.safetensors", "checkpoint"
"""Names in the folder of a training."""
_NEWS_SECONDS = 0.5


def end_file(folder: Path, rank: int) -> Path:
    """Where a process writes how it ended."""
    return folder / f"end-{rank}.json"


def launch(job_file: str, processes: int) -> int:
    """Run so many processes on this machine; when one fails the others are ended and the exit codes written down."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    job = json.loads(Path(job_file).read_text())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=job["meeting"],
        rdzv_backend="c10d",
        rdzv_endpoint=str(Path(job["folder"]) / f"launch-{job['meeting']}"),
        rdzv_configs={"store_type": "file"},
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "runners.long_worker", job_file)
    except ChildFailedError as failed:
        exits = {str(rank): failure.exitcode for rank, failure in failed.failures.items()}
        (Path(job["folder"]) / EXITS).write_text(json.dumps(exits))
        return 1
    return 0


def train(job_file: str) -> None:
    """Train, as one of the processes."""
    from runners.checkpoints import Checkpointing
    from runners.group import Group
    from runners.tasks.data import TaskData
    from runners.train import run_trial

    job = json.loads(Path(job_file).read_text())
    sys.path.extend(path for path in job["path"] if path not in sys.path)
    folder, spec = Path(job["folder"]), spec_from_plain(job["spec"])
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        _meet(folder / f"meeting-{job['meeting']}", rank, size, spec.device)
    group = Group(
        rank=rank,
        size=size,
        strategy=job["strategy"],
        seeds_parts=True,
        wants_end=_News(folder).wants_end if rank == 0 else never,
    )
    result = run_trial(
        spec,
        TaskData.load(Path(job["data"])),
        _report(folder) if group.leads else lambda reading: True,
        weights=folder / WEIGHTS,
        checkpoint=Checkpointing(folder=folder / CHECKPOINT, every_tokens=job["checkpoint_tokens"]),
        group=group,
    )
    _write_end(folder, rank, result)
    if result.last_lines:
        # Others may wait for this process in vain: it leaves without them, and the launcher ends them.
        os._exit(1)
    if size > 1:
        _leave()


def never(tokens: int) -> bool:
    """What processes but the first answer when asked whether to end."""
    return False


class _News:
    """Tells of tokens and listens for the wish to end, at the pace of the training."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0

    def wants_end(self, tokens: int) -> bool:
        """True when the driver has asked for an end."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _NEWS_SECONDS
            _tell(self._folder, {"tokens": tokens})
        return (self._folder / STOP).exists()


def _report(folder: Path) -> Callable[[Reading], bool]:
    def report(reading: Reading) -> bool:
        _tell(folder, {"reading": to_plain(reading)})
        return True

    return report


def _tell(folder: Path, event: dict[str, Any]) -> None:
    with (folder / EVENTS).open("ab") as file:
        file.write(encode(event))


def _write_end(folder: Path, rank: int, result: TrialResult) -> None:
    partial = folder / f"end-{rank}.partial"
    partial.write_text(json.dumps({"at": time.time(), "result": to_plain(result)}))
    partial.replace(end_file(folder, rank))


def _meet(meeting: Path, rank: int, size: int, device: str) -> None:
    import torch

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device == "cuda" else "gloo"
    # A path, not an address: torch does not decode the %20 of a space.
    store = torch.distributed.FileStore(str(meeting), size)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)


def _leave() -> None:
    """End this process once all have written their ends, without the clean-up of threads that may still talk."""
    import torch

    torch.distributed.barrier()
    os._exit(0)


def main(job_file: str, processes: int = 0) -> int:
    """Launch so many processes, or be one; the driver's death ends all."""
    die_with(os.getppid())
    if processes:
        return launch(job_file, processes)
    # The driver and the launcher end this process; a Ctrl-C meant for the driver does not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    train(job_file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(*sys.argv[2:])))
