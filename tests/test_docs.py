"""Examples in Python that the pages show with their output print just that; links lead to files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvbackend
from kvbackend import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = [
    pytest.param(code, printed, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (code, printed) in enumerate(
        re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    )
]


def test_pages_have_examples() -> None:
    assert {str(case.id).split("-")[0] for case in SHOWN} >= {"eviction.md", "sparse.md"}


@pytest.mark.parametrize(("code", "printed"), SHOWN)
def test_examples_print_what_the_page_says(code: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with kvbackend.use("reference"):  # what is printed does not depend on who computes it
        exec(compile(code, "example", "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    made = {"index.md", "ops.md", "commands.md", "contributing.md", "changelog.md"}  # by ci/docs_site.py
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text("utf-8"))
    assert [link for link in links if link not in made and not (page.parent / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert {page.name for page in PAGES[1:]} <= set(listed)


def test_the_chinese_readme_names_what_the_english_one_does() -> None:
    english, chinese = ((ROOT / name).read_text("utf-8") for name in ("README.md", "README.zh-CN.md"))
    named = set(re.findall(r"KVBACKEND_[A-Z_]+", english))
    named |= set(re.findall(r"\bkvbackend (\w+)", english)) & cli.COMMANDS.keys()
    assert {name for name in named if name not in chinese} == set()
    code = [re.sub(r" *#.*| -> .*|, return_lse=True", "", text) for text in (english, chinese)]
    assert len({re.search(r"cache = PagedCache\(.*?seq = ", text, re.DOTALL)[0] for text in code}) == 1
