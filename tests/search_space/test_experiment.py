"""A file becomes an experiment with everything filled in, or a list of all that is wrong with it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from toy_space import TASKS, toy_space

from search_space.experiment import (
    Contrast,
    EngineSpec,
    Experiment,
    ExperimentError,
    FinalSpec,
    FreeSize,
    Limits,
    PrunerSpec,
    SearchSpec,
    SizeTarget,
    as_file,
    difference,
    from_plain,
    preset_path,
    presets,
    read,
)
from search_space.records import Budget
from search_space.space import default_point, holds, random_point, size

SMALL = "name: small\ntask: copying\nbudget: {tokens: 8192}\n"


def load(text: str, *overrides: str, **more: Any) -> Experiment:
    return read(text, full_space=toy_space, tasks=TASKS, overrides=overrides, **more)


def faults(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        load(text, *overrides)
    return str(caught.value).split("\n")


def test_a_short_file_gets_sensible_values_everywhere() -> None:
    experiment = load(SMALL)
    assert experiment.task == {
        "kind": "copying",
        "copying": {
            "seq_len": 64,
            "eval_lengths": [],
            "noise": 0.0,
            "shuffled": True,
            "name": "copy",
            "order": "forward",
        },
    }
    assert experiment.budget == Budget(
        tokens=8192, batch_tokens=1024, micro_batch_tokens=1024, eval_tokens=8192, eval_every=1024, max_seconds=3600.0
    )
    assert experiment.size == FreeSize()
    assert experiment.limits == Limits()
    assert experiment.search == SearchSpec()
    assert experiment.engine == EngineSpec()
    assert experiment.final == FinalSpec()
    assert experiment.objectives == ("loss",)
    assert experiment.baseline == {}
    assert experiment.max_hours == experiment.max_tokens == math.inf
    assert experiment.space.fields.keys() == {"model", "optimizer"}


def test_every_key_is_read() -> None:
    experiment = load(
        """
name: all
description: everything
task: {copying: {seq_len: 64, eval_lengths: [256, 1k], noise: 0.5, shuffled: false, name: x, order: backward}}
budget: {tokens: 64k, batch_tokens: 6400,
  micro_batch_tokens: 1280, eval_tokens: 12800, eval_every: 12800, max_seconds: 9}
model: {size: {body_params: 1.5M}, layers: [2, 4]}
objectives: [loss, state_bytes_per_token]
search: {sampler: nsga2, trials: 40, seed: 7, population: 10, pruner: none}
engine: {jobs: 3, device: cpu, dtype: float32, threads: 2, deterministic: false}
final: {seeds: 5, contrasts: {depth: {model.layers: 2}, chance: {}}}
limits: {max_params: 2M, max_flops_per_token: 1B, max_state_bytes: 64KiB}
max_hours: 1.5
max_tokens: 1B
"""
    )
    assert experiment.size == SizeTarget(measure="body_params", value=1.5e6)
    assert experiment.budget.tokens == 64000
    assert experiment.budget.max_seconds == 9.0
    assert experiment.task["copying"]["eval_lengths"] == [256, 1000]
    assert experiment.search == SearchSpec(sampler="nsga2", trials=40, seed=7, population=10)
    assert experiment.engine == EngineSpec(jobs=3, device="cpu", dtype="float32", threads=2, deterministic=False)
    assert experiment.final.contrasts == (
        Contrast(name="depth", change={"model.layers": 2}),
        Contrast(name="chance", change={}),
    )
    assert experiment.limits == Limits(max_params=2e6, max_flops_per_token=1e9, max_state_bytes=65536.0)
    assert (experiment.max_hours, experiment.max_tokens) == (1.5, 10**9)


def test_a_size_target_takes_the_width_out_of_the_space() -> None:
    experiment = load(SMALL + "model: {size: {params: 130k}}")
    for space in (experiment.space, experiment.full):
        assert "model.d_model" not in default_point(space)
    assert "model.d_model" in default_point(load(SMALL).space)


def test_the_name_comes_from_the_caller_then_the_file_then_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "my run-2.yaml"
    path.write_text("task: copying\nbudget: {tokens: 8192}\n")
    assert read(path, full_space=toy_space, tasks=TASKS).name == "my_run-2"
    assert read(path, full_space=toy_space, tasks=TASKS, name="other").name == "other"
    assert load(SMALL).name == "small"
    assert load(SMALL, name="other").name == "other"
    assert "name is missing" in faults("task: copying\nbudget: {tokens: 8192}\n")[0]
    with pytest.raises(ExperimentError, match="takes a name of letters"):
        load(SMALL, name="../x")


@pytest.mark.parametrize(
    ("pruner", "expected"),
    [
        ("none", PrunerSpec()),
        ("asha", PrunerSpec(kind="asha", grace_tokens=2048)),
        ("median", PrunerSpec(kind="median", grace_tokens=2048)),
        ("{asha: {grace_tokens: 4096, factor: 4}}", PrunerSpec(kind="asha", grace_tokens=4096, factor=4)),
        ("{median: {grace_tokens: 6k}}", None),
    ],
)
def test_pruners_begin_at_a_reading(pruner: str, expected: PrunerSpec | None) -> None:
    text = f"name: p\ntask: copying\nbudget: {{tokens: 16384, eval_every: 2048}}\nsearch: {{pruner: {pruner}}}\n"
    if expected is None:
        assert "takes a multiple of budget.eval_every (2048); got 6000, write 4096 or 6144" in faults(text)[0]
    else:
        assert load(text).search.pruner == expected


def test_readings_follow_the_grace_where_the_file_gives_only_that() -> None:
    text = "name: p\ntask: copying\nbudget: {tokens: 16384}\nsearch: {pruner: {asha: {grace_tokens: 3072}}}\n"
    assert load(text).budget.eval_every == 3072


def test_the_baseline_keeps_declared_defaults_and_what_the_file_fixes() -> None:
    experiment = load(
        SMALL
        + "model: {layers: 2, d_model: [64, 128], mixer: linear}\nbaseline: {model: {mixer: {softmax: {heads: 4}}}}"
    )
    assert experiment.baseline["model.mixer.kind"] == "softmax"
    assert experiment.baseline["model.mixer.softmax.heads"] == 4
    assert experiment.baseline["model.layers"] == 2
    assert experiment.baseline["model.d_model"] == 128
    assert holds(experiment.full, experiment.baseline)
    assert not holds(experiment.space, experiment.baseline)


def test_a_contrast_changes_fields_kinds_and_fields_of_kinds() -> None:
    experiment = load(
        SMALL
        + """
model: {mixer: {softmax: , linear: {feature_map: relu}}}
final:
  contrasts:
    depth: {model.layers: 9}
    linear: {model.mixer: linear}
    heads: {model.mixer.softmax.heads: 4}
    nested: {model: {mixer: {softmax: {heads: 1}}, tied: false}}
    chance: {}
"""
    )
    depth, linear, heads, nested, chance = experiment.final.contrasts
    point = default_point(experiment.space)
    assert experiment.changed(point, depth) == {**point, "model.layers": 9}
    assert experiment.changed(point, heads) == {**point, "model.mixer.softmax.heads": 4}
    assert experiment.changed(point, nested) == {**point, "model.mixer.softmax.heads": 1, "model.tied": False}
    assert experiment.changed(point, chance) == point
    to_linear = experiment.changed(point, linear)
    assert to_linear["model.mixer.kind"] == "linear"
    assert to_linear["model.mixer.linear.feature_map"] == "relu", "what the file fixes stays fixed"
    assert not [path for path in to_linear if path.startswith("model.mixer.softmax")]
    assert experiment.changed(to_linear, heads) == to_linear


def test_all_independent_faults_are_reported_together_in_the_order_of_the_file() -> None:
    lines = faults(
        """\
name: many
task: copyng
budget: {tokens: -5, batch_toknes: 3}
model:
  layers: [2, 99, 100]
  mixer: [softmx, linear, {softmax: {heads: 3, depth: 1}}]
  position: {rotary: {base: 1}}
  pattern: {every_nth: {every: {low: 1, high: 99}}}
search: {sampler: tpee, trials: many}
baseline: {model: {layers: 0, tied: maybe}}
final: {seeds: 1, contrasts: {a: {model.lyers: 3}, b/c: {}}}
"""
    )
    numbers = [int(re.match(r"experiment:(\d+): ", line)[1]) for line in lines]  # type: ignore[index]
    assert numbers == sorted(numbers)
    text = "\n".join(lines)
    for path in (
        "task.copyng",
        "budget.tokens",
        "budget.batch_toknes",
        "model.mixer.softmx",
        "model.mixer.softmax.heads",
        "model.mixer.softmax.depth",
        "model.position.rotary.base",
        "model.pattern.every_nth.every.low",
        "search.sampler",
        "search.trials",
        "baseline.model.layers",
        "baseline.model.tied",
        "final.seeds",
        "final.contrasts.a.model.lyers",
        "final.contrasts.b/c",
    ):
        assert f": {path} " in text, path
    assert "got 99" in text
    assert "got 100" in text


def test_a_fault_brings_no_further_faults_with_it() -> None:
    lines = faults(SMALL.replace("8192", "plenty") + "model: {layers: 99}\nsearch: {pruner: asha, sampler: grid}")
    assert len(lines) == 2, lines


def test_a_flood_of_faults_is_cut() -> None:
    lines = faults(SMALL + "\n".join(f"key{n}: 1" for n in range(5000)))
    assert len(lines) == 26
    assert lines[-1].startswith("... and ")


def test_a_huge_value_does_not_fill_the_screen() -> None:
    assert len(faults(SMALL + f"search: {{sampler: {'x' * 50_000}}}")[0]) < 1000


def test_complaints_of_the_task_are_laid_to_its_fields() -> None:
    (line,) = faults("name: t\ntask:\n  copying:\n    seq_len: 1\nbudget: {tokens: 8192}\n")
    assert line == "experiment:4: task.copying.seq_len takes 2 or more; got 1"
    (line,) = faults("name: t\ntask:\n  copying:\n    shuffled: true\n    noise: 2\nbudget: {tokens: 8192}\n")
    assert line.startswith("experiment:5: task.copying.noise ")
    (line,) = faults("name: t\ntask: files\nbudget: {tokens: 8192}\n")
    assert line.startswith("experiment:2: task.files.paths is missing")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("noise: high", "takes a number"),
        ("noise: .nan", "takes a number"),
        ("shuffled: 1", "true or false"),
        ("name: 3", "takes text"),
        ("order: sideways", "is no known value"),
        ("eval_lengths: {a: 1}", "takes a whole number"),
        ("eval_lengths: [64, 64]", "keep one"),
        ("seq_len:", "has no value"),
    ],
)
def test_task_fields_are_checked_by_their_types(fields: str, words: str) -> None:
    (line,) = faults(f"name: t\ntask: {{copying: {{{fields}}}}}\nbudget: {{tokens: 8192}}\n")
    assert words in line


FIXED = "model: {d_model: 64, tied: true, mixer: {softmax: {heads: 2}}, position: none, layers: %s}\n"


@pytest.mark.parametrize(
    ("model", "sampler", "words"),
    [
        (FIXED % "{low: 2, high: 8}", "gp", ""),
        (FIXED % "[2, 4]", "gp", ""),
        (FIXED % "{low: 2, high: 8}", "cmaes", ""),
        (FIXED % "[2, 4]", "cmaes", "model.layers are choices"),
        ("", "gp", "always active"),
        ("", "cmaes", "always active"),
        ("", "grid", "optimizer.adamw.learning_rate hold real intervals"),
        (FIXED % "2" + "optimizer: {adamw: {learning_rate: 1e-3}}\n", "gp", "nothing to search"),
        (FIXED % "2" + "optimizer: {adamw: {learning_rate: 1e-3}}\n", "grid", ""),
        (FIXED % "[2, 4]" + "optimizer: {adamw: {learning_rate: [1e-3, 2e-3]}}\n", "grid", ""),
        ("", "random", ""),
        ("", "tpe", ""),
    ],
)
def test_a_sampler_is_refused_where_it_does_not_fit_the_space(model: str, sampler: str, words: str) -> None:
    text = f"{SMALL}{model}search:\n  sampler: {sampler}\n"
    if not words:
        assert load(text).search.sampler == sampler
    else:
        assert words in "\n".join(faults(text))


def test_an_experiment_comes_back_from_its_plain_form() -> None:
    experiment = load(
        SMALL
        + "model: {size: {params: 130k}, layers: {low: 2, high: 8, log: true}, pattern: [uniform, every_nth]}\n"
        + "baseline: {model: {layers: 9}}\nmax_hours: 2\nlimits: {max_params: 1M}\n"
        + "final: {contrasts: {a: {model.mixer: linear}}}\n",
        "search.trials=7",
    )
    plain = json.loads(json.dumps(experiment.plain(), allow_nan=False))
    again = from_plain(plain, toy_space, TASKS)
    assert again.plain() == experiment.plain()
    assert again.space.id == experiment.space.id
    assert again.identity() == experiment.identity()
    assert again.changed(again.baseline, again.final.contrasts[0]) == experiment.changed(
        experiment.baseline, experiment.final.contrasts[0]
    )
    with pytest.raises(ValueError, match="is no known task"):
        from_plain(plain, toy_space, {"other": TASKS["copying"]})


@pytest.mark.parametrize(
    "more",
    [
        "search: {trials: 99}",
        "engine: {jobs: 9}",
        "max_hours: 3",
        "max_tokens: 1B",
        "description: other words",
        "# only a comment",
        "model: {}",
    ],
)
def test_what_only_says_how_long_or_how_wide_leaves_the_identity_alone(more: str) -> None:
    assert difference(load(SMALL).identity(), load(SMALL + more).identity()) == []


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("search: {seed: 5}", "search.seed: 0 -> 5"),
        ("search: {sampler: random}", "search.sampler: tpe -> random"),
        ("engine: {threads: 2}", "engine.threads: 1 -> 2"),
        ("model: {layers: [2, 4]}", "model.layers: 1 to 64 -> 2 or 4"),
        ("model: {tied: false}", "model.tied: true or false -> false"),
        ("model: {pattern: [uniform, every_nth]}", "model.pattern: uniform -> every_nth, uniform"),
        ("limits: {max_params: 1M}", "limits.max_params: absent -> 1000000.0"),
        ("final: {contrasts: {chance: {}}}", "final.contrasts.chance: absent -> nothing"),
    ],
)
def test_every_other_edit_is_shown_with_old_and_new(more: str, line: str) -> None:
    lines = difference(load(SMALL).identity(), load(SMALL + more).identity())
    assert line in lines


def test_an_identity_is_json_and_stable_over_readings() -> None:
    first, second = load(SMALL).identity(), load(SMALL).identity()
    assert json.dumps(first, allow_nan=False) == json.dumps(second)
    assert difference(json.loads(json.dumps(first)), second) == []


@pytest.mark.parametrize("target", ["", "model: {size: {params: 130k}, pattern: [uniform, every_nth]}\n"])
def test_a_candidates_file_holds_that_point_alone(target: str) -> None:
    import random

    experiment = load(SMALL + target + "limits: {max_params: 1M}\nengine: {device: cpu}\n")
    rng = random.Random(0)
    for _ in range(20):
        point = random_point(experiment.space, rng)
        again = load(as_file(point, experiment))
        assert size(again.space) == 1
        assert default_point(again.space) == point
        assert (again.size, again.limits, again.task, again.budget) == (
            experiment.size,
            experiment.limits,
            experiment.task,
            experiment.budget,
        )
    assert load(as_file(point, experiment, name="winner")).name == "winner"


def test_a_broken_module_of_the_users_is_a_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, source, words in (
        ("broken_syntax", "def (", "SyntaxError"),
        ("broken_name", "x = y", "NameError"),
        ("broken_import", "import nothing_there", "ModuleNotFoundError"),
    ):
        (tmp_path / f"{name}.py").write_text(source)
        (line,) = faults(f"{SMALL}blocks: [{name}]\n")
        assert line.startswith("experiment:4: blocks cannot be imported")
        assert words in line
    (tmp_path / "sound.py").write_text("")
    assert load(f"{SMALL}blocks: [sound]\n").blocks == ("sound",)


def test_presets_are_found_by_name() -> None:
    assert {"quickstart", "attention", "positions", "norms_and_init", "full"} <= set(presets())
    assert all(preset_path(name).is_file() for name in presets())
    with pytest.raises(ValueError, match="did you mean 'quickstart'"):
        preset_path("quickstrat")
