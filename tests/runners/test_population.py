"""What a population promises: who goes on from whom, with which settings, and a record that trains the same again."""

import dataclasses
import math
import random
from pathlib import Path

import pytest
from populations import RATE, TEXT
from specs import prepare, run
from studied import experiment, opened

from runners.candidate import full_space
from runners.checkpoints import Checkpointing, find
from runners.heirlooms import Heirlooms
from runners.mutations import along, mutations_of, present_spec, replayed, spliced
from runners.population import Population, with_settings
from runners.pruning import observe_all
from runners.showing import search_trial
from runners.study import Study
from runners.tasks import TASKS
from runners.train import run_trial
from search_space.errors import UserError
from search_space.experiment import difference, from_plain
from search_space.records import Reading, Tag, spec_from_plain, to_plain

CHECKED = ("", "search.pruner={pbt: {interval_tokens: 512, quantile: 0.5, factors: [0.5, 2.0]}}")


def population(*overrides: str) -> Population:
    return Population.of(experiment(*overrides, text=TEXT))


def told(*losses: float, tokens: int = 256) -> Population:
    """A population of four whose first trials had these losses."""
    found = population()
    for number, loss in enumerate(losses):
        found.observe(number, tokens, loss)
    return found


def reading(tokens: int, loss: float) -> Reading:
    return Reading(tokens=tokens, loss=loss, train_loss=loss, seconds=1.0)


def test_the_worst_of_four_goes_on_from_the_best() -> None:
    assert told(3.0, 2.0, 4.0).donor(3, 256, 5.0) == 1
    assert told(3.0, 2.0, 4.0).donor(3, 256, math.inf) == 1
    assert told(3.0, 2.0, 4.0).donor(3, 256, 3.5) is None


def test_nobody_copies_among_too_few_or_equals_or_from_another_population() -> None:
    assert told(3.0, 2.0).donor(3, 256, 5.0) is None, "a quarter of three is nobody"
    assert told(3.0, 3.0, 3.0).donor(3, 256, 3.0) is None
    assert told(3.0, 2.0, 4.0).donor(4, 256, 5.0) is None, "trial 4 is the first of the next four"
    assert told(3.0, 2.0, 4.0).donor(3, 512, 5.0) is None, "nobody has come to 512 tokens"


def test_decisions_come_at_intervals_and_stand() -> None:
    found = told(3.0, 2.0, 4.0)
    assert [tokens for tokens in range(128, 1152, 128) if found.wants(3, tokens)] == [256, 512, 768]
    found.observe(3, 256, 5.0)
    assert not found.wants(3, 256), "whoever came there since, it stays decided"


def test_donors_and_settings_follow_from_seed_number_and_tokens() -> None:
    half = "search.pruner={pbt: {interval_tokens: 256, quantile: 0.5}}"
    many = [population(half, f"search.seed={seed}", "search.population=8") for seed in range(20)]
    for each in many:
        for number in range(7):
            each.observe(number, 256, 1.0 + number)
    donors = [each.donor(7, 256, 9.0) for each in many]
    assert donors == [each.donor(7, 256, 9.0) for each in many]
    assert set(donors) <= set(range(4))
    assert len(set(donors)) > 1
    moved = [each.changed({RATE: 1e-3}, 7, 256)[RATE] for each in many]
    assert set(moved) == {1e-3 * 0.8, 1e-3 * 1.25}
    assert len({many[0].changed({RATE: 1e-3}, number, 256)[RATE] for number in range(8)}) == 2


def test_settings_stay_in_their_range_and_betas_move_by_their_distance_to_one() -> None:
    found = population("optimizer.adamw.beta2={low: 0.9, high: 0.999}", "search.pruner={pbt: {factors: 2.0}}")
    beta = "optimizer.adamw.beta2"
    assert found.changed({RATE: 9e-3, beta: 0.98}, 0, 256) == {RATE: 1e-2, beta: pytest.approx(0.96)}
    assert found.changed({beta: 0.93}, 0, 256) == {beta: 0.9}


def test_what_is_stored_rebuilds_the_population() -> None:
    rng = random.Random(0)
    losses = {number: {tokens: rng.random() for tokens in (256, 512, 768)} for number in range(3)}
    lived, rebuilt = population(), population()
    for number in losses:
        observe_all(lived, number, losses[number], None)
    for number in reversed(losses):
        observe_all(rebuilt, number, losses[number], None)
    for tokens, loss in ((256, 2.0), (512, 0.1), (768, 3.0)):
        assert lived.donor(3, tokens, loss) == rebuilt.donor(3, tokens, loss)


def test_a_state_is_kept_while_its_trial_may_be_among_the_best() -> None:
    found = told(3.0, 2.0)
    assert [found.may_give(number, 256) for number in (0, 1)] == [False, True], "of four, one is copied"
    found.observe(2, 256, 1.0)
    assert [found.may_give(number, 256) for number in (0, 1, 2)] == [False, False, True]


def four(study: Study) -> None:
    """Four trials, of which the last goes on from the best at 256 tokens."""
    for number, loss in enumerate((3.0, 2.0, 4.0, 5.0)):
        assert study.propose() is not None
        assert study.report(number, reading(256, loss), [reading(256, loss)]) is (number < 3)


def test_the_study_keeps_each_mutation_and_decides_no_reading_twice(tmp_path: Path) -> None:
    with opened(tmp_path, text=TEXT) as study:
        four(study)
        (event,) = mutations_of(study.trials()[3])
        donor = study.trials()[1]
    with opened(tmp_path, text=TEXT) as study:
        entry = study.trials()[3]
        assert mutations_of(entry) == (event,)
        assert (event.tokens, event.donor, event.loss, event.donor_loss) == (256, 1, 5.0, 2.0)
        assert event.before == {RATE: entry.point[RATE]}
        assert event.after[RATE] in [pytest.approx(donor.point[RATE] * factor) for factor in (0.8, 1.25)]
        assert study.report(3, reading(256, 1.0)), "decided"
        spec = present_spec(entry)
        assert spec.candidate == donor.spec.candidate
        assert [change["tokens"] for change in spec.changes] == [256]
        assert spec_from_plain(to_plain(spec)) == spec
        assert spec.id not in (entry.spec.id, donor.spec.id)
        assert "changes" not in to_plain(entry.spec)
        shown = search_trial(entry, tmp_path)
        assert shown.spec == entry.spec, "parameters in the tracking store never change"
        assert shown.tags[Tag.MUTATIONS].startswith("at 256 tokens from the state of trial 1 (loss 2.0000 against")
        assert replayed(entry.spec, shown.mutations) == (spec, 256)


def test_a_kill_between_decision_and_reading_changes_neither(tmp_path: Path) -> None:
    with opened(tmp_path, text=TEXT) as study:
        four(study)
        kept = study.trials()[3].mutations
        whole = study.population
    with opened(tmp_path / "killed", text=TEXT) as study:
        study._ledger.read = lambda *stored: True  # type: ignore[method-assign]
        four(study)
        assert study.trials()[3].mutations == kept
    with opened(tmp_path / "killed", text=TEXT) as study:
        assert whole is not None
        assert study.population is not None
        assert study.population.has_read(3, 256)
        assert study.population.loss(3, 256) == whole.loss(3, 256)


def test_a_curve_has_the_trials_own_readings_up_to_the_copy() -> None:
    theirs = [reading(tokens, 1.0) for tokens in (0, 256, 512, 768)]
    own = [reading(tokens, 2.0) for tokens in (256, 512)]
    assert [(each.tokens, each.loss) for each in spliced(theirs, own)] == [(0, 1.0), (256, 2.0), (512, 2.0), (768, 1.0)]
    assert spliced(theirs, ()) == tuple(theirs)
    assert spliced(spliced(theirs, own), own) == spliced(theirs, own)


def test_the_whole_way_trained_from_its_start_equals_the_handed_over_state(tmp_path: Path) -> None:
    made = prepare("optimizer.adamw={learning_rate: 1e-2, weight_decay: 0.1, beta2: 0.95}")
    first = made.spec.candidate["optimizer"]
    second = with_settings(first, {RATE: 3e-3, "optimizer.adamw.weight_decay": 0.5, "optimizer.adamw.beta2": 0.9})
    spec = along(made.spec, [{"tokens": 0, "optimizer": first}, {"tokens": 1280, "optimizer": second}])
    shared = Checkpointing(folder=tmp_path / "own", shared=tmp_path / "shared-0-1", shared_tokens=1280)
    plain = run_trial(made.spec, made.data, lambda _: True, checkpoint=shared)
    assert [path.name for path in (tmp_path / "shared-0-1").iterdir()] == ["1280"], "none after the last reading"
    whole = run_trial(spec, made.data, lambda _: True)
    with opened(tmp_path / "study", text=TEXT) as study:
        assert study.propose() is not None
        event = {"tokens": 1280, "donor": 1, "loss": 2.0, "donor_loss": 1.0, "before": {}, "after": {}, "curve": ()}
        course = [{"tokens": 0, "optimizer": first}, {"tokens": 1280, "optimizer": second}]
        entry = dataclasses.replace(study.trials()[0], spec=made.spec, mutations=({**event, "course": course},))
        Heirlooms(tmp_path, population(), 8).hand_over(entry, tmp_path / "taken", 128)
    assert find(tmp_path / "taken", spec.id, 128) is not None
    taken = run_trial(spec, made.data, lambda _: True, checkpoint=Checkpointing(folder=tmp_path / "taken"))
    losses = [[each.loss for each in result.curve] for result in (plain, whole, taken)]
    assert losses[1] == losses[2]
    assert losses[0][:3] == losses[1][:3]
    assert losses[0][3:] != losses[1][3:]
    assert run(made).metrics["loss"] == plain.metrics["loss"]


@pytest.mark.parametrize("override", CHECKED)
def test_an_experiment_comes_back_from_its_plain_form(override: str) -> None:
    made = experiment(*filter(None, [override]), text=TEXT)
    again = from_plain(made.plain(), full_space, TASKS)
    assert (again.search, again.plain()) == (made.search, made.plain())
    assert Population.of(again).domains[RATE].live == "value"
    assert "grace_tokens" not in made.plain()["search"]["pruner"]


def test_other_pruners_keep_their_identity() -> None:
    made = experiment("search.pruner={asha: {grace_tokens: 256}}")
    assert made.plain()["search"]["pruner"] == {"kind": "asha", "grace_tokens": 256, "factor": 2}
    changed = experiment("search.pruner={pbt: {quantile: 0.5}}", text=TEXT)
    assert difference(experiment(text=TEXT).identity(), changed.identity()) == ["search.pruner.quantile: 0.25 -> 0.5"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.position=[none, rotary]", "also searched here: model.position.kind; fix each to one value"),
        ("optimizer.adamw.learning_rate=[1e-3, 1e-2]", "also searched here: optimizer.adamw.learning_rate"),
        ("optimizer.adamw.learning_rate=0.001", "has nothing to change, every setting is fixed; write a range"),
        ("training.gradient_clip={low: 0.1, high: 1.0}", "also searched here: training.gradient_clip"),
        ("search.sampler=tpe", "takes random with pbt"),
        ("search.population=3", "must hold one of the trials that copy each other (3"),
        ("search.trials=2", "must hold one of the trials that copy each other (2"),
        ("final.contrasts={chance: {}}", "final trains a candidate again"),
        ("baseline={model: {position: none}}", "has no place among trials that copy each other"),
        ("search.pruner={pbt: {interval_tokens: 300}}", "takes a multiple of budget.eval_every (256)"),
        ("search.pruner={pbt: {interval_tokens: 1024}}", "or nothing is ever copied"),
        ("search.pruner={pbt: {quantile: 0.6}}", "takes a number above 0.0 to 0.5"),
    ],
)
def test_what_no_population_can_do_is_refused(override: str, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        experiment(override, text=TEXT)
    assert words in str(refusal.value)
