"""Runs trials through Ray Tune, on this machine or on a cluster; the only file that imports Ray.

Ray places trials and moves their words. What is tried next and what is pruned is the source's to say, through Tune's
searcher and scheduler, and nothing that Ray stores is ever read: its folder is temporary. One dependency, one file,
which is therefore longer than others.
"""

import json
import logging
import math
import os
import shlex
import shutil
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.callback import Callback
from ray.tune.error import TuneError
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import NoopStopper, Stopper

from runners.bench import Bench, Setting, job_from_text
from runners.engine import AbstractEngine, AbstractSource, EngineError, Interrupts, kept_signals
from runners.engines import QUIET, hush_ray
from runners.local_engine import THREAD_VARIABLES
from runners.ray_talk import AbstractActors, Lost, Talk
from runners.shipping import pack_code
from runners.trials import TRAINED
from search_space.errors import UserError
from search_space.records import Status

_STORE_BYTES = 2**27
"""Ray's object store on this machine: readings and results only."""
_ANSWER_SECONDS = 30.0
_SETTLE_SECONDS = 5.0
"""How long all actors may take to answer when Tune broke down: a dead one is known by then, others are busy."""
_LONGEST_PLACE = 40
"""Ray puts sockets below its folder, and their paths may have 107 characters."""


class RayEngine(AbstractEngine):
    """Up to `jobs` trials at a time on actors that are reused, each with a worker that has torch imported."""

    def __init__(
        self,
        *,
        jobs: int,
        data: Path,
        folder: Path,
        threads: int = 1,
        cpus: float = 1.0,
        gpus: float = 0.0,
        address: str = "",
        blocks: tuple[str, ...] = (),
        trials: str = TRAINED,
    ) -> None:
        """`folder` is the search's own, where machines that see it find data and leave weights; no `address`: here."""
        hush_ray()
        self.jobs = jobs
        self._needs = {"CPU": cpus, "GPU": gpus}
        self._remote = bool(address)
        self._place = Path(tempfile.mkdtemp(prefix="assay-ray-"))
        self._mark = folder.absolute() / f"driver-{uuid.uuid4().hex}"
        self._mark.touch()
        path = () if address else tuple(os.path.abspath(entry) for entry in sys.path)
        place = folder.absolute()
        setting = Setting(
            folder=place, mark=self._mark.name, data=data.absolute(), threads=threads, path=path, trials=trials
        )
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._connect(address, threads, blocks)
            self._check_resources(address)
            undo.pop_all()
        content = [ray.put(data.read_bytes())] if self._remote else []
        self._seat = tune.with_parameters(_Seat, setting=setting, content=content)

    def drive(self, source: AbstractSource, interrupts: Interrupts) -> bool:
        talk = Talk(source, interrupts, _Actors(remote=self._remote))
        while True:
            crash = self._run(talk)
            if talk.error is not None:
                raise talk.error
            if talk.cut or crash is None:
                return not talk.cut
            # Tune breaks down where Ray kills an actor for want of memory; the trial is told so, and Tune begins anew.
            if not isinstance(crash.__cause__, ray.exceptions.OutOfMemoryError):
                raise EngineError(f"Ray Tune broke down: {crash}") from crash
            talk.settle_all("Ray ended another worker for want of memory")

    def stop(self) -> None:
        self._mark.unlink(missing_ok=True)
        with kept_signals():
            ray.shutdown()
        shutil.rmtree(self._place, ignore_errors=True)

    def _connect(self, address: str, threads: int, blocks: tuple[str, ...]) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        with kept_signals():
            if not address:
                cores = max(os.cpu_count() or 1, math.ceil(self.jobs * self._needs["CPU"]))
                if len(str(self._place)) <= _LONGEST_PLACE:
                    quiet["_temp_dir"] = str(self._place / "ray")
                if any(letter.isspace() for letter in sys.executable):
                    # Ray starts workers by a line of bash in which it leaves the interpreter unquoted.
                    quiet["runtime_env"] = {"py_executable": shlex.quote(sys.executable)}
                ray.init("local", num_cpus=cores, include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
                return
            variables = {**dict.fromkeys(THREAD_VARIABLES, str(threads)), **QUIET}
            code = pack_code(self._place / "code", blocks)
            try:
                ray.init(address, runtime_env={"working_dir": str(code), "env_vars": variables}, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UserError(
                    f"--address {address}: no Ray cluster could be joined there ({error}); start one with "
                    f"'ray start --head' and run the same Ray and Python on all its machines"
                ) from error

    def _check_resources(self, address: str) -> None:
        """Trials that no machine can hold would wait for ever; a cluster may still grow."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if any(all(node.get(name, 0.0) >= need for name, need in self._needs.items()) for node in nodes):
            return
        asked = ", ".join(f"{need:g} {name}" for name, need in self._needs.items())
        if not address:
            raise UserError(
                f"engine.resources: a trial asks for {asked}, and this machine has "
                f"{nodes[0].get('GPU', 0.0):g} GPU; ask for less, or name a cluster with --address"
            )
        print(f"no machine of the cluster has {asked}, yet; trials wait for one", file=sys.stderr)

    def _run(self, talk: Talk) -> Exception | None:
        """One run of Ray Tune; what it broke down with, if it did."""
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        try:
            with kept_signals():
                tune.run(
                    self._seat,
                    search_alg=_Asks(talk),
                    scheduler=_Decides(talk),
                    callbacks=[_Hears(talk)],
                    stop=_Stops(talk),
                    num_samples=-1,
                    max_concurrent_trials=self.jobs,
                    resources_per_trial=tune.PlacementGroupFactory([self._needs]),
                    reuse_actors=True,
                    storage_path=str(self._place / "tune"),
                    trial_dirname_creator=lambda trial: trial.trial_id,
                    raise_on_failed_trial=False,
                    verbose=0,
                )
        except (TuneError, RuntimeError) as error:
            return error
        return None


class _Actors(AbstractActors):
    """Ray's actors."""

    def __init__(self, *, remote: bool) -> None:
        self._remote = remote

    def prune(self, actor: Any) -> None:
        actor.prune.remote()

    def weights(self, actor: Any) -> bytes | None:
        return ray.get(actor.weights.remote()) if self._remote else None

    def kill(self, actor: Any) -> None:
        ray.kill(actor)

    def why_lost(self, actor: Any) -> Lost:
        silent = Lost(
            status=Status.PREEMPTED,
            reason=f"the worker's machine has not answered for {_ANSWER_SECONDS:g} s",
            last_words="",
        )
        raised = Lost(status=Status.FAILED, reason="the worker raised", last_words="")
        answer = actor.alive.remote()
        ready, _ = ray.wait([answer], timeout=_ANSWER_SECONDS)
        lost = (_judged(answer) or raised) if ready else silent
        ray.kill(actor)
        return lost

    def end_all(self, actors: Sequence[Any]) -> list[Lost | None]:
        answers = [actor.alive.remote() for actor in actors]
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=_SETTLE_SECONDS)
        found = [_judged(answer) if answer in ready else None for answer in answers]
        for actor in actors:
            ray.kill(actor)
        return found


def _judged(answer: Any) -> Lost | None:
    """What an actor's answer says of it; None for one that works."""
    try:
        ray.get(answer)
    except ray.exceptions.OutOfMemoryError as error:
        reason = "Ray ended the worker: its machine was running out of memory"
        return Lost(status=Status.OUT_OF_MEMORY, reason=reason, last_words=str(error))
    except ray.exceptions.RayActorError as error:
        last = str(error).rstrip().rpartition("\n")[2]
        return Lost(status=Status.PREEMPTED, reason=f"the worker was taken away: {last}", last_words=str(error))
    return None


class _Asks(Searcher):
    """Tune asks what to try next."""

    def __init__(self, talk: Talk) -> None:
        super().__init__()
        self._talk = talk

    def suggest(self, trial_id: str) -> Any:
        job = self._talk.suggest(trial_id)
        if job is None:
            return Searcher.FINISHED if self._talk.idle else None
        return {"job": job}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """The scheduler has told all."""


class _Decides(FIFOScheduler):
    """Tune tells what trials said and how they ended."""

    def __init__(self, talk: Talk) -> None:
        super().__init__()
        self._talk = talk

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        # A pruned trial goes on, too, to its last word: what it came to until then.
        self._talk.heard(trial.trial_id, result["word"])
        return TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        self._talk.ended(trial.trial_id, result["word"])

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        file = trial.error_file
        self._talk.failed(trial.trial_id, Path(file).read_text() if file else "")

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        """Tune starts what is pending by itself, in order."""


class _Hears(Callback):
    """Tune tells that a trial has got its actor."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._talk.started(trial.trial_id, trial.temporary_state.ray_actor)


class _Stops(Stopper):
    """Tune asks whether to stop it all."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._talk.over()

    def __reduce__(self) -> tuple[type[Stopper], tuple[()]]:
        """Tune stores its stopper; nobody reads it."""
        return NoopStopper, ()


class _Seat(tune.Trainable):
    """The actor: a bench, and the words of its trial one step at a time."""

    def setup(self, config: dict[str, Any], setting: Setting | None = None, content: Sequence[Any] = ()) -> None:
        assert setting is not None, "the engine gives each actor its setting"
        self._bench = Bench(setting, Path(self.logdir).parent, lambda: ray.get(content[0]))
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._waits, self._go_on = False, True
        self._bench.begin(job_from_text(new_config["job"]))
        return True

    def step(self) -> dict[str, Any]:
        if self._waits:
            self._bench.answer(self._go_on)
        try:
            word = self._bench.next()
        except EngineError as error:
            word = {"broken": str(error)}
        self._waits = "reading" in word
        return {"word": json.dumps(word), "done": not self._waits}

    def prune(self) -> None:
        """Answer the reading that was given last with no; what the trial came to follows as its next word."""
        self._go_on = False

    def weights(self) -> bytes | None:
        """What the trial wrote that the driver cannot see."""
        return self._bench.weights()

    def alive(self) -> None:
        """Returns, which only a living actor does."""

    def cleanup(self) -> None:
        self._bench.close()
