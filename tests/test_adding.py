"""docs/adding_a_backend.md and the README's toy, as they stand: files are written, commands run, output is as shown."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvbackend

PACKAGE = Path(kvbackend.__file__).parent
PAGE, README = PACKAGE.parent / "docs" / "adding_a_backend.md", PACKAGE.parent / "README.md"


def blocks(page: Path, *kinds: str) -> list[str]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind in kinds]


def files(page: Path) -> dict[str, str]:
    """What stands on it under the name of a file."""
    found = {text.splitlines()[0]: text for text in blocks(page, "python", "toml")}
    return {line.removeprefix("# "): text for line, text in found.items() if re.fullmatch(r"# [\w./-]+", line)}


def commands(page: Path) -> list[tuple[str, str]]:
    """Each command, and what it prints."""
    return [
        found
        for text in blocks(page, "console")
        for found in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """`laid(page)`: a folder with a copy of kvbackend, since the pages add to it, and the page's files."""

    @functools.cache
    def lay(page: Path) -> Path:
        folder = tmp_path_factory.mktemp(page.stem)
        shutil.copytree(PACKAGE, folder / "kvbackend", ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in files(page).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            assert not path.exists(), "the page may add files, not change them"
            path.write_text(text)
        return folder

    return lay


def run(place: Path, command: str) -> str:
    """What a command of the page prints. pip installs into the folder, from what is here already."""
    tools = place / "bin"
    tools.mkdir(exist_ok=True)
    options = f"--no-build-isolation --no-deps --no-index --disable-pip-version-check --target {place / 'site'}"
    for name, what in {"pip": f'-m pip install {options} "${{@:2}}"', "kvbackend": '-m kvbackend "$@"'}.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\nexec {sys.executable} -W ignore {what}\n")
        (tools / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVBACKEND_")}
    environment["PATH"] = f"{tools}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = os.pathsep.join([str(place), str(place / "site")])
    done = subprocess.run(command, shell=True, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pages_have_files_and_commands() -> None:
    assert list(files(README)) == ["kvbackend/backends/toy/__init__.py", "kvbackend/backends/toy/absorb_q.py"]
    assert len(files(PAGE)) == 4
    kinds = [[" ".join(command.split()[:2]) for command, _ in commands(page)] for page in (README, PAGE)]
    assert kinds == [
        ["kvbackend explain", "kvbackend matrix"],
        ["pip install", "kvbackend explain", "kvbackend explain", "kvbackend matrix", "kvbackend matrix"],
    ]


@pytest.mark.parametrize("page", [README, PAGE], ids=lambda page: page.name)
def test_the_commands_print_what_the_page_says(page: Path, laid: Callable[[Path], Path]) -> None:
    def plain(text: str) -> str:
        return re.sub(r"\d\.\de-\d\d", "E", text)  # the size of a rounding error, which is the machine's own

    for command, printed in commands(page):
        assert plain(run(laid(page), command)) == plain(printed), command


@pytest.mark.parametrize(("page", "folder"), [(README, "kvbackend/backends/toy"), (PAGE, "site")])
def test_its_folder_alone_decides_about_the_backend(page: Path, folder: str, laid: Callable[[Path], Path]) -> None:
    """Taken away again, the op is as it was."""
    place = laid(page)
    for command, _ in commands(page):
        if command.startswith("pip"):
            run(place, command)
    assert "toy: chosen" in run(place, "kvbackend explain absorb_q --dtype float32")
    shutil.rmtree(place / folder)
    assert "toy" not in run(place, "kvbackend explain absorb_q --dtype float32")
