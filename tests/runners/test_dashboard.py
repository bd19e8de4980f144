import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from tracked import free_port, result, searched, store_uri

from analysis.report import write_report
from runners.commands.report import show
from runners.connecting import StoreError
from runners.dashboard import DashboardError, serve, start, stop, table_url
from runners.store import Store
from runners.tracking import Tracker
from search_space.places import locate

ROOT = Path(__file__).parents[2]
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextmanager
def browser_page() -> Iterator[Any]:
    """A page of a headless Chromium with a fresh profile; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    if not CHROMIUM.exists():
        pytest.skip("needs Chromium; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = browser.new_page(viewport={"width": 2400, "height": 900})
        # MLflow opens a chat panel beside the table on a first visit, and draws only the columns that fit.
        page.add_init_script("localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false')")
        page.add_init_script("localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')")
        page.set_default_timeout(60_000)
        try:
            yield page
        finally:
            browser.close()


def filled(folder: Path, trials: int = 3) -> tuple[str, Run, list[Run]]:
    """A store with one search: its URI, the parent, the children."""
    uri, search, tracker = store_uri(folder), searched(), Tracker(store_uri(folder))
    search.start(tracker)
    for number in range(trials):
        tracker.finish_trial(search.start_trial(tracker, number), result(count=3 + number))
    tracker.finish_search("FINISHED", {"best_loss": 2.6})
    store = Store(locate(uri))
    return uri, store.parent("tiny"), store.children(store.parent("tiny"))


@pytest.mark.slow
@pytest.mark.browser
def test_a_browser_finds_the_search_its_trials_and_the_columns_to_compare_them_by(tmp_path: Path) -> None:
    uri, parent, _ = filled(tmp_path)
    port = free_port()
    server = start(locate(uri), port)
    address = f"http://127.0.0.1:{port}"
    artifacts = ROOT / "ci-artifacts"
    artifacts.mkdir(exist_ok=True)
    try:
        with browser_page() as page:
            page.goto(table_url(address, parent.info.experiment_id))
            for name in ("tiny", "000 tiny", "001 tiny", "002 tiny"):
                page.get_by_role("link", name=name, exact=True).last.wait_for()
            header = page.locator("[role=columnheader]").all_inner_texts()
            for column in ("loss", "params", "flops_per_token", "model.mixer.kind", "model.position.kind"):
                assert column in header, header
            names = [text for text in page.locator("[role=gridcell] a").all_inner_texts() if text.endswith("tiny")]
            assert names == ["002 tiny", "001 tiny", "000 tiny", "tiny"]
            page.screenshot(path=str(artifacts / "dashboard-runs.png"))
    finally:
        stop(server)


@pytest.mark.slow
@pytest.mark.browser
def test_a_browser_walks_from_the_search_to_five_trials_its_report_and_a_curve(tmp_path: Path) -> None:
    uri, parent, children = filled(tmp_path, trials=5)
    page_file = write_report(uri, "tiny", tmp_path / "report")
    show(Store(locate(uri)), "tiny", page_file)
    port = free_port()
    server = start(locate(uri), port)
    of = f"http://127.0.0.1:{port}/#/experiments/{parent.info.experiment_id}"
    asked: list[str] = []
    try:
        with browser_page() as page:
            page.on("request", lambda request: asked.append(request.url))
            page.goto(f"{of}/runs/{parent.info.run_id}")
            page.get_by_text("What won?").first.wait_for()
            page.get_by_text("search/best_loss").first.wait_for()
            page.get_by_role("link", name="004 tiny").first.wait_for()

            page.get_by_role("tab", name="Model metrics").click()
            page.locator(".plotly .scatterlayer path.point").first.wait_for()

            page.goto(f"{of}/runs/{parent.info.run_id}/artifacts/report/report.html")
            report = page.frame_locator("iframe")
            report.get_by_role("heading", name="In short").wait_for()
            report.locator("figure svg").first.wait_for()
            report.get_by_text("assay replay tiny/best").first.wait_for()

            runs = json.dumps([run.info.run_id for run in children])
            experiments = json.dumps([parent.info.experiment_id])
            page.goto(f"{of.partition('#')[0]}#/compare-runs?runs={runs}&experiments={experiments}")
            page.get_by_text("Comparing 5 Runs from 1 Experiment").wait_for()
            page.get_by_text("model.mixer.kind").last.wait_for()

            page.goto(f"{of}/runs/{children[0].info.run_id}")
            page.get_by_text("assay replay tiny/0").first.wait_for()
            page.get_by_role("tab", name="Model metrics").click()
            page.locator(".plotly .scatterlayer path.point").nth(2).wait_for()
    finally:
        stop(server)
    own = (f"http://127.0.0.1:{port}", "blob:", "data:")
    assert [url for url in asked if not url.startswith(own)] == []


@pytest.mark.slow
def test_the_dashboard_prints_its_address_serves_artifacts_and_ends_on_interrupt(tmp_path: Path) -> None:
    uri, _, children = filled(tmp_path / "made")
    (tmp_path / "made").rename(tmp_path / "moved")
    uri = store_uri(tmp_path / "moved")
    port = free_port()
    code = f"import sys; from runners.dashboard import serve; sys.exit(serve({uri!r}, {port}))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port} " in process.stdout.readline()
        assert "tiny: http://127.0.0.1" in process.stdout.readline()
        spec = f"http://127.0.0.1:{port}/get-artifact?path=spec.json&run_uuid={children[0].info.run_id}"
        with urllib.request.urlopen(spec, timeout=60) as answer:
            assert "candidate" in json.load(answer)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_taken_port_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DashboardError, match=f"--port {port}: is taken"):
            serve(store_uri(tmp_path), port)


def test_a_store_that_is_not_there_gets_no_dashboard(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such file"):
        serve(f"sqlite:///{tmp_path}/none.db", free_port())
