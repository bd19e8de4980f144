"""What a frame holds of trials whose settings changed on their way."""

from analysis.assembling import settings_of
from analysis.fastread import RunRow
from search_space.records import Tag

PARAMS = {"optimizer.adamw.learning_rate": "0.01", "optimizer.adamw.learning_rate_2": "1", "model.layers": "2"}
LINE = (
    "at 256 tokens from the state of trial 2 (loss 3.4680 against 3.5042): optimizer.adamw.learning_rate 0.01 -> 0.02"
)


def row(**tags: str) -> RunRow:
    return RunRow(
        run_id="a",
        name="a",
        state="FINISHED",
        start=0.0,
        end=0.0,
        artifact_uri="",
        experiment_id="0",
        search="bred",
        params=dict(PARAMS),
        metrics={},
        tags=tags,
    )


def test_a_setting_that_changed_on_the_way_explains_no_loss() -> None:
    assert settings_of(row()) == PARAMS
    kept = settings_of(row(**{Tag.MUTATIONS: LINE}))
    assert kept.keys() == PARAMS.keys() - {"optimizer.adamw.learning_rate"}
