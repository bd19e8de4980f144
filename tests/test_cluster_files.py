"""The files for clusters are well formed, and every command in them exists."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from runners.cli import _parser
from search_space.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/cluster.md", "docs/cluster/search.sbatch", "docs/cluster/rayjob.yaml")
PLACES = {"FILE": "quickstart", "RUN": "name/0", "NAME": "name", "DIR": "folder", r"\bN\b": "2", r'"\$1"': "quickstart"}


def commands(text: str) -> list[str]:
    """Every `assay ...` line of blocks and quoted code, without remarks."""
    lines = [line.strip() for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`(?:\.venv/bin/)?(assay [^`]+)`", text)
    lines += [line.partition("entrypoint: ")[2] or line for line in text.splitlines()]
    return sorted({line.partition("  #")[0].strip() for line in lines if line.startswith("assay ")})


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_taken(page: str) -> None:
    found = commands((ROOT / page).read_text())
    assert found
    for line in found:
        for name, value in PLACES.items():
            line = re.sub(name, value, line)
        for words in (re.sub(r"\[[^\]]*\]", "", line), line.replace("[", "").replace("]", "")):
            if len(words.split()) == 2:  # Named in a sentence.
                words += " --help"
            try:
                _parser().parse_args(shlex.split(words)[1:])
            except SystemExit:
                assert words.endswith("--help")
            except UserError as error:
                pytest.fail(f"{page}: {words}: {error}")


def test_the_job_for_kuberay_has_what_the_operator_needs() -> None:
    (job,) = yaml.safe_load_all((ROOT / "docs/cluster/rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert spec["entrypoint"].startswith("assay search ")
    cluster = spec["rayClusterSpec"]
    (pinned,) = re.findall(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert cluster["rayVersion"] == pinned
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups[1:]:
        assert group["groupName"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["name"]
            assert container["image"]
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["resources"]["limits"] == container["resources"]["requests"]
            assert all(variable.keys() == {"name", "value"} for variable in container["env"])


def test_the_script_for_slurm_is_a_script() -> None:
    script = ROOT / "docs/cluster/search.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    options = re.findall(r"^#SBATCH --([a-z-]+)=?", script.read_text(), re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "time", "requeue", "signal"} <= set(options)
    assert not re.search(r"^#SBATCH", script.read_text().partition("set -euo")[2], re.MULTILINE)
