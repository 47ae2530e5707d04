"""The page of `kvbackend matrix --html`: whole in itself, escaped, and alive in a real browser where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbackend.matrix import Cell, documents, page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
IN_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: apt-get install chromium")
EVIL = "</script><script>document.title = 'broken'</script><img src=x onerror=alert(1)> & \u2028 \"'"
CELLS = [
    Cell("paged_attention", "cpu", "cpu", "float32", "auto", "decode", "pass", (), 3.2e-7, "ran"),
    Cell("paged_attention", "cpu", "cpu", "bfloat16", "auto", "decode", "fail", (EVIL,), 0.5, "ran"),
    Cell("paged_attention", "npu", "npu", "bfloat16", "auto", "decode", "refused", ("a: b: c", "second reason")),
    Cell("copy_blocks", "cpu", "cpu", "float32", "auto", "padding", "crashed", ("its process ended",)),
    Cell("quantize_kv", "cuda", "cuda", "float16", "fp8_e4m3", "nan", "untested", ("no device",)),
    *(Cell("quantize_kv", "cpu", "cpu", "float32", "int8", f"sample {i}", "pass", (), 0.0, "ran") for i in range(450)),
]


@pytest.fixture(scope="module")
def text() -> str:
    return page.page([documents.document(CELLS, ["cpu"])])


def test_the_page_is_whole_in_itself(text: str) -> None:
    markup = re.sub(r'<script id="data".*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(", markup)
    assert "default-src 'none'" in markup


def test_no_text_of_a_cell_is_markup(text: str) -> None:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert not re.search("[<>&\u2028\u2029]", found[1])
    data = json.loads(found[1])
    assert [row[data["columns"].index("reasons")] for row in data["cells"]][1] == [EVIL]
    assert len(data["cells"]) == len(CELLS)
    assert "cpu" in data["runs"][0]
    assert "451 pass, 1 refused, 1 fail, 1 crashed, 1 untested" in data["runs"][0]


@pytest.fixture
def browser(text: str, tmp_path: Path) -> Callable[..., Any]:
    """`browser(address after the #, script, screenshot)`: the rows shown, after a script has run."""

    def see(fragment: str = "", script: str = "", screenshot: Path | None = None) -> str:
        place = tmp_path / "matrix.html"
        place.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
        wanted = [f"--screenshot={screenshot}", "--window-size=1400,1000"] if screenshot else ["--dump-dom"]
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000",
            f"--user-data-dir={tmp_path / 'profile'}", *wanted, f"{place.as_uri()}#{fragment}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    return see


def rows(dom: str, table: str = "cells") -> list[list[str]]:
    """The texts of a table's body."""
    body = re.search(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', dom, re.DOTALL)
    assert body is not None
    return [
        [
            html.unescape(re.sub("<[^>]+>", "|", place)).strip("|")
            for place in re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row)
        ]
        for row in re.findall(r"<tr>(.*?)</tr>", body[1], re.DOTALL)
    ]


@IN_BROWSER
def test_the_address_filters(browser) -> None:
    found = rows(browser("op=paged_attention&verdict=refused"))
    reasons = "a: b: c||second reason"
    assert found == [["refused", "paged_attention", "npu", "npu", "bfloat16", "auto", "decode", "", reasons, ""]]


@IN_BROWSER
def test_reasons_are_shown_as_text(browser) -> None:
    dom = browser("verdict=fail")
    assert "<title>kvbackend matrix</title>" in dom
    assert rows(dom)[0][7:9] == ["5.0e-1", EVIL]


@IN_BROWSER
def test_each_filter_and_the_search_work_by_hand(browser) -> None:
    choose = "const f = document.querySelector('[name={0}]'); f.value = '{1}'; f.dispatchEvent(new Event('{2}'));"
    for name, value, event, count in (
        ("op", "copy_blocks", "change", 1),
        ("backend", "npu", "change", 1),
        ("dtype", "bfloat16", "change", 2),
        ("format", "fp8_e4m3", "change", 1),
        ("verdict", "crashed", "change", 1),
        ("text", "SECOND reason", "input", 1),
    ):
        dom = browser(script=choose.format(name, value, event))
        assert len(rows(dom)) == count, name
        assert f"Cells: {count} of {len(CELLS)}" in dom


@IN_BROWSER
def test_the_overview_filters_and_reset_takes_it_back(browser) -> None:
    click = "document.querySelector('#overview button.crashed').click();"
    assert [row[1] for row in rows(browser(script=click))] == ["copy_blocks"]
    overview = rows(browser(script=click + "document.querySelector('#filters button').click();"), "overview")
    assert [row[0] for row in overview] == ["paged_attention", "copy_blocks", "quantize_kv"]
    assert overview[0] == ["paged_attention", "1 pass||1 fail", "1 refused", ""]


@IN_BROWSER
def test_many_cells_are_shown_when_asked_for(browser) -> None:
    assert len(rows(browser())) == 400
    assert len(rows(browser(script="document.getElementById('more').click();"))) == len(CELLS)


@IN_BROWSER
def test_the_screenshot_is_light_and_shows_verdicts(browser, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed: it reads the screenshot")
    browser(screenshot=tmp_path / "page.png")
    pixels = image.imread(tmp_path / "page.png")[..., :3]
    assert pixels.shape[:2] == (1000, 1400)
    assert pixels.mean() > 0.9  # light
    darkest = pixels.mean(-1).min()
    assert darkest < 0.25  # and legible: text is nearly black on nearly white
    for name, color in {"pass": "dafbe1", "fail": "ffd7d5", "refused": "eaeef2"}.items():
        wanted = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        assert (abs(pixels - wanted).max(-1) < 0.01).sum() > 200, name
