"""The fresh process of a replay: one job file in, one result file out. Conditions are imposed by its environment."""

import json
import sys
from pathlib import Path

from runners.group import Group
from runners.tasks import TASKS
from runners.tasks.data import TaskData
from runners.train import run_trial
from search_space.errors import UserError
from search_space.records import TrialSpec, spec_from_plain, to_plain


def main(job_file: str) -> int:
    """Train the job's spec; 2 when the data is not what was recorded."""
    job = json.loads(Path(job_file).read_text())
    spec = spec_from_plain(job["spec"])
    try:
        data = TaskData.load(Path(job["data"])) if job["data"] else _prepared(spec, job["data_path"])
        if data.fingerprint != spec.data_fingerprint:
            raise UserError(
                f"the data has the fingerprint {data.fingerprint}, the run was trained on {spec.data_fingerprint}; "
                "name that data with --data PATH"
            )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    stop_after = job["stop_after"]
    result = run_trial(
        spec,
        data,
        lambda reading: stop_after == 0 or reading.tokens < stop_after,
        weights=Path(job["weights"]) if job["weights"] else None,
        test=job["test"],
        micro_batch_tokens=job["micro_batch_tokens"],
        group=Group(seeds_parts=job["seeds_parts"]),
    )
    Path(job["result"]).write_text(json.dumps(to_plain(result)))
    return 0


def _prepared(spec: TrialSpec, path: str) -> TaskData:
    kind = spec.task["kind"]
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in spec.task[kind].items()}
    return TASKS[kind](**fields).prepare(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
