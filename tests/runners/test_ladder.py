"""A ladder: what it trains by its rules, through a kill, to a page that tells its verdicts."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mlflow.entities import Run
from processes import wait_for
from tracked import searched, store_uri, write_search

from runners.cli import main
from runners.housekeeping import plan_remove
from runners.ladder import ladder_name
from runners.ladder_members import Member, members
from runners.ladder_plan import (
    Asked,
    Part,
    at_size,
    budget_at,
    heads_at,
    keeps_rate,
    layers_at,
    parts,
    rules,
    seeds_at,
    tuned,
)
from runners.store import Store
from search_space.canon import digest
from search_space.errors import UserError
from search_space.places import locate
from search_space.records import Metric, Stage, Status, Tag, to_plain

TINY = searched()
SHAPE = TINY.data.shape
SIZES = (6_000, 12_000, 24_000)


def asked(**changes: object) -> Asked:
    plain: dict[str, object] = {"runs": ("tiny/0", "tiny/1"), "sizes": SIZES, "target": 10**6, "seeds": 2}
    return Asked(**{**plain, **changes})  # type: ignore[arg-type]


def member(number: int = 0, **changes: object) -> Member:
    """A trial of the tiny search as a ladder takes it, some paths changed."""
    spec, resolved = TINY.trial(number)
    point = {path: value for path, value in resolved.flat.items() if path != "model.d_model"}
    return Member(
        label=f"side{number}",
        run=f"tiny/{number}",
        run_id=str(number),
        experiment=TINY.experiment,
        spec=spec,
        point={**point, **changes},  # type: ignore[dict-item]
        params=resolved.cost.params,
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_rung_has_its_parameters_and_differs_from_the_run_by_size_alone(size: int) -> None:
    source = member()
    resolved = at_size(source, size, asked(), SHAPE)
    assert resolved.cost.params == pytest.approx(size, rel=0.01)
    changed = {path for path, value in resolved.flat.items() if source.point.get(path) != value}
    assert changed <= {"optimizer.adamw.learning_rate", *(path for path in source.point if path.endswith("heads"))}


def test_heads_grow_in_multiples_and_shrink_to_divisors() -> None:
    assert [heads_at(4, ratio) for ratio in (1.0, 1.4, 2.6, 5.9)] == [4, 4, 12, 24]
    assert [heads_at(6, ratio) for ratio in (0.9, 0.5, 0.3, 0.01)] == [6, 3, 2, 1]
    wide = at_size(member(), 200_000, asked(), SHAPE)
    assert wide.candidate.model.d_model >= 3 * 32
    assert wide.candidate.model.mixer.kv_heads == round(wide.candidate.model.d_model / 32)


def test_depth_is_the_runs_own_or_goes_with_the_cube_root_of_the_size() -> None:
    source = dataclasses.replace(member(), params=1000.0)
    source = dataclasses.replace(source, point={**source.point, "model.layers": 4})
    assert layers_at(source, 64_000, "given") == 4
    assert [layers_at(source, size, "scaled") for size in (1, 1000, 8000, 64_000)] == [1, 4, 8, 16]


def test_a_rate_stays_under_mup_and_goes_with_one_over_the_width_elsewhere() -> None:
    rate = "optimizer.adamw.learning_rate"
    plain, mup = (
        member(**{"model.init.kind": "xavier"}),
        member(**{"model.init.kind": "mup", "model.init.mup.base_width": 32}),
    )
    for size in SIZES:
        stays, moves = at_size(mup, size, asked(), SHAPE), at_size(plain, size, asked(), SHAPE)
        assert stays.flat[rate] == mup.point[rate]
        width = moves.candidate.model.d_model
        assert moves.flat[rate] == pytest.approx(float(plain.point[rate]) * 32 / width)  # type: ignore[arg-type]
        assert moves.candidate.optimizer.learning_rate == moves.flat[rate]
        assert keeps_rate(stays.candidate.model)
        assert not keeps_rate(moves.candidate.model)
    assert at_size(mup, SIZES[0], asked(), SHAPE, place=1).flat[rate] == 2 * float(mup.point[rate])  # type: ignore[arg-type]


def test_budgets_are_whole_batches_in_proportion_to_parameters() -> None:
    base = TINY.experiment.budget
    budget = budget_at(base, 24_000, asked(tokens_per_param=2.0), SHAPE.train_len)
    assert budget.tokens == 94 * 512
    assert budget.eval_every % budget.batch_tokens == 0
    assert math.ceil(budget.tokens / budget.eval_every) in (8, 9)
    wider = budget_at(base, 24_000, asked(tokens_per_param=2.0, batch_tokens=1024), SHAPE.train_len)
    assert (wider.batch_tokens, wider.tokens) == (1024, 47 * 1024)


def test_candidates_share_seeds_at_one_size_and_replica_and_nowhere_else() -> None:
    first, second = (Part(label=label, rung=6000, replica=0, place=0) for label in ("one", "other"))
    assert seeds_at(TINY.experiment, first) == seeds_at(TINY.experiment, second)
    others = [dataclasses.replace(first, rung=12_000), dataclasses.replace(first, replica=1)]
    others += [dataclasses.replace(first, replica=-1)]
    found = {seeds_at(TINY.experiment, part) for part in (first, *others)}
    assert len(found) == 4


def test_the_sweep_comes_first_and_then_size_by_size() -> None:
    planned = parts(["one", "other"], asked(sweep=3))
    assert [part.place for part in planned[:6]] == [-1, -1, 0, 0, 1, 1]
    assert {part.rung for part in planned[:6]} == {SIZES[0]}
    assert [part.rung for part in planned[6:]] == sorted(part.rung for part in planned[6:])
    assert len(planned) == 6 + 3 * 2 * 2
    assert not any(part.is_swept for part in parts(["one", "other"], asked(sweep=0)))


def test_the_best_rate_is_taken_and_one_at_an_edge_is_said_to_be_untuned() -> None:
    assert tuned({-1: 2.0, 0: 1.0, 1: 1.5}, 3) == (0, "")
    assert tuned({-1: 1.0, 0: 1.0, 1: 1.5}, 3) == (0, "")
    assert tuned({-1: 2.0, 0: 1.0, 1: 0.5}, 3) == (1, "its best learning rate lies at an edge of the sweep (x 2)")
    place, why = tuned({-1: math.inf, 0: math.inf, 1: math.inf}, 3)
    assert (place, why) == (0, "no learning rate of the sweep ended well; it kept the transferred one")
    assert tuned({}, 0) == (0, "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runs": ("tiny/0",)}, "takes two or more different runs"),
        ({"runs": ("tiny/0", "tiny/0")}, "takes two or more different runs"),
        ({"sizes": (1000, 2000)}, "at least three growing sizes"),
        ({"sizes": (2000, 1000, 3000)}, "at least three growing sizes"),
        ({"target": 24_000}, "must lie beyond the largest"),
        ({"seeds": 1}, "write at least 2"),
        ({"sure": 0.5}, "above 0.5 and below 1"),
        ({"tokens_per_param": 0.0}, "takes a number above 0"),
    ],
)
def test_what_could_not_be_judged_is_refused_before_anything_trains(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        asked(**changes)


def test_a_ladder_is_named_after_the_search_of_its_first_run() -> None:
    assert ladder_name(asked()) == "tiny-ladder"
    assert ladder_name(asked(name="other")) == "other"
    with pytest.raises(UserError, match="give --name NEW"):
        ladder_name(asked(runs=("abcdef12", "tiny/1")))


@pytest.mark.slow
def test_members_are_read_from_the_store_to_the_very_same_candidates(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    write_search(uri, 3)
    store = Store(locate(uri))
    found = members(store, ("tiny/0", "tiny/1", "tiny/2"))
    for number, one in enumerate(found):
        assert dict(one.point) == dict(member(number).point)
        assert one.spec == member(number).spec
        assert digest(to_plain(one.spec)) == one.spec.id
    assert len({one.label for one in found}) == 3
    with pytest.raises(UserError, match="are the same candidate"):
        members(store, ("tiny/0", found[0].run_id))
    assert any("mup" in rule or "inverse proportion" in rule for rule in rules(found, asked(), 512))


@pytest.mark.slow
def test_a_name_that_a_search_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = store_uri(tmp_path)
    write_search(uri, 2)
    line = ["ladder", "tiny/0", "tiny/1", "--sizes", "6k,12k,24k", "--target", "1M", "--name", "tiny"]
    assert main([*line, "--tracking-uri", uri]) == 2
    assert "is the name of a search" in capsys.readouterr().err
    assert main(["ladder", "tiny/0", "tiny/1", "--sizes", "6k,many", "--target", "1M", "--tracking-uri", uri]) == 2
    assert "--sizes 6k,many" in capsys.readouterr().err
    assert main(["ladder", "tiny/0", "tiny/1", "--sizes", "10,12k,24k", "--target", "1M", "--tracking-uri", uri]) == 2
    assert "cannot be built with 10 parameters" in capsys.readouterr().err
    assert list(Store(locate(uri)).searches()) == ["tiny"], "what cannot be built leaves nothing behind"


def command(uri: str, **changes: str) -> list[str]:
    given = {"sizes": "6k,12k,24k", "target": "1M", "seeds": "2", "tokens-per-param": "1", **changes}
    options = [word for key, value in given.items() for word in (f"--{key}", value)]
    return ["ladder", "tiny/0", "tiny/1", *options, "--device", "cpu", "--tracking-uri", uri]


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_ladder_goes_on_to_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = store_uri(tmp_path)
    write_search(uri, 2)
    first = subprocess.Popen(
        [sys.executable, "-m", "runners", *command(uri)],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    wait_for("eight trainings", lambda: _ended(uri) >= 8 or first.poll() is not None, pause=0.2)
    assert first.poll() is None
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    before = {run.info.run_id: run.data.metrics[Metric.LOSS] for run in _runs(uri) if Metric.LOSS in run.data.metrics}
    assert main(command(uri)) == 0
    said = capsys.readouterr().out
    assert "tiny-ladder: 18 ok" in said
    assert "at 1M: " in said
    runs = _runs(uri)
    after = {run.info.run_id: run.data.metrics[Metric.LOSS] for run in runs}
    assert before.items() <= after.items()
    stages = Counter(run.data.tags[Tag.STAGE] for run in runs)
    assert stages == {Stage.SWEEP: 6, Stage.LADDER: 12}
    assert all(Metric.TEST_LOSS in run.data.metrics for run in runs if run.data.tags[Tag.STAGE] == Stage.LADDER)
    assert (tmp_path / "reports/tiny-ladder/report.html").is_file()
    _check_pairs_and_growth(uri)
    assert main(command(uri, sure="0.99", target="2M")) == 0
    assert "tiny-ladder: 18 ok" in capsys.readouterr().out
    assert main(command(uri, **{"tokens-per-param": "2"})) == 2
    assert "was begun otherwise" in capsys.readouterr().err
    assert main(["runs", "tiny-ladder", "--tracking-uri", uri]) == 0
    assert "tiny-ladder/ladder/6" in capsys.readouterr().out
    assert main(["replay", "tiny-ladder/ladder/6", "--tracking-uri", uri]) == 0
    assert main(["report", "tiny-ladder", "--tracking-uri", uri]) == 0
    assert "at 2M" in (tmp_path / "reports/tiny-ladder/report.md").read_text()
    assert main(["retry", "tiny-ladder", "--failed", "--tracking-uri", uri]) == 2
    assert "18 trials" in plan_remove("tiny-ladder", uri).lines[0]


def _runs(uri: str) -> list[Run]:
    store = Store(locate(uri))
    return store.children(store.parent("tiny-ladder")) if "tiny-ladder" in store.searches() else []


def _ended(uri: str) -> int:
    return sum(run.data.tags.get(Tag.STATUS) == Status.OK for run in _runs(uri))


def _check_pairs_and_growth(uri: str) -> None:
    store = Store(locate(uri))
    seeds: dict[tuple[str, str], set[object]] = {}
    for run in _runs(uri):
        if run.data.tags[Tag.STAGE] == Stage.LADDER:
            spec, tags = store.spec(run), run.data.tags
            seeds.setdefault((tags[Tag.RUNG], tags[Tag.REPLICA]), set()).add((spec.seeds, spec.budget))
            assert run.data.metrics[Metric.PARAMS] == pytest.approx(int(tags[Tag.RUNG]), rel=0.01)
    assert len(seeds) == 6
    assert all(len(each) == 1 for each in seeds.values()), "both sides share seeds and budget at each size and replica"
