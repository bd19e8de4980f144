"""benchmarks/positions.py measures a scheme and writes its page and picture; the committed page has every scheme."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from blocks import registry
from blocks.families import AbstractPosition

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(\w+)`.* \| (relative|absolute \([\d.e+-]+ nats\)) \| ([\d,]+) \| ([\d.]+) \| ", re.MULTILINE)


def test_the_committed_page_has_every_scheme() -> None:
    rows = ROW.findall((ROOT / "docs" / "positions.md").read_text())
    assert sorted(row[0] for row in rows) == list(registry.variants(AbstractPosition))
    assert (ROOT / "docs" / "positions.png").exists()


@pytest.mark.slow
def test_schemes_are_measured_on_the_same_scale(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/positions.py", "--only", "alibi", "sinusoidal", "--tokens", "8192"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row[0]: row for row in ROW.findall((tmp_path / "positions.md").read_text())}
    assert rows["alibi"][1] == "relative"
    assert rows["sinusoidal"][1].startswith("absolute")
    for kind in ("alibi", "sinusoidal"):
        assert rows[kind][2] == "0", "neither scheme has parameters"
        assert 2.5 < float(rows[kind][3]) < 5.6, "eight steps learn a little"
    assert (tmp_path / "positions.png").read_bytes().startswith(b"\x89PNG")
