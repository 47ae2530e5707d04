"""Execute a Dockerfile without a container engine: every stage in a root of its own, its last CMD at the end.

    ci/dockerfile.py FILE BASE FOLDER [NAME=VALUE...]      as root; NAME=VALUE is what --build-arg takes

BASE is the root file system that stands for whatever a stage is FROM; FOLDER gets a copy of it for each stage. The
context is the current folder, less what .dockerignore takes away. Only what docker/ uses is understood. The folders
that $BIND lists are seen inside too; variables of pip and of proxies are handed on, and the file's own go before them.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

PASSED_ON = ("PIP_", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
# $1: the root; $2: the folder in it; $3: the command
INSIDE = """
set -e
for folder in $BIND; do mkdir -p "$1$folder"; mount --bind "$folder" "$1$folder"; done
mount -t proc proc "$1/proc"
mkdir -p "$1/dev/shm"; mount -t tmpfs tmpfs "$1/dev/shm"
exec chroot "$1" sh -c 'cd "$1" && exec sh -c "$2"' sh "$2" "$3"
"""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(name, arguments), continued lines joined, comments left out."""
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


@dataclass
class Stage:
    """What the instructions since a FROM have made."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"

    def run(self, command: str) -> None:
        """Run a command line in the root; its process namespace ends with it."""
        found = {name: value for name, value in os.environ.items() if name.startswith((*PASSED_ON, "BIND"))}
        paths = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        inside = ["sh", "-c", INSIDE, "sh", str(self.root), self.folder, command]
        subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", *inside],
            env={**found, **paths, **self.variables},
            check=True,
        )

    def inside(self, path: str) -> Path:
        """Where a path of the stage is on this machine."""
        return self.root / os.path.join(self.folder, path).lstrip("/")


def copied(context: Path) -> Iterator[Path]:
    """The files that COPY . sees: what .dockerignore takes back from its `*`, less what its last patterns take away."""
    everything, *patterns = (context / ".dockerignore").read_text().split()
    assert everything == "*", ".dockerignore no longer begins by taking all away"
    away = [pattern.removeprefix("**/") for pattern in patterns if not pattern.startswith("!")]
    for top in (context / pattern[1:] for pattern in patterns if pattern.startswith("!")):
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            parts = path.relative_to(context).parts
            if path.is_file() and not any(fnmatch.fnmatch(part, name) for part in parts for name in away):
                yield path.relative_to(context)


def execute(file: Path, base: Path, folder: Path, given: Mapping[str, str]) -> None:
    """Every instruction, in order."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    declared: dict[str, str] = {}  # before the first FROM
    command: list[str] = []

    def expanded(text: str) -> str:
        return Template(text).substitute(declared | (stage.variables if stage else {}))

    for name, rest in instructions(file.read_text()):
        print(f"{file.name}: {name} {rest}", flush=True)
        if name == "ARG":
            key, _, default = rest.partition("=")
            (stage.variables if stage else declared)[key] = given.get(key, expanded(default))
        elif name == "FROM":
            image, _, label = expanded(rest).partition(" AS ")
            stage = stages[label or image] = Stage(folder / f"{len(stages)}")
            subprocess.run(["cp", "--archive", "--reflink=auto", str(base), str(stage.root)], check=True)
        elif stage is None:
            raise SystemExit(f"{file}: {name} stands before FROM; only ARG may: put it behind one")
        elif name == "ENV":
            stage.variables |= dict(part.split("=", 1) for part in shlex.split(expanded(rest)))
        elif name == "WORKDIR":
            stage.folder = os.path.join(stage.folder, expanded(rest))
            stage.inside(".").mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            copy(stages, stage, shlex.split(expanded(rest)))
        elif name == "RUN":
            stage.run(rest)
        elif name == "CMD":
            command = json.loads(rest)
        else:
            raise SystemExit(f"{file} has {name}, which is not understood here: add it to ci/dockerfile.py")
    assert stage is not None
    stage.run(shlex.join(command))


def copy(stages: Mapping[str, Stage], stage: Stage, words: list[str]) -> None:
    """COPY . ., COPY FILE PLACE, or COPY --from=STAGE FOLDER PLACE."""
    origin = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
    source, place = words[0], stage.inside(words[1])
    if origin is not None:
        shutil.copytree(stages[origin].inside(source), place)
        return
    context = Path.cwd()
    for name in copied(context) if source == "." else [Path(source)]:
        target = place / name if source == "." else place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(context / name, target)


if __name__ == "__main__":
    execute(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), dict(pair.split("=", 1) for pair in sys.argv[4:]))
