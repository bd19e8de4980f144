"""Which engine runs an experiment's trials."""

import importlib.util
from pathlib import Path

from runners.engine import AbstractEngine
from search_space.errors import UserError
from search_space.experiment import Experiment


def open_engine(experiment: Experiment, *, jobs: int, address: str, data: Path, folder: Path) -> AbstractEngine:
    """The experiment's engine, to be entered; `jobs` overrides the experiment's, `address` names a Ray cluster."""
    asked = experiment.engine
    if asked.kind == "ray":
        if importlib.util.find_spec("ray") is None:
            raise UserError("engine.kind='ray' needs the package ray: pip install 'assay-search[ray]'")
        from runners.ray_engine import RayEngine

        return RayEngine(
            jobs=jobs or asked.jobs,
            data=data,
            folder=folder,
            threads=asked.threads,
            cpus=asked.cpus,
            gpus=asked.gpus,
            address=address,
            blocks=experiment.blocks,
        )
    if address:
        raise UserError(f"--address {address} names a Ray cluster, and engine.kind is {asked.kind!r}; add --engine ray")
    from runners.local_engine import LocalEngine

    return LocalEngine(jobs=jobs or asked.jobs, data=data, folder=folder / "workers", threads=asked.threads)
