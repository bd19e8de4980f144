"""What a source is told of trials on actors, at an interrupt and when what places them breaks down."""

import dataclasses
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from given import GivenSource
from studied import SHAPE, curve, experiment

from runners.candidate import make_spec, resolve
from runners.engine import Interrupts, Job
from runners.ray_talk import AbstractActors, Lost, Talk
from search_space.records import Seeds, Status, TrialSpec
from search_space.space import default_point

GONE = Lost(status=Status.OUT_OF_MEMORY, reason="made up", last_words="")


@pytest.fixture(scope="module")
def spec() -> TrialSpec:
    asked = experiment()
    resolved = resolve(default_point(asked.space), asked, SHAPE)
    return make_spec(resolved, asked, fingerprint="made up", seeds=Seeds(init=1, data=2, dropout=3))


class Named(AbstractActors):
    """Actors are their own names; those in `dead` no longer work."""

    def __init__(self, *dead: str) -> None:
        self.dead = dead
        self.looks: list[list[str]] = []
        self.killed: list[str] = []

    def prune(self, actor: Any) -> None:
        """Every trial goes on."""

    def weights(self, actor: Any) -> bytes | None:
        assert actor is not None
        return b"weights"

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def why_lost(self, actor: Any) -> Lost:
        self.looks.append([actor])
        return GONE

    def end_all(self, actors: Sequence[Any]) -> list[Lost | None]:
        self.looks.append(list(actors))
        return [GONE if actor in self.dead else None for actor in actors]


def begun(source: GivenSource, interrupts: Interrupts, actors: Named, *, started: bool = True) -> Talk:
    """A talk about all of a source's trials; the actor of trial "0" is "actor 0"."""
    talk = Talk(source, interrupts, actors)
    for key in range(len(source.waiting)):
        assert talk.suggest(f"{key}")
        if started:
            talk.started(f"{key}", f"actor {key}")
    return talk


@pytest.mark.parametrize("started", [True, False])
def test_an_interrupt_that_ends_every_actor_is_no_failure_of_theirs(spec: TrialSpec, started: bool) -> None:
    source, actors = GivenSource([Job(key=key, spec=spec) for key in range(4)]), Named("actor 0", "actor 1")
    with Interrupts() as interrupts:
        talk = begun(source, interrupts, actors, started=started)
        os.kill(os.getpid(), signal.SIGINT)
        talk.failed("0", "KeyboardInterrupt")
        assert talk.over()
        for key in (1, 2, 3):
            talk.failed(f"{key}", "the actor died")
    assert talk.cut
    assert talk.error is None
    assert source.running.keys() == {0, 1, 2, 3}, "they stay to be run again"
    assert actors.looks == []
    assert actors.killed == (["actor 1", "actor 2", "actor 3"] if started else [])


def test_a_last_word_that_comes_after_the_end_is_not_asked_for_weights(spec: TrialSpec, tmp_path: Path) -> None:
    source = GivenSource([Job(key=0, spec=spec, weights=tmp_path / "weights")], on_tick=lambda: False)
    with Interrupts() as interrupts:
        talk = begun(source, interrupts, Named())
        assert talk.over()
        talk.ended("0", json.dumps({"result": {"status": "ok"}}))
    assert talk.error is None
    assert source.running.keys() == {0}


def test_actors_that_never_start_end_the_search(spec: TrialSpec) -> None:
    source = GivenSource([Job(key=key, spec=spec) for key in range(3)])
    with Interrupts() as interrupts:
        talk = begun(source, interrupts, Named(), started=False)
        for key in range(3):
            talk.failed(f"{key}", "no module named torch")
    assert "no module named torch" in str(talk.error)


def test_a_breakdown_asks_all_actors_at_once_and_costs_the_sound_ones_no_failure(spec: TrialSpec) -> None:
    source, actors = GivenSource([Job(key=key, spec=spec) for key in range(4)]), Named("actor 1")
    with Interrupts() as interrupts:
        talk = begun(source, interrupts, actors)
        talk.heard("2", json.dumps({"reading": dataclasses.asdict(curve(2.0)[0])}))
        talk.settle_all("placing broke down")
    assert actors.looks == [["actor 0", "actor 1", "actor 2", "actor 3"]]
    assert source.results[1].status is Status.OUT_OF_MEMORY
    assert {key: result.status for key, result in source.preempted.items()} == dict.fromkeys((0, 2, 3), "preempted")
    assert source.preempted[2].reason == "stopped in mid-trial: placing broke down"
    assert source.preempted[2].tokens == 256
    assert talk.idle
