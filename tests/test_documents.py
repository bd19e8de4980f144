"""What the documents say is true: examples run, named files and commands exist."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from blocks import cost, registry
from blocks.families import AbstractMixer, Role
from blocks.model import DecoderLM
from runners.candidate import full_space, make_spec, rebuild, resolve
from runners.cli import _parser
from runners.tasks import TASKS, task_from_plain
from runners.train import run_trial
from search_space import experiment as experiments
from search_space.records import Seeds, Status
from search_space.space import default_point

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_readme_fits_on_a_few_screens_and_leaves_no_gap() -> None:
    assert len(README.splitlines()) <= 150
    assert "@@" not in README


def test_readme_experiment_file_is_good() -> None:
    (example,) = fenced(README, "yaml")
    read = experiments.read(example, full_space=full_space, tasks=TASKS)
    resolve(default_point(read.space), read, task_from_plain(read.task).shape())


def test_readme_names_every_command_and_preset() -> None:
    choices = _parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for command in choices:
        assert f"assay {command}" in README
    for preset in experiments.presets():
        assert f"`{preset}`" in README or preset.startswith("findings/")


PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("document", PAGES)
def test_links_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    prose = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        assert "://" in target or (folder / target).exists(), f"{document} links to {target}, which does not exist"


@pytest.fixture
def average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The example block of CONTRIBUTING as a module outside the repository; unregistered afterwards."""
    (source,) = fenced(CONTRIBUTING, "python")
    (tmp_path / "average_example.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(registry._VARIANTS[AbstractMixer]) if registry.variants(AbstractMixer) else {}
    yield "average_example"
    registry._VARIANTS[AbstractMixer].clear()
    registry._VARIANTS[AbstractMixer].update(before)
    sys.modules.pop("average_example", None)
    importlib.invalidate_caches()


def model_of(module: str) -> DecoderLM:
    full_space((module,))
    mixer = registry.lookup(AbstractMixer, "average")()
    return small_config(mixer).build(seed=0)


def small_config(mixer: AbstractMixer):  # type: ignore[no-untyped-def]
    from blocks.model import ModelConfig

    plain = {
        "mixer": {"kind": mixer.kind, mixer.kind: registry.encode(mixer)},
        **{
            name: {"kind": kind, kind: {}}
            for name, kind in {
                "premixer": "none",
                "pattern": "uniform",
                "position": "none",
                "ffn": "gelu",
                "norm": "layernorm",
                "placement": "pre",
                "init": "scaled_normal",
            }.items()
        },
        "d_model": 32,
        "d_ff": 64,
        "layers": 2,
    }
    return registry.decode(ModelConfig, plain, vocab_size=64, train_len=32, max_len=32)


def test_example_block_is_causal_decodes_and_is_counted(average: str) -> None:
    model = model_of(average).eval()
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, _ = model(tokens)
        changed = tokens.clone()
        changed[:, 9] = (changed[:, 9] + 1) % 64
        assert torch.equal(model(changed)[0][:, :9], logits[:, :9])
        state = model.empty_state(2)
        first, state = model.step(tokens[:, :5], state, 0)
        rest, _ = model.step(tokens[:, 5:], state, 5)
    torch.testing.assert_close(torch.cat([first, rest], 1), logits, rtol=1e-5, atol=1e-5)
    assert all(isinstance(parameter.role, Role) for parameter in model.parameters())
    assert cost.measure(model.config, 17).params == sum(parameter.numel() for parameter in model.parameters())


def test_example_block_trains_from_an_experiment_file(average: str) -> None:
    text = f"""
name: own_block
blocks: [{average}]
task: {{mqar: {{seq_len: 32, pairs: 4, vocabulary: 64}}}}
budget: {{tokens: 2048, batch_tokens: 256, eval_tokens: 256}}
model: {{size: {{params: 20k}}, layers: 1, mixer: average, position: none, ffn: gelu}}
optimizer: {{adamw: {{learning_rate: 1e-2}}}}
"""
    read = experiments.read(text, full_space=full_space, tasks=TASKS)
    task = task_from_plain(read.task)
    data = task.prepare()
    resolved = resolve(default_point(read.space), read, task.shape())
    spec = make_spec(resolved, read, fingerprint=data.fingerprint, seeds=Seeds(init=0, data=0, dropout=0))
    assert rebuild(spec).model.mixer.kind == "average"
    result = run_trial(spec, data, lambda reading: True)
    assert result.status == Status.OK, result.last_lines
    assert result.curve[-1].loss < result.curve[0].loss
