"""The tutorials run as they stand on their pages, their claims hold, and their pictures are there."""

import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
NAMES = sorted(page.stem for page in TUTORIALS.glob("*.md"))
PNG = b"\x89PNG\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_runs_and_draws_its_picture(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(TUTORIALS / "run.py"), name, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TUTORIALS.parents[1], timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = [file.name for file in tmp_path.iterdir()]
    shown = (TUTORIALS / f"{name}.md").read_text()
    assert drawn
    for picture in drawn:
        assert f"]({picture})" in shown, f"{name} draws {picture} and does not show it"
        assert (TUTORIALS / picture).read_bytes().startswith(PNG)
        assert (tmp_path / picture).read_bytes().startswith(PNG)


def test_every_picture_is_shown_by_a_page() -> None:
    pages = "".join(page.read_text() for page in TUTORIALS.glob("*.md"))
    for picture in TUTORIALS.glob("*.png"):
        assert f"]({picture.name})" in pages, f"no tutorial shows {picture.name}"
    assert len(NAMES) == 4
