"""A candidate trained longer: on one or two processes to the same losses, through every kind of end."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mlflow.entities import Run
from processes import HANGS_SECONDS, wait_for
from tracked import (
    Searched,
    experiment_text,
    result,
    searched,
    store_uri,
    task_of,
    train_search,
    write_search,
)

from runners.candidate import full_space
from runners.cli import main
from runners.driver import this_driver
from runners.environment import capture
from runners.export import export
from runners.group import Group
from runners.housekeeping import HousekeepingError, plan_remove
from runners.long_plan import Asked, check_devices, in_whole_batches, longer
from runners.long_processes import ends
from runners.long_worker import CHECKPOINT, end_file
from runners.replay import ReplayError, replay
from runners.stale import close_stale
from runners.store import Store
from runners.tasks import TASKS, task_from_plain
from runners.tasks.data import IGNORED
from runners.tracking import Tracker
from runners.train import run_trial
from search_space.errors import UserError
from search_space.experiment import read
from search_space.places import locate
from search_space.records import Artifact, Metric, Stage, Status, Tag, TrialResult, TrialSpec, to_plain

TOKENS = 102_400
TINY = searched()


def spec_of(number: int = 0) -> TrialSpec:
    return TINY.trial(number)[0]


def test_a_longer_training_keeps_the_number_of_readings_and_changes_nothing_else() -> None:
    spec = spec_of()
    made = longer(spec, Asked(run="tiny/0", tokens=16 * spec.budget.tokens), None)
    assert made.budget.tokens == 16 * spec.budget.tokens
    assert made.budget.eval_every == 16 * spec.budget.eval_every
    assert dataclasses.replace(made, budget=spec.budget) == spec


def test_a_micro_batch_that_had_to_be_halved_stays_halved() -> None:
    spec = spec_of()
    made = longer(
        spec,
        Asked(run="tiny/0", tokens=TOKENS),
        TrialResult(status=Status.OK, metrics={Metric.MICRO_BATCH_TOKENS: 256.0}),
    )
    assert made.budget.micro_batch_tokens == 256


@pytest.mark.parametrize(
    ("given", "rounded"), [(1_000_000_100, 1_000_000_000), (1024, 1024), (1300, 1536), (1, 512), (0, 0)]
)
def test_tokens_are_rounded_to_whole_batches(given: int, rounded: int) -> None:
    asked = in_whole_batches(Asked(run="tiny/0", tokens=given, checkpoint_tokens=given), 512)
    assert (asked.tokens, asked.checkpoint_tokens) == (rounded, rounded)


def test_more_devices_than_there_are_and_uneven_shares_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(UserError, match=f"--devices {cores + 1}: this machine lends {cores} CPU cores; write at most"):
        check_devices(spec_of(), cores + 1)
    budget = dataclasses.replace(spec_of().budget, batch_tokens=32 * (cores * 16 + 1))
    if cores > 1:
        with pytest.raises(UserError, match=r"each takes the same number of the \d+ sequences of a batch; write 1"):
            check_devices(dataclasses.replace(spec_of(), budget=budget), 2)


def test_the_processes_of_a_group_take_every_row_once_and_every_evaluation_batch_once() -> None:
    inputs, targets = TINY.data.batch(0, 16, 0)
    groups = [Group(rank=rank, size=4) for rank in range(4)]
    assert [row for group in groups for row in group.rows((inputs, targets))[0].tolist()] == inputs.tolist()
    batches = [TINY.data.batch(step, 2, 0) for step in range(6)]
    shared = [list(group.shared(batches)) for group in groups]
    assert {len(each) for each in shared} == {2}
    counted = [each[0].tolist() for mine in shared for each in mine if bool((each[1] != IGNORED).any())]
    assert sorted(counted) == sorted(each[0].tolist() for each in batches)


def test_the_first_error_is_told_and_not_what_it_made_of_the_others(tmp_path: Path) -> None:
    fine, broken = result(), result(Status.OUT_OF_MEMORY, reason="no memory", last_lines="no memory")
    lost = result(Status.FAILED, reason="connection closed", last_lines="connection closed")
    for rank, at, found in ((0, 12.0, lost), (1, 11.0, broken), (2, 10.0, fine)):
        end_file(tmp_path, rank).write_text(json.dumps({"at": at, "result": to_plain(found)}))
    assert [rank for rank, _ in ends(tmp_path, 4)] == [1, 0, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny/0", "--tokens", "lots"], "takes a whole number (such as 200, 130k, 2.5M, 1B or 64KiB); got 'lots'"),
        (["tiny/7", "--tokens", "16384"], "trials there: 0 to 0"),
        (["tiny/0", "--tokens", "16384", "--resume"], "no such training has begun; leave --resume out"),
        (
            ["tiny/0", "--tokens", "16000", "--resume"],
            "--tokens 16,000: trains 15,872, which are whole batches",
        ),
    ],
)
def test_bad_input_is_told_with_a_remedy(
    written: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments, "--tracking-uri", written]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = store_uri(tmp_path_factory.mktemp("written"))
    write_search(uri, trials=1)
    return uri


def test_a_run_with_a_driver_of_its_own_is_closed_only_when_that_driver_is_dead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = store_uri(tmp_path)
    write_search(uri, trials=1)
    store = Store(locate(uri))
    run = store.find_run("tiny/0")
    store.client.set_tag(run.info.run_id, Tag.STAGE, str(Stage.TRAIN))
    store.client.update_run(run.info.run_id, status="RUNNING")
    host, pid, start = this_driver().rsplit(":", 2)
    for driver, state in ((f"{host}:{pid}:{start}", "RUNNING"), (f"{host}:{pid}:{start}9", "KILLED")):
        store.client.set_tag(run.info.run_id, Tag.DRIVER, driver)
        if state == "RUNNING":
            with pytest.raises(
                HousekeepingError, match=r"'000 tiny' is being trained \(driver .*stop it with Ctrl-C there"
            ):
                plan_remove("tiny", uri)
        close_stale(store)
        assert store.client.get_run(run.info.run_id).info.status == state
    assert plan_remove("tiny", uri)
    assert main(["retry", "tiny/train/0", "--tracking-uri", uri]) == 2
    assert "assay train with --resume goes on with it" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """A store with one trial, trained longer on one process without a break."""

    uri: str
    folder: Path

    def train(self, *arguments: str) -> int:
        """The exit code of `assay train tiny/0` here."""
        return main(["train", "tiny/0", "--tokens", str(TOKENS), "--tracking-uri", self.uri, *arguments])

    def driver(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """The same as a process of its own."""
        command = [sys.executable, "-m", "runners", "train", "tiny/0", "--tokens", str(TOKENS)]
        return subprocess.Popen([*command, "--tracking-uri", self.uri, *arguments], stderr=subprocess.DEVNULL)

    def run(self, name: str) -> Run:
        """The run of a name, as it is now."""
        store = Store(locate(self.uri))
        (run,) = [run for run in store.children(store.parent("tiny")) if run.info.run_name == name]
        return run

    def curve(self, name: str) -> list[tuple[int, float, float]]:
        """Its readings without their times."""
        found = Store(locate(self.uri)).result(self.run(name))
        return [(reading.tokens, reading.loss, reading.train_loss) for reading in found.curve]

    def weights(self, name: str) -> bytes:
        """The file of its trained model."""
        file = Store(locate(self.uri)).artifact(self.run(name), Artifact.MODEL)
        assert file is not None
        return file.read_bytes()

    def files(self) -> Path | None:
        """The folder of a training that has written a checkpoint; None before."""
        found = list(self.folder.glob(f"mlruns/studies/tiny/train/*/{CHECKPOINT}/checkpoint.json"))
        return found[0].parents[1] if found else None

    def processes(self) -> dict[int, str]:
        """The command lines of this store's trainings, by process, without their drivers."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
                if entry.name.isdecimal() and "long_worker" in line and str(self.folder) in line:
                    found[int(entry.name)] = line
        return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    uri = store_uri(folder)
    train_search(uri, trials=1)
    made = Whole(uri=uri, folder=folder)
    assert made.train("--name", "whole") == 0
    return made


def close_to(curve: list[tuple[int, float, float]], other: list[tuple[int, float, float]]) -> bool:
    """True when every loss of two curves is the same to 1e-5."""
    assert [tokens for tokens, *_ in curve] == [tokens for tokens, *_ in other]
    return all(abs(a - b) < 1e-5 for one, two in zip(curve, other, strict=True) for a, b in zip(one, two, strict=True))


@pytest.fixture(scope="module", params=["adamw"])
def routed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A store with one trial of a model with experts whose load moves their biases, and with dropout; not trained."""
    folder = tmp_path_factory.mktemp("a folder with spaces")
    uri = store_uri(folder)
    text = experiment_text().replace("ffn: gelu", "ffn: moe_bias\n  residual_dropout: 0.2")
    text = text.replace("batch_tokens: 512,", "batch_tokens: 512, micro_batch_tokens: 128,")
    text = text.replace("adamw", request.param)
    experiment = read(text, full_space=full_space, tasks=TASKS)
    search = Searched(experiment=experiment, data=task_of(experiment).prepare(), environment=capture(()))
    tracker = Tracker(uri)
    search.start(tracker)
    tracker.finish_trial(search.start_trial(tracker, 0), result())
    tracker.finish_search("FINISHED")
    return Whole(uri=uri, folder=folder)


def on_one(made: Whole, tokens: int) -> list[tuple[int, float, float]]:
    """The readings of the same training in this process."""
    store = Store(locate(made.uri))
    spec = longer(store.spec(store.find_run("tiny/0")), Asked(run="tiny/0", tokens=tokens), None)
    data = task_from_plain(spec.task).prepare()
    found = run_trial(spec, data, lambda reading: True, group=Group(seeds_parts=True))
    return [(reading.tokens, reading.loss, reading.train_loss) for reading in found.curve]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routed", "strategy"), [("adamw", "ddp"), ("adamw", "fsdp"), ("muon", "fsdp")], indirect=["routed"]
)
def test_two_processes_train_to_the_losses_of_one(strategy: str, routed: Whole, tmp_path: Path) -> None:
    asked = ("--name", strategy, "--tokens", "10240", "--devices", "2", "--strategy", strategy)
    assert routed.train(*asked) == 0
    one = on_one(routed, 10240)
    assert len(one) == 5
    assert one[-1][1] < one[0][1] - 0.05
    assert close_to(routed.curve(strategy), one)
    run = routed.run(strategy)
    assert (run.info.status, run.data.tags[Tag.STATUS], run.data.tags[Tag.STAGE]) == ("FINISHED", "ok", "train")
    folder = export(run.info.run_id, str(tmp_path / "model"), routed.uri)
    assert (folder / Artifact.MODEL).read_bytes()
    assert routed.files() is None
    with pytest.raises(ReplayError, match=f"was trained on several devices \\(2 {strategy}\\)"):
        replay(run.info.run_id, routed.uri)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_cuda_devices_train_to_the_losses_of_one(strategy: str, routed: Whole) -> None:
    asked = ("--device", "cuda", "--tokens", "10240", "--strategy", strategy)
    assert routed.train(*asked, "--name", f"{strategy} 1") == 0
    assert routed.train(*asked, "--name", f"{strategy} 2", "--devices", "2") == 0
    assert close_to(routed.curve(f"{strategy} 2"), routed.curve(f"{strategy} 1"))


@pytest.mark.slow
def test_a_long_training_is_a_run_of_its_search_that_can_be_shown_and_replayed(
    whole: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = whole.run("whole"), Store(locate(whole.uri))
    assert run.data.tags[Tag.TRAINED_FROM] == store.find_run("tiny/0").info.run_id
    assert run.data.params == store.find_run("tiny/0").data.params
    assert main(["show", "tiny/train/0", "--json", "--tracking-uri", whole.uri]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"], shown["status"], shown["metrics"]["tokens"]) == ("tiny/train/0", "ok", TOKENS)
    history = store.client.get_metric_history(run.info.run_id, Metric.VALIDATION_CURVE)
    assert sorted((point.step, point.value) for point in history) == [
        (tokens, loss) for tokens, loss, _ in whole.curve("whole")
    ]
    report = replay("tiny/train/0", whole.uri)
    assert report.good, report.text()
    assert store.find_run("tiny/best").data.tags[Tag.STAGE] == Stage.SEARCH


@pytest.mark.fault
def test_a_training_whose_driver_is_killed_goes_on_to_the_bits_of_an_unbroken_one(whole: Whole) -> None:
    driver = whole.driver("--name", "killed")
    wait_for("a checkpoint", whole.files)
    driver.kill()
    driver.wait()
    wait_for("the end of the processes", lambda: not whole.processes())
    assert whole.run("killed").info.status == "RUNNING"
    close_stale(Store(locate(whole.uri)))
    assert (whole.run("killed").info.status, whole.run("killed").data.tags[Tag.STATUS]) == ("KILLED", "preempted")
    before = whole.run("killed").info.run_id
    assert whole.train("--name", "killed") == 2
    assert whole.train("--name", "killed", "--resume") == 0
    assert whole.run("killed").info.run_id == before
    assert whole.curve("killed") == whole.curve("whole")
    assert whole.weights("killed") == whole.weights("whole")


@pytest.mark.fault
def test_a_training_that_is_asked_to_end_keeps_its_state_and_goes_on_on_two_processes(whole: Whole) -> None:
    driver = whole.driver("--name", "ended")
    wait_for("a checkpoint", whole.files)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(HANGS_SECONDS) == 1
    run = whole.run("ended")
    assert (run.info.status, run.data.tags[Tag.STATUS]) == ("KILLED", "preempted")
    assert "by SIGTERM; the same command with --resume goes on" in run.data.tags[Tag.REASON]
    assert whole.train("--name", "ended", "--resume", "--devices", "2", "--strategy", "fsdp") == 0
    assert close_to(whole.curve("ended"), whole.curve("whole"))
    assert whole.train("--name", "ended", "--resume") == 2


BREAKS = """
import os, signal
if os.environ.get("RANK", "0") == {rank!r} and not os.path.exists({file!r}):
    import torch
    def step(self, closure=None):
        open({file!r}, "w").close()
        {how}
    torch.optim.AdamW.step = step
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("devices", "how", "state", "status", "reason"),
    [
        (1, "raise RuntimeError('broken on purpose')", "FAILED", "failed", "RuntimeError: broken on purpose"),
        (2, "os.kill(os.getpid(), signal.SIGKILL)", "KILLED", "preempted", "was ended by SIGKILL (device 1); the same"),
    ],
)
def test_how_a_process_ended_is_told_and_none_is_left(
    devices: int,
    how: str,
    state: str,
    status: str,
    reason: str,
    whole: Whole,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The breakage is put into the last process by the start-up file of its interpreter."""
    text = BREAKS.format(rank=str(devices - 1), file=str(tmp_path / "broken"), how=how)
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert whole.train("--name", f"broken {devices}", "--devices", str(devices)) == 1
    assert (tmp_path / "broken").exists()
    run = whole.run(f"broken {devices}")
    assert (run.info.status, run.data.tags[Tag.STATUS]) == (state, status)
    assert reason in run.data.tags[Tag.REASON]
    assert not whole.processes()
