"""Which engine runs an experiment, and what is refused before anything starts."""

from pathlib import Path

import pytest
from studied import SHAPE, experiment

from runners.candidate import make_spec, resolve
from runners.engines import open_engine, with_jobs
from runners.local_engine import LocalEngine
from search_space.errors import UserError
from search_space.records import Seeds
from search_space.space import default_point


def test_the_file_says_which_engine_and_how_many_jobs_run(tmp_path: Path) -> None:
    asked = with_jobs(experiment("engine.jobs=1"), 3)
    with open_engine(asked, address="", data=tmp_path / "data", folder=tmp_path) as engine:
        assert isinstance(engine, LocalEngine)
        assert engine.jobs == 3


@pytest.mark.parametrize(
    ("kind", "address", "told"),
    [
        ("local", "10.0.0.1:6379", "add --engine ray"),
        ("ray", "127.0.0.1:9", "nothing answers there"),
        ("ray", "ray://10.0.0.1:10001", "run it there with --address auto"),
    ],
)
def test_addresses_that_cannot_work_are_refused(tmp_path: Path, kind: str, address: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        open_engine(experiment(f"engine.kind={kind}"), address=address, data=tmp_path, folder=tmp_path)


@pytest.mark.parametrize(
    ("overrides", "device"), [((), "cpu"), (("engine.device=auto",), "cuda"), (("engine.device=cuda",), "cuda")]
)
def test_trials_that_ask_ray_for_a_gpu_run_on_cuda_wherever_the_driver_is(
    overrides: tuple[str, ...], device: str
) -> None:
    asked = experiment("engine.kind=ray", "engine.resources.gpu=0.5", *overrides)
    resolved = resolve(default_point(asked.space), asked, SHAPE)
    assert make_spec(resolved, asked, fingerprint="", seeds=Seeds(init=0, data=0, dropout=0)).device == device
