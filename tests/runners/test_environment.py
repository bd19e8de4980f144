import json
import os
import subprocess
from pathlib import Path

import pytest

from runners import environment
from runners.driver import is_dead, this_driver
from runners.environment import ROOT, capture, differences, module_digest, package_digest
from search_space.errors import UserError


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed checkout with one source file, in place of ours."""
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks/a.py").write_text("A = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    return tmp_path


def test_versions_and_code_are_recorded_as_plain_json() -> None:
    plain = json.loads(json.dumps(capture().plain()))
    assert plain["packages"]["torch"]
    assert len(plain["package_digest"]) == 64
    assert "torch==" in capture().lock()
    assert plain["id"] == capture().id


def test_every_change_of_a_source_that_can_move_numbers_changes_the_digest(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks/a.py").write_text("A = 1\n")
    first = package_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("no matter")
    assert package_digest(tmp_path) == first
    (tmp_path / "blocks/a.py").write_text("A = 2\n")
    second = package_digest(tmp_path)
    (tmp_path / "blocks/a.py").rename(tmp_path / "blocks/b.py")
    assert len({first, second, package_digest(tmp_path)}) == 3


def test_the_diff_rebuilds_the_working_tree_new_files_included(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert capture().diff == ""
    (checkout / "blocks/a.py").write_text("A = 3\n")
    (checkout / "blocks/new.py").write_text("B = 1\n")
    found = capture()
    assert found.commit == git(checkout, "rev-parse", "HEAD").strip()
    other = tmp_path_factory.mktemp("other")
    git(other, "clone", "-q", str(checkout), ".")
    (other / "d.diff").write_text(found.diff)
    git(other, "apply", "d.diff")
    assert (other / "blocks/a.py").read_text() == "A = 3\n"
    assert (other / "blocks/new.py").read_text() == "B = 1\n"


def test_code_outside_a_checkout_is_recorded_without_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    found = capture()
    assert (found.commit, found.diff) == ("", "")


def test_a_users_module_is_digested_with_the_packages_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "digested_package"
    package.mkdir()
    (package / "__init__.py").write_text("X = 1\n")
    (package / "mixer.py").write_text("Y = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = capture(("digested_package.mixer",))
    assert found.sources == {"digested_package/__init__.py": "X = 1\n", "digested_package/mixer.py": "Y = 1\n"}
    before = module_digest("digested_package.mixer")
    assert found.blocks == {"digested_package.mixer": before}
    (package / "mixer.py").write_text("Y = 2\n")
    assert module_digest("digested_package.mixer") != before


def test_a_module_that_cannot_be_found_is_named_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"'no_such_package\.mixer' cannot be imported.*install the package"):
        capture(("no_such_package.mixer",))


def test_differences_name_what_changed_and_only_that() -> None:
    now = capture()
    recorded = now.plain()
    assert differences(recorded, now) == []
    recorded["packages"] = {**recorded["packages"], "torch": "1.0"}
    recorded["commit"] = "a" * 40
    lines = differences(recorded, now)
    assert len(lines) == 2
    assert lines[0].startswith("commit: recorded aaaaaaaaaaaa, here ")
    assert lines[1].startswith("packages.torch: recorded 1.0, here ")


def test_our_own_sources_are_covered() -> None:
    assert (ROOT / "runners/train.py").is_file()
    assert (ROOT / "blocks/model.py").is_file()


def test_a_driver_is_alive_until_its_process_is_gone_or_another_has_its_id() -> None:
    assert not is_dead(this_driver())
    host, pid, start = this_driver().split(":")
    assert is_dead(f"{host}:{pid}:{int(start) + 1}")
    process = subprocess.Popen(["true"])
    process.wait()
    assert is_dead(f"{host}:{process.pid}:1")
    assert not is_dead(f"elsewhere:{os.getpid()}:1")
    assert not is_dead("")
