"""Whatever is done to a file, reading it gives an experiment or an ExperimentError, never another exception."""

import random

import pytest
from toy_space import TASKS as TOY_TASKS
from toy_space import toy_space

from runners.candidate import full_space
from runners.tasks import TASKS
from search_space.experiment import Experiment, ExperimentError, Problem, preset_path, presets, read
from search_space.space import Space, default_point, holds

ROUNDS = 60
PIECES = [
    *"\t:-[]{}&*!|>'\"%@`#,? \n",
    ": ",
    "- ",
    "\n  ",
    "<<: ",
    "&a ",
    "*a",
    "!!int ",
    "null",
    "true",
    "1e400",
    "-1",
    ".nan",
    ".inf",
    "9" * 70,
    "\x00",
    "\x85",
    "\u2028",
    "\ud800",
    "\\ud800",
    "ü",
    "---\n",
    "low: 3",
    "{}",
    "[]",
    "''",
    "130k",
    "softmax",
    "every_nth",
    "{low: 1, high: 2, step: 1e-300}",
    "[[[[[[]]]]]]",
]
FULL = full_space()


def real_space(blocks: tuple[str, ...]) -> Space:
    """The registry's space, derived once."""
    return FULL if not blocks else full_space(blocks)


def mutated(text: str, rng: random.Random) -> str:
    """The text after a few random edits of characters, lines and values."""
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(text) + 1)
        lines = text.split("\n")
        line = rng.randrange(len(lines))
        edit = rng.randrange(6)
        if edit == 0:
            text = text[:place] + rng.choice(PIECES) + text[place:]
        elif edit == 1:
            text = text[:place] + text[place + rng.randint(1, 12) :]
        elif edit == 2:
            text = "\n".join(lines[:line] + lines[line + 1 :])
        elif edit == 3:
            text = "\n".join([*lines[:line], lines[rng.randrange(len(lines))], *lines[line:]])
        elif edit == 4:
            key, colon, _ = lines[line].partition(":")
            text = "\n".join([*lines[:line], f"{key}{colon} {rng.choice(PIECES)}", *lines[line + 1 :]])
        else:
            words = text.split(" ")
            first, second = rng.randrange(len(words)), rng.randrange(len(words))
            words[first], words[second] = words[second], words[first]
            text = " ".join(words)
    return text


def survives(experiment: Experiment) -> None:
    """What was accepted is whole: its points can be drawn, its identity stored."""
    assert holds(experiment.space, default_point(experiment.space))
    assert experiment.identity()
    assert not experiment.baseline or holds(experiment.full, experiment.baseline)


@pytest.mark.parametrize("preset", presets())
def test_a_mutated_preset_is_read_or_refused_in_words(preset: str) -> None:
    text = preset_path(preset).read_text()
    rng = random.Random(preset)
    refused = 0
    for _ in range(ROUNDS):
        candidate = mutated(text, rng)
        problems: tuple[Problem, ...] = ()
        try:
            survives(read(candidate, full_space=real_space, tasks=TASKS, name="fuzz"))
        except ExperimentError as error:
            problems = error.problems
        refused += bool(problems)
        assert all(str(problem).encode() and problem.message for problem in problems)
    assert 0 < refused < ROUNDS


def test_a_text_of_random_pieces_is_read_or_refused_in_words() -> None:
    rng = random.Random(7)
    for _ in range(400):
        text = "".join(rng.choice([*PIECES, "task", "model", "budget", "search"]) for _ in range(rng.randint(1, 30)))
        with pytest.raises(ExperimentError) as caught:
            read(text, full_space=toy_space, tasks=TOY_TASKS, name="fuzz")
        assert str(caught.value)


PATHS = [
    "model.mixer",
    "model.mixer.softmax.kv_heads",
    "model.size.params",
    "model.layers",
    "model.pattern",
    "model.pattern.every_nth.mixer.linear.heads",
    "optimizer.adamw.learning_rate",
    "search.trials",
    "search.pruner",
    "search.pruner.asha.factor",
    "task",
    "task.python_source.seq_len",
    "budget.tokens",
    "final.seeds",
    "final.contrasts",
    "final.contrasts.seed_alone",
    "baseline",
    "baseline.model.layers",
    "limits",
    "limits.max_params",
    "blocks",
    "a.b.c",
]
VALUES = [*PIECES, "2", "4", "64", "0.005", "[1, 2]", "asha", "[uniform, every_nth]", "{model.layers: 3}", "{mqar: {}}"]


def test_a_random_override_is_taken_or_refused_in_words() -> None:
    rng = random.Random(8)
    text = preset_path("quickstart").read_text()
    taken = 0
    for _ in range(300):
        overrides = [f"{rng.choice(PATHS)}={rng.choice(VALUES)}" for _ in range(rng.randint(1, 3))]
        refusal = ""
        try:
            survives(read(text, full_space=real_space, tasks=TASKS, name="fuzz", overrides=overrides))
            taken += 1
        except ExperimentError as error:
            refusal = str(error)
        assert refusal.encode().decode() == refusal
    assert 0 < taken < 300
