"""The examples of docs/plan.md print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbackend.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text("utf-8")
EXAMPLES = re.findall(r"```\n\$ kvbackend (.*?)\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize(("command", "printed"), EXAMPLES)
def test_examples(command: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 0
    assert capsys.readouterr().out == printed
