"""Drives given jobs on a Ray cluster: `python ray_drive.py ADDRESS DATA FOLDER < SPEC`, four trials, two at a time.

Prints `both` when two trials have given readings, and at the end one JSON line.
"""

import json
import sys
from pathlib import Path

from given import GivenSource

from runners.engine import Interrupts, Job
from runners.engines import hush_ray
from search_space.records import spec_from_plain


def main(address: str, data: Path, folder: Path) -> None:
    """Run them all."""
    hush_ray()
    from runners.ray_engine import RayEngine

    spec = spec_from_plain(json.loads(sys.stdin.readline()))
    source = GivenSource([Job(key=key, spec=spec, weights=folder / f"{key}") for key in range(4)])

    def tell() -> bool:
        if sum(bool(source.readings[key]) for key in source.running) == 2:
            print("both", flush=True)
            source.on_tick = lambda: True
        return True

    source.on_tick = tell
    with (
        Interrupts() as interrupts,
        RayEngine(jobs=2, data=data, folder=folder, address=address, blocks=spec.blocks) as engine,
    ):
        whole = engine.drive(source, interrupts)
    told = {
        "whole": whole,
        "peak": source.peak,
        "preempted": {key: (result.tokens, result.reason) for key, result in source.preempted.items()},
        "results": {key: result.status for key, result in source.results.items()},
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
