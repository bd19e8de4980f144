"""What a warm start promises: earlier trials inform the sampler, exactly, and are never taken for this search's own."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from studied import SHAPE, broken, experiment, made_up, points, uri

from runners.candidate import Candidate
from runners.history import Fate, Told
from runners.study import Study
from runners.warm import mapped, neutral_values, ranked_like
from search_space.domains import FloatRange, Scalar
from search_space.errors import ExperimentError, UserError
from search_space.space import Space, default_point

RATE = "optimizer.adamw.learning_rate"
WARM = "search.warm_start=[old]"


def opened(folder: Path, name: str, *overrides: str, extend: bool = False, data: str = "made up") -> Study:
    """The study of a search that lies in a file named after it."""
    study = Study.open(f"sqlite:///{folder}/{name}.db", replace(experiment(*overrides), name=name), extend=extend)
    study.bind(SHAPE, data)
    return study


def run(study: Study, count: int) -> None:
    for _ in range(count):
        proposed = study.propose()
        assert proposed is not None
        study.tell(proposed.number, made_up(proposed))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a search of 14 ended trials, two of them broken, and one that was cut off."""
    folder = tmp_path_factory.mktemp("finished")
    with opened(folder, "old", "search.sampler=random") as study:
        run(study, 12)
        for _ in range(2):
            proposed = study.propose()
            assert proposed is not None
            study.tell(proposed.number, broken())
        study.propose()
    return folder


@pytest.fixture
def old(finished: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_earlier_trials_inform_the_sampler_and_are_no_trials_of_the_search(old: Path) -> None:
    with opened(old, "cold") as study:
        run(study, 4)
        cold = points(study)
    with opened(old, "new", WARM) as study:
        run(study, 4)
        assert points(study) != cold
        assert [entry.number for entry in study.trials()] == [0, 1, 2, 3]
        assert study.trials()[0].marks["history"] == {"finished": "", "running": "", "warm": "14"}
        assert study.trials()[3].marks["history"]["finished"] == "0-2"


def test_what_was_taken_over_is_kept_whatever_becomes_of_the_earlier_search(old: Path) -> None:
    with opened(old, "whole", WARM) as study:
        run(study, 6)
        whole = points(study)
    with opened(old, "stopped", WARM) as study:
        run(study, 3)
        study.propose()
    with opened(old, "old", "search.sampler=random") as study:
        run(study, 1)
    (old / "old.db").unlink()
    with opened(old, "stopped", WARM) as study:
        for left in study.running():
            study.tell(left.number, made_up(left))
        run(study, 2)
        assert points(study) == whole


def test_earlier_trials_are_mapped_by_path_and_dropped_where_they_have_no_place(old: Path) -> None:
    with opened(old, "old", "search.sampler=random") as study:
        mixers = [entry.point["model.mixer.kind"] for entry in study.trials()[:14]]
    narrow = "model.mixer={softmax: {kv_heads: 1, queries_per_kv: [1, 2], head_dim: 8, qk_norm: none}}"
    with opened(old, "narrow", WARM, narrow) as study:
        study.propose()
        assert study.trials()[0].marks["history"]["warm"] == str(mixers.count("softmax"))
    with opened(old, "wide", WARM, "model.position=[none, rotary, alibi]") as study:
        study.propose()
        assert study.trials()[0].marks["history"]["warm"] == "14"


@pytest.mark.parametrize("change", ["budget.tokens=2048", "other data"])
def test_losses_of_another_budget_or_other_data_count_by_rank(old: Path, change: str) -> None:
    overrides = (change,) if "=" in change else ()
    with opened(old, "new", WARM, *overrides, data="made up" if overrides else change) as study:
        earlier = study.proposer.earlier.before([])
        assert {told.fate for told in earlier} == {Fate.OK}
        assert sorted(told.values[0] for told in earlier) == pytest.approx([(at + 0.5) / 14 for at in range(14)])
    with opened(old, "like", WARM) as study:
        alike = study.proposer.earlier.before([])
        assert [told.fate for told in alike].count(Fate.BROKEN) == 2
        assert all(told.values[0] >= 1.0 for told in alike if told.fate is Fate.OK)


def test_ranks_take_the_values_of_this_search() -> None:
    def told(number: int, *values: float, fate: Fate = Fate.OK) -> Told:
        return Told(number=number, point={}, fate=fate, drawn=False, values=values)

    own = [told(0, 10.0), told(1, 20.0), told(2, 30.0)]
    earlier = [told(-4, 0.2), told(-3, 0.1), told(-2, fate=Fate.BROKEN), told(-1, 0.3)]
    values = [each.values[0] for each in ranked_like(own, earlier)]
    assert values == pytest.approx([17.5, 12.5, 27.5, 22.5])


def test_a_path_that_was_not_known_takes_its_neutral_value_or_the_trial_has_no_place() -> None:
    full = experiment().space
    point, neutral = default_point(full), neutral_values(Candidate)
    known = [path for path in point if path in neutral and point[path] == neutral[path]]
    assert "model.residual.kind" in known
    without: dict[str, Scalar] = {path: value for path, value in point.items() if path not in known}
    assert mapped(full, without, neutral) == point
    del without["model.layers"]
    assert mapped(full, without, neutral) is None
    assert mapped(full, {**point, "model.unknown": 1}, neutral) is None
    small = Space(fields={"rate": FloatRange(low=0.1, high=0.2, default=0.1)})
    assert mapped(small, {"rate": 0.3}, {}) is None


def test_a_search_nobody_knows_is_refused_with_near_names(old: Path) -> None:
    with pytest.raises(UserError, match=r"no study of a search 'odl'.*did you mean 'old'\?"):
        opened(old, "new", "search.warm_start=[odl]")


def test_a_search_cannot_warm_itself() -> None:
    with pytest.raises(ExperimentError, match="names this search itself"):
        experiment("search.warm_start=[small]")


def test_one_storage_may_hold_both(tmp_path: Path) -> None:
    for name, overrides in (("old", ()), ("new", (WARM,))):
        with Study.open(uri(tmp_path), replace(experiment(*overrides), name=name)) as study:
            study.bind(SHAPE, "made up")
            run(study, 2)
    assert study.trials()[0].marks["history"]["warm"] == "2"


WITH_A_NEW_BLOCK = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from studied import EXPERIMENT, made_up
from test_warm import opened
added = ("blocks=[tests.runners.faulty_blocks]", "model.premixer=[none, faulty]")
with opened(Path({folder!r}), "kept", *added, extend=True) as study:
    while len(study.trials()) < 20:
        proposed = study.propose()
        study.tell(proposed.number, made_up(proposed))
    found = study.trials()[12:]
    print(found[0].marks["history"]["finished"], {{entry.point["model.premixer.kind"] for entry in found}})
"""


def test_a_block_added_to_the_registry_keeps_a_study_usable(tmp_path: Path) -> None:
    with opened(tmp_path, "kept") as study:
        run(study, 12)
    here = Path(__file__).parent
    script = WITH_A_NEW_BLOCK.format(root=str(here.parents[1]), tests=str(here), folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    finished, kinds = ended.stdout.split(" ", 1)
    assert finished == "0-11", "old trials inform the sampler"
    assert "faulty" in kinds, "and the new block is tried"
