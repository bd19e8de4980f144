"""Which engine runs an experiment's trials."""

import dataclasses
import importlib.util
import os
import socket
from pathlib import Path

from runners.engine import AbstractEngine
from runners.trials import TRAINED
from search_space.errors import UserError
from search_space.experiment import Experiment

QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000000",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}
"""What keeps Ray from telemetry, boxes, log lines of others, signal handlers and snapshots."""

_ANSWER_SECONDS = 10.0


def hush_ray() -> None:
    """Set what keeps Ray quiet, before it is imported; what the user has set stays."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def with_jobs(experiment: Experiment, jobs: int) -> Experiment:
    """The experiment with so many trials at a time; as it is for 0."""
    return (
        dataclasses.replace(experiment, engine=dataclasses.replace(experiment.engine, jobs=jobs))
        if jobs
        else experiment
    )


def open_engine(
    experiment: Experiment, *, address: str, data: Path, folder: Path, trials: str = TRAINED
) -> AbstractEngine:
    """The experiment's engine, to be entered; `address` names a Ray cluster.

    `trials` names what runs a trial, as runners.trials takes it.
    """
    asked = experiment.engine
    if asked.kind == "ray":
        if address.startswith("ray://"):
            raise UserError(
                f"--address {address}: a search drives its trials from a machine of the cluster; run it there with "
                f"--address auto, or name the head's own HOST:6379"
            )
        _check_answers(address)
        if importlib.util.find_spec("ray") is None:
            raise UserError("engine.kind='ray' needs the package ray: pip install 'assay-search[ray]'")
        hush_ray()
        from runners.ray_engine import RayEngine

        return RayEngine(
            jobs=asked.jobs,
            data=data,
            folder=folder,
            threads=asked.threads,
            cpus=asked.cpus,
            gpus=asked.gpus,
            address=address,
            blocks=experiment.blocks,
            trials=trials,
        )
    if address:
        raise UserError(f"--address {address} names a Ray cluster, and engine.kind is {asked.kind!r}; add --engine ray")
    from runners.local_engine import LocalEngine

    workers = folder / "workers"
    return LocalEngine(jobs=asked.jobs, data=data, folder=workers, threads=asked.threads, trials=trials)


def _check_answers(address: str) -> None:
    """UserError unless somebody listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--address {address}: nothing answers there ({error}); start a cluster with 'ray start --head', which "
            f"prints its address"
        ) from error
