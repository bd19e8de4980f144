"""Tests of analysis/report/: the parts of a report, its page, and what a browser makes of it."""

import html
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from conftest import store_uri

from analysis import landscape
from analysis.frame import Search
from analysis.report import write_report
from analysis.report.document import Document, Points, Section, Table, clean, markdown_page
from analysis.report.page import html_page
from search_space.records import Metric, Status

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
FLAGS += ["--disable-component-update", "--no-first-run"]
EVIL = '$x^{$ <script>alert(1)</script> ../../etc/passwd\n\N{ROCKET} "a\'b" | `c` \u202eturned \ud800 </script><!--'


@pytest.fixture(scope="module")
def report(uri: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(uri, "quickstart", tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def evil(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a search whose options and reasons are not harmless."""
    root = tmp_path_factory.mktemp("evil") / "mlruns"
    shutil.copytree(empty_store, root)
    writer = synthetic.Writer(store_uri(root), root, "evil")
    named = EVIL.replace("\ud800", "")
    for number, loss in enumerate((2.5, 2.4, 2.45)):
        flat = {**synthetic.BASELINE, "model.ffn.kind": named if number else "gelu"}
        writer.trial(number, flat, [(synthetic.EVERY, loss + 0.1), (synthetic.BUDGET, loss)])
    writer.trial(3, synthetic.BASELINE, [], status=Status.FAILED, reason=named)
    writer.finish()
    return write_report(store_uri(root), "evil", tmp_path_factory.mktemp("out"))


def charts(page: Path) -> dict[str, Any]:
    (data,) = re.findall(r'id="charts">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    held: dict[str, Any] = json.loads(data)
    return held


def test_the_first_section_answers_what_a_reader_asks(report: Path, search: Search) -> None:
    written = report.with_suffix(".md").read_text(encoding="utf-8")
    first = written[written.index("## In short") : written.index("## Verdicts")]
    best = search.finished.iloc[0]
    for question, answer in (
        ("What won?", f"`quickstart/{best['number']}`"),
        ("What won?", f"{best[Metric.LOSS]:.4f} nats/byte"),
        ("By how much?", "below the baseline, quickstart/0."),
        ("Is it sure?", "First place: quickstart/"),
        ("Is it sure?", "1 of 2 comparisons are decided"),
        ("Is it sure?", "rotary beats none by"),
        ("What did it cost?", "The whole search: 46 trainings"),
        ("How do I replay it?", "`assay replay quickstart/best`"),
    ):
        part = first[first.index(f"**{question}**") :].split("\n\n")[0]
        assert answer in part, (question, answer, part)
    page = re.sub(r"<[^>]+>", "", report.read_text(encoding="utf-8").replace("<wbr>", ""))
    for line in ("rotary beats none by", "below the baseline, quickstart/0.", "assay replay quickstart/best"):
        assert line in html.unescape(page)


def test_the_page_is_one_small_file_that_names_no_host(report: Path) -> None:
    written = report.read_text(encoding="utf-8")
    assert report.stat().st_size < 1_000_000
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", written)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", written)
    assert "default-src 'none'" in written


def test_every_chart_has_units_numbers_and_intervals(report: Path) -> None:
    written = report.read_text(encoding="utf-8")
    figures = re.findall(r'<figure data-chart="([^"]+)">.*?<figcaption>(.*?)</figcaption>', written, re.DOTALL)
    held = charts(report)
    assert {key for key, _ in figures} == set(held)
    assert {chart["kind"] for chart in held.values()} == {"xy", "rows", "grid"}
    for key, note in figures:
        assert re.search(r"n=\d+", note), key
        assert re.search(r"interval|degrees of freedom", note), key
        words = json.dumps(held[key]) + note
        assert "nats/byte" in words or "share" in words, key


def test_charts_show_the_numbers_of_the_trials(report: Path, search: Search) -> None:
    by_title = {chart["label"]: chart for chart in charts(report).values()}
    (curves,) = [chart for chart in by_title.values() if chart.get("lines")]
    best = next(item for item in curves["items"] if item["m"] == "best")
    assert best["p"][-1][1] == pytest.approx(search.finished[Metric.LOSS].iloc[0], rel=1e-5)
    assert len(curves["items"]) == search.curves[search.curves["stage"] == "search"]["run_id"].nunique()
    (front,) = [chart for chart in by_title.values() if "fronts" in chart]
    names = [axis["label"] for axis in front["x"]]
    losses = [item["y"] for item in front["items"]]
    flops = names.index("forward FLOPs/token")
    ringed = front["fronts"][flops]
    for place in ringed:
        x = front["items"][place]["x"][flops]
        cheaper = [y for item, y in zip(front["items"], losses, strict=True) if item["x"][flops] < x]
        assert all(y > losses[place] for y in cheaper)
    assert any(
        item["y"] is None and item["e"] == "diverged"
        for chart in by_title.values()
        for item in chart.get("items", ())
        if "y" in item
    )


def test_names_are_words_and_nothing_else(evil: Path) -> None:
    page = evil.read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert(1)" in page
    assert "\u202e" not in page
    assert "<script" not in evil.with_suffix(".md").read_text(encoding="utf-8").replace("`<script", "")
    assert sorted(path.suffix for path in evil.parent.iterdir()).count(".html") == 1


def test_unprintable_names_do_not_stop_a_report() -> None:
    table = Table(header=["a"], rows=[[EVIL]], name=EVIL)
    told = Document(title=EVIL, lead=[EVIL], sections=[Section(title="x", blocks=[Points(items=[EVIL]), table])])
    for written in (markdown_page(told), html_page(told)):
        written.encode("utf-8")
        assert "<script>alert" not in written.replace("`<script>alert", "")
    assert clean("a\n b\x00\x1b[1mc") == "a b[1mc"
    assert "\\|" in markdown_page(told)


def test_a_parabola_finds_the_best_rate_and_its_band_holds_the_truth() -> None:
    rng = np.random.default_rng(0)
    import pandas as pd

    rates = pd.Series(np.exp(rng.uniform(np.log(1e-4), np.log(1e-2), 60)))
    truth = lambda x: 2 + 0.1 * np.log(x / 1e-3) ** 2  # noqa: E731
    outcome = truth(rates) + 0.01 * rng.standard_normal(60)
    groups = pd.Series(["many"] * 55 + ["few"] * 5)
    fits = landscape.rate_fits(rates, outcome, groups)
    assert set(fits) == {"many"}
    at, middle, low, high = np.array(fits["many"]).T
    assert at[middle.argmin()] == pytest.approx(1e-3, rel=0.25)
    assert ((low < truth(at)) & (truth(at) < high)).mean() > 0.8


def test_shares_have_intervals_that_stay_between_none_and_all() -> None:
    assert landscape.share_interval(0, 10) == pytest.approx((0, 0.2775), abs=1e-3)
    assert landscape.share_interval(10, 10) == pytest.approx((0.7225, 1), abs=1e-3)
    assert landscape.share_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-3)


def test_cells_count_the_trials_that_hold_both_options(search: Search) -> None:
    outcome, _ = landscape.losses(search)
    cells = next(one for one in landscape.pairs(search) if one.name == "mixer × ffn")
    held = search.trials[search.trials["run_id"].isin(outcome.index)]
    for row, mixer in enumerate(cells.rows):
        for column, ffn in enumerate(cells.columns):
            both = held[(held["param/model.mixer.kind"] == mixer) & (held["param/model.ffn.kind"] == ffn)]
            assert cells.n[row, column] == len(both)
            if len(both):
                mean = outcome[both["run_id"]].mean() - outcome.mean()
                assert cells.mean[row, column] == pytest.approx(mean)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    if not CHROMIUM.exists():
        pytest.skip("needs Chromium; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield running
        running.close()


def opened(browser: Any, page: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    """The page in a fresh context, and everything it complained of or asked for."""
    said: list[str] = []
    tab = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: said.append(request.url))
    tab.on("dialog", lambda dialog: said.append(dialog.message))
    tab.goto(page.as_uri())
    return tab, [line for line in said if line != page.as_uri() and not line.startswith("data:")]


@pytest.mark.slow
@pytest.mark.browser
def test_a_browser_opens_it_without_error_request_or_serious_fault(browser: Any, report: Path, evil: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="needs axe-core: pip install axe-playwright-python")
    rules = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    for page, width, scheme in (
        (report, 390, "dark"),
        (report, 1280, "light"),
        (evil, 390, "light"),
    ):
        tab, said = opened(browser, page, width, scheme)
        assert said == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator("figure svg").count() == len(charts(page))
        # The page's own policy lets no other script in, so the rules come through the debugger.
        tab.context.new_cdp_session(tab).send("Runtime.evaluate", {"expression": rules})
        found = tab.evaluate("axe.run()")
        assert found["passes"]
        bad = [fault for fault in found["violations"] if fault["impact"] in ("serious", "critical")]
        assert not bad, [(fault["id"], [node["html"] for node in fault["nodes"][:3]]) for fault in bad]
        tab.context.close()


@pytest.mark.slow
@pytest.mark.browser
def test_a_reader_sorts_filters_hovers_toggles_and_prints(browser: Any, report: Path, search: Search) -> None:
    tab, said = opened(browser, report, 1280, "light")
    rows = tab.locator("table.sorts tbody tr")
    assert rows.count() == len(search.trials)
    tab.get_by_role("button", name="loss (nats/byte)").click()
    tab.get_by_role("button", name="loss (nats/byte)").click()
    shown = [float(text) for text in tab.locator("table.sorts tbody td:nth-child(3)").all_inner_texts() if text]
    assert shown == sorted(shown, reverse=True)
    tab.get_by_placeholder("e.g. rotary, pruned").fill("pruned rotary")
    visible = [row for row in rows.all() if row.is_visible()]
    pruned = search.trials[(search.trials["status"] == Status.PRUNED)]
    assert len(visible) == int((pruned["param/model.position.kind"] == "rotary").sum()) > 0

    figure = tab.locator("figure", has_text="Validation loss against training tokens").first
    lines = figure.locator("svg path[stroke-width]")
    before = lines.count()
    figure.get_by_role("button", name=re.compile("pruned")).click()
    assert 0 < lines.count() < before
    figure.locator("svg g circle").last.hover(force=True)
    tip = tab.locator("#tip")
    assert "training tokens" in tip.inner_text()
    assert "quickstart/" in tip.inner_text()
    figure.locator("select").select_option(label="mixer")
    assert figure.get_by_role("button", name=re.compile("softmax")).count() == 1

    tab.get_by_role("button", name="light / dark").click()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert len(tab.pdf()) > 20_000
    assert said == []
    tab.context.close()
