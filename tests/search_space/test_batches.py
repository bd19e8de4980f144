"""Tests of search_space/batches.py."""

from search_space.batches import Coverage, batch_name, coverage, is_settled, joined, newest, newest_tag, own_place
from search_space.records import Status, Tag


def test_the_newest_batch_of_every_driver_stands_on_the_parent() -> None:
    tags = {newest_tag(""): "12", newest_tag("ab12"): "3", Tag.KIND: "search", f"{Tag.BATCH}.odd": "edited by hand"}
    assert newest(tags) == {"": 12, "ab12": 3}
    assert (batch_name(12, ""), batch_name(3, "ab12")) == ("12", "3.ab12")


def test_coverage_lacks_what_no_table_holds_and_survives_its_text() -> None:
    whole = joined([Coverage(through={"": 2}), Coverage(single=frozenset(["4", "1.ab12"])), Coverage(through={"": 1})])
    assert coverage(whole.to_text()) == whole
    assert whole.lacking({"": 5, "ab12": 2, "cd": 1}) == ["3", "5", "2.ab12", "1.cd"]
    assert Coverage().lacking({}) == []


def test_a_run_is_settled_once_it_has_ended_for_good() -> None:
    assert is_settled("FINISHED", {Tag.STATUS: Status.OK})
    assert is_settled("FAILED", {})
    assert not is_settled("RUNNING", {Tag.STATUS: Status.OK})
    assert not is_settled("KILLED", {Tag.STATUS: Status.PREEMPTED})


def test_artifacts_beside_the_parents_are_found() -> None:
    assert own_place("mlflow-artifacts:/1/aa/artifacts", "aa", "bb") == "mlflow-artifacts:/1/bb/artifacts"
