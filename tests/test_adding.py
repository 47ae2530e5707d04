"""docs/adding_a_backend.md, as it stands: its files are written, its commands run, their output is what it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvbackend

PACKAGE = Path(kvbackend.__file__).parent
PAGE = PACKAGE.parent / "docs" / "adding_a_backend.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
FILES = [text for kind, text in BLOCKS if kind in ("python", "toml")]
COMMANDS = [
    (command, printed)
    for kind, text in BLOCKS
    if kind == "console"
    for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of kvbackend, since the page adds an op to it, and the page's files."""
    folder = tmp_path_factory.mktemp("adding")
    shutil.copytree(PACKAGE, folder / "kvbackend", ignore=shutil.ignore_patterns("__pycache__"))
    for text in FILES:
        path = folder / text.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        assert not path.exists(), "the page may add files, not change them"
        path.write_text(text)
    return folder


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


def test_the_page_has_files_and_commands() -> None:
    assert len(FILES) == 4
    assert [command.split()[:2] for command, _ in COMMANDS] == [
        ["pip", "install"], ["kvbackend", "explain"], ["kvbackend", "explain"], ["kvbackend", "matrix"],
        ["kvbackend", "matrix"],
    ]  # fmt: skip


def test_the_commands_print_what_the_page_says(place: Path) -> None:
    def plain(text: str) -> str:
        return re.sub(r"\d\.\de-\d\d", "E", text)  # the size of a rounding error, which is the machine's own

    for command, printed in COMMANDS:
        assert plain(run(place, command)) == plain(printed), command


def test_its_folder_alone_decides_about_the_backend(place: Path) -> None:
    """Taken away again, the op is as it was."""
    run(place, COMMANDS[0][0])
    assert "toy: chosen" in run(place, "kvbackend explain absorb_q --dtype float32")
    shutil.rmtree(place / "site")
    assert "toy" not in run(place, "kvbackend explain absorb_q --dtype float32")
