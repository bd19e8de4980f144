"""A file becomes an experiment with everything filled in, or a list of all that is wrong with it."""

import math
import re
from pathlib import Path

import pytest
from toy_space import SMALL, TASKS, faults, load, toy_space

from search_space.experiment import (
    Contrast,
    EngineSpec,
    ExperimentError,
    FinalSpec,
    FreeSize,
    Limits,
    SearchSpec,
    SizeTarget,
    difference,
    from_plain,
    preset_path,
    presets,
    read,
)
from search_space.records import Budget
from search_space.space import default_point, holds


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


def test_diagnostics_belong_to_the_identity_only_of_searches_that_ask_for_them() -> None:
    plain, asked = load(SMALL), load(SMALL, "search.diagnostics=true")
    assert not plain.search.diagnostics
    assert asked.search.diagnostics
    assert "diagnostics" not in plain.identity()["search"]
    assert load(SMALL, "search.diagnostics=false").identity() == plain.identity()
    assert difference(plain.identity(), asked.identity()) == ["search.diagnostics: absent -> true"]
    assert from_plain(asked.plain(), toy_space, TASKS).search == asked.search


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


def test_an_empty_baseline_is_the_declared_default() -> None:
    experiment = load(SMALL + "baseline: {}")
    assert experiment.baseline == default_point(experiment.space)
    assert "takes a mapping" in faults(SMALL + "baseline:")[0]


def test_a_width_that_is_solved_for_cannot_be_given_elsewhere() -> None:
    sized = SMALL + "model: {size: {params: 130k}}\n"
    assert (
        "experiment:5: baseline.model.d_model is solved for by model.size"
        in faults(sized + "baseline: {model: {d_model: 64}}")[0]
    )
    assert "is solved for by model.size" in faults(sized + "final: {contrasts: {wide: {model.d_model: 64}}}")[0]
    assert "takes 16 to 4096, step 16" in faults(SMALL + "baseline: {model: {d_model: 100}}")[0]


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
    kind: {model.mixer.kind: linear}
    nested: {model: {mixer: {softmax: {heads: 1}}, tied: false}}
    chance: {}
"""
    )
    depth, linear, heads, kind, nested, chance = experiment.final.contrasts
    point = default_point(experiment.space)
    assert experiment.changed(point, depth) == {**point, "model.layers": 9}
    assert experiment.changed(point, heads) == {**point, "model.mixer.softmax.heads": 4}
    assert experiment.changed(point, nested) == {**point, "model.mixer.softmax.heads": 1, "model.tied": False}
    assert kind.change == linear.change
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
