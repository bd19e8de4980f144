"""The tables of blocks: each has a paper, a proof that exists and a reference, and docs/blocks.md is not stale."""

import ast
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reference_table import LIBRARIES, table_rows

from runners import blocktable
from runners.cli import main

TESTS = Path(__file__).parent
TABLE = blocktable.table()
ROWS = {f"{family}.{row['kind']}": row for family, rows in TABLE.items() for row in rows}


def names_of_tests() -> Counter[str]:
    """How often each name of a test function occurs."""
    trees = [ast.parse(file.read_text()) for file in TESTS.rglob("test_*.py")]
    return Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_block_has_a_paper_a_reference_and_a_test_that_proves_it() -> None:
    names = names_of_tests()
    for block, row in ROWS.items():
        assert row["meaning"], f"{block} has no docstring"
        assert row["paper"], f"{block} has no paper"
        assert "](http" in blocktable.linked(row["paper"], "[{words}]({place})"), f"{block}: its paper has no link"
        assert row["reference"], f"{block} has no reference: say what its proof compares it with"
        assert names[row["proof"]] == 1, f"{block}: proof {row['proof']!r} names {names[row['proof']]} tests, not one"


def test_a_reference_to_a_library_was_measured() -> None:
    measured = {row[0] for row in table_rows()}
    for block, row in ROWS.items():
        library = row["reference"].split()[0]
        assert library not in LIBRARIES or block in measured, f"{block} against {row['reference']} has no row"


def test_the_committed_page_is_what_the_registry_says() -> None:
    committed = (TESTS.parent / "docs" / "blocks.md").read_text()
    assert committed == blocktable.markdown(TABLE), "docs/blocks.md is stale; run `make docs` and commit the change"


def test_stacks_are_those_that_can_be_built() -> None:
    assert ROWS["mixer.softmax"]["stacks"] == ["decoder", "encoder", "encoder_decoder", "prefix_lm"]
    assert ROWS["mixer.linformer"]["stacks"] == ["encoder"]
    assert ROWS["position.none"]["stacks"] == ["decoder"]
    assert ROWS["stack.encoder"]["stacks"] == ["encoder"]
    assert all(row["stacks"] for row in ROWS.values())


class Cells(HTMLParser):
    """Counts what is opened and closed, and keeps the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_sound_and_has_every_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "blocks.html"
    assert main(["blocks", "--html", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    cells = Cells()
    cells.feed(file.read_text())
    assert not cells.open
    assert set(cells.ids) == ROWS.keys() | TABLE.keys()


def test_what_words_hold_is_escaped() -> None:
    row = {**ROWS["position.none"], "meaning": "a < b & c | d"}
    assert "a &lt; b &amp; c" in blocktable.page({"position": [row]})
    assert "c \\| d" in blocktable.markdown({"position": [row]})


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocks", "--family", "norm", "--markdown", str(tmp_path / "absent" / "blocks.md")]) == 2
    assert "name a file in a folder that exists" in capsys.readouterr().err
