"""A deep model's whole configuration comes back byte by byte from the study, the tracking store and a replay."""

from pathlib import Path

import pytest
from studied import EXPERIMENT, experiment, uri
from tracked import store_uri

from runners.cli import main
from runners.search import run_search
from runners.store import Store
from runners.study import Study
from runners.tracking import Tracker
from search_space.canon import canonical_json
from search_space.places import locate
from search_space.records import Artifact, Status, to_plain

LAYERS = 48
PATTERN = "{every_nth: {every: 6, mixer: {sliding_window: {kv_heads: 1, queries_per_kv: 1, head_dim: 8, window: 8}}}}"
DEEP = EXPERIMENT.replace("layers: 1", f"layers: {LAYERS}").replace("tokens: 1024", "tokens: 256")


@pytest.mark.slow
def test_a_model_of_48_layers_comes_back_byte_by_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = experiment("search.trials=1", f"model.pattern={PATTERN}", text=DEEP)
    outcome = run_search(asked, tracker=Tracker(store_uri(tmp_path)), study_uri=uri(tmp_path))
    assert outcome.counts == {Status.OK: 1}
    with Study.open(uri(tmp_path), asked) as study:
        (entry,) = study.trials()
    stored = canonical_json(to_plain(entry.spec))
    assert entry.spec.candidate["model"]["layers"] == LAYERS
    store = Store(locate(store_uri(tmp_path)))
    run = store.find_run("small/0")
    assert store.text(run, Artifact.SPEC) == stored
    assert canonical_json(to_plain(store.spec(run))) == stored
    assert run.data.params["model.layers"] == str(LAYERS)
    assert main(["replay", "small/0", "--tracking-uri", store_uri(tmp_path)]) == 0
