"""`--set path=value` changes one thing, and faults in it name the override."""

import pytest
from toy_space import TASKS, toy_space

from search_space.domains import Choice
from search_space.experiment import Experiment, ExperimentError, PrunerSpec, SizeTarget, read
from search_space.space import searched

TEXT = """\
name: o
task: copying
budget: {tokens: 8192}
model:
  size: {params: 130k}
  layers: [2, 4]
  mixer: [softmax, linear]
search: {pruner: asha}
"""


def load(*overrides: str) -> Experiment:
    return read(TEXT, full_space=toy_space, tasks=TASKS, overrides=overrides)


def test_scalars_lists_and_mappings_are_read_as_yaml() -> None:
    assert load("search.trials=1e3").search.trials == 1000
    assert load("model.mixer=linear").space != load().space
    assert "model.mixer.kind" not in searched(load("model.mixer=[linear]").space)
    assert load("model.mixer.kind=linear").space == load("model.mixer=linear").space
    assert load("model.layers={low: 2, high: 8}").space.id != load().space.id
    assert load("description=a = b").description == "a = b"


def test_sections_and_fields_the_file_lacks_are_made() -> None:
    assert load("engine.jobs=3").engine.jobs == 3
    assert load("engine.kind=ray").engine.kind == "ray"
    assert load("limits.max_params=1M").limits.max_params == 1e6
    assert load("task.copying.seq_len=32").task["copying"]["seq_len"] == 32
    assert load("search.pruner.asha.factor=4").search.pruner == PrunerSpec(kind="asha", grace_tokens=1024, factor=4)


def test_modules_of_the_users_own_can_be_named_by_an_override() -> None:
    assert load("blocks=[json]").blocks == ("json",)
    with pytest.raises(ExperimentError, match=r"^--set blocks=\[no_such\]: blocks cannot be imported"):
        load("blocks=[no_such]")


def test_a_field_of_one_variant_keeps_the_others() -> None:
    domains = searched(load("model.mixer.softmax.heads=[1, 4]").space)
    assert domains["model.mixer.softmax.heads"] == Choice(options=(1, 4), default=1, help="heads")
    assert domains["model.mixer.kind"].options == ("linear", "softmax")  # type: ignore[union-attr]
    domains = searched(load("model.position.rotary.base=1000").space)
    assert set(domains["model.position.kind"].options) == {"none", "rotary"}  # type: ignore[union-attr]


def test_a_field_inside_a_family_inside_a_family_is_reached() -> None:
    experiment = load("model.pattern=[uniform, every_nth]", "model.pattern.every_nth.mixer.softmax.heads=4")
    assert "model.pattern.every_nth.mixer.softmax.heads" not in searched(experiment.space)
    assert "model.pattern.every_nth.mixer.kind" in searched(experiment.space)


def test_a_size_target_is_replaced_not_joined() -> None:
    assert load("model.size.flops_per_token=1M").size == SizeTarget(measure="flops_per_token", value=1e6)
    assert load("model.size.params=2M").size == SizeTarget(measure="params", value=2e6)


def test_later_overrides_win() -> None:
    assert load("search.seed=1", "search.seed=2").search.seed == 2


def test_overrides_are_kept_beside_the_text() -> None:
    experiment = load("search.seed=1")
    assert (experiment.text, experiment.overrides) == (TEXT, ("search.seed=1",))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("search.trials", "write path=value"),
        ("=3", "write path=value"),
        ("search.trials=", "has no value"),
        ("search..trials=3", "write path=value"),
        ("search.trials=[", "is not valid YAML"),
        ("search.trials=many", "search.trials takes a whole number"),
        ("search.trails=3", "did you mean 'trials'"),
        ("serach.trials=3", "did you mean 'search'"),
        ("model.layers=99", "model.layers takes 1 to 64"),
        ("model.mixer=softmx", "did you mean 'softmax'"),
        ("model.mixer.softmx.heads=2", "did you mean 'softmax'"),
        ("model.mixer.softmax.haeds=2", "did you mean 'heads'"),
        ("model.pattern.every_nth.every=2", "pattern picks uniform: add 'every_nth' there first"),
        ("model.layers.low=2", "which holds [2, 4] and not a mapping"),
        ("budget.tokens=9000", "takes a multiple of budget.batch_tokens"),
        ("budget.batch_tokens=3200", "takes a multiple of budget.batch_tokens (3200)"),
        ("name=a/b", "takes a name of letters"),
        ("model.d_model=64", "keep one of the two"),
    ],
)
def test_a_fault_in_an_override_names_the_override(override: str, words: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load(override)
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"--set {override}: ")
    assert words in str(problem)
