"""docs/experiments.md says what the reader of experiment files does."""

import dataclasses

import experiment_page
import pytest
import yaml
from experiment_keys import BASE, KEYS, TASK_EXAMPLES
from experiment_page import PAGE, beside, page, read, space_examples, with_key

from runners.candidate import full_space
from runners.tasks import TASKS
from search_space.errors import ExperimentError


def test_the_committed_page_is_what_the_reader_does() -> None:
    assert PAGE.read_text() == page(), "docs/experiments.md is stale; run `make docs` and commit the change"


@pytest.mark.parametrize("path", KEYS)
def test_the_example_of_a_key_is_read(path: str) -> None:
    assert read(with_key(path)).identity()


def test_examples_of_tasks_are_read() -> None:
    for kind, task in TASKS.items():
        for field in dataclasses.fields(task):
            needed = {"paths": ["notes"]} if kind == "text_files" else {}
            fields = {**needed, field.name: yaml.safe_load(TASK_EXAMPLES[field.name])}
            data = {**BASE, "budget": {"tokens": 204800}, "task": {kind: fields}}
            assert read(data).task[kind][field.name], f"{kind}.{field.name}"


def test_examples_of_the_space_are_read() -> None:
    examples = {
        path: value for name, node in full_space().fields.items() for path, value in space_examples(name, node).items()
    }
    assert {"model.layers", "optimizer.adamw.beta2", "training.gradient_clip"} <= examples.keys()
    for path, value in examples.items():
        assert read(beside(BASE, path, value)).space


def test_a_key_that_the_page_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_page, "KEYS", {key: KEYS[key] for key in KEYS if key != "engine.retries"})
    with pytest.raises(AssertionError, match=r"KEYS lacks \['engine.retries'\]"):
        page()


def test_no_key_takes_the_wrong_value_that_the_page_is_made_with() -> None:
    with pytest.raises(ExperimentError, match="takes a whole number"):
        read({**BASE, "budget": {"tokens": experiment_page.WRONG}})
