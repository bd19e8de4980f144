"""Each file in bad/ has one fault; its first line says where the reader must find it and what it must advise."""

import re
from pathlib import Path

import pytest

from runners.candidate import full_space
from runners.tasks import TASKS
from search_space.experiment import ExperimentError, read

FOLDER = Path(__file__).parent / "bad"
FILES = sorted(FOLDER.glob("*.yaml"))
EXPECTED = re.compile(r"# line (\d+): (.+)")


def test_there_are_at_least_thirty_malformed_files() -> None:
    assert len(FILES) >= 30


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_malformed_file_gives_one_message_that_names_the_line_and_the_remedy(file: Path) -> None:
    expected = EXPECTED.fullmatch(file.read_bytes().split(b"\n")[0].decode())
    assert expected is not None, f"{file.name} does not begin with '# line N: remedy'"
    with pytest.raises(ExperimentError) as caught:
        read(file, full_space=full_space, tasks=TASKS)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == (str(file), int(expected[1])), str(problem)
    assert expected[2] in problem.message
    assert str(caught.value).startswith(f"{file}:{expected[1]}: ")
