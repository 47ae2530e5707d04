"""What is said about versions outside the package agrees with it: containers, workflows, build files, hooks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvbackend import native
from kvbackend.compat.data import load_matrix
from kvbackend.matrix import wanted

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
if not (ROOT / ".ci").is_dir():
    pytest.skip("these are the files of a checkout; a source archive has not all of them", allow_module_level=True)


def pyproject(key: str) -> list[str]:
    """The strings of a list in pyproject.toml. Python 3.10 has no reader of TOML."""
    found = re.search(rf"^{key} = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert found, key
    return re.findall(r'"([^"]*)"', found[1])


def declared_torch() -> SpecifierSet:
    return next(Requirement(text).specifier for text in pyproject("dependencies") if text.startswith("torch"))


def declared_pythons() -> list[str]:
    prefix = "Programming Language :: Python :: 3."
    return [text.rpartition(" ")[2] for text in pyproject("classifiers") if text.startswith(prefix)]


def workflow(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def commands(path: Path) -> Iterator[list[str]]:
    for job in workflow(path)["jobs"].values():
        for step in job["steps"]:
            yield from (shlex.split(line) for line in step.get("run", "").splitlines())


def script(path: str) -> ModuleType:
    spec = spec_from_file_location(path.replace("/", "_").removesuffix(".py"), ROOT / path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script("docker/generate.py")


# ------------------------------------------------------------------------------------------------------ containers


def test_dockerfiles_are_what_the_matrix_says(generator: ModuleType) -> None:
    for name, text in generator.dockerfiles(load_matrix()).items():
        assert (ROOT / "docker" / name).read_text() == text, f"{name} is not current: run python docker/generate.py"


def test_another_matrix_makes_other_dockerfiles(generator: ModuleType) -> None:
    matrix = load_matrix()
    torch = generator.pinned_torch()
    matrix.row("torch_cuda", torch)["triton"] = "9.9.9"
    matrix.row("cuda_driver", "13")["driver_min"] = "999.1"
    text = generator.dockerfiles(matrix)["Dockerfile.cuda"]
    assert "triton==9.9.9" in text
    assert "999.1 or newer" in text
    matrix.row("python_torch", torch)["python"] = ["3.14"]
    with pytest.raises(AssertionError, match="no row says that torch"):
        generator.dockerfiles(matrix)


def test_the_ascend_image_is_of_the_newest_released_set(generator: ModuleType) -> None:
    chosen = generator.newest_torch_npu(load_matrix())
    assert Version(chosen["torch_npu"]).release == Version(chosen["torch"]).release
    assert Version(chosen["torch"]) in declared_torch()
    assert chosen["product"].replace(".", "").isdigit()  # not a beta


@pytest.mark.parametrize("name", ["cpu", "cuda", "ascend"])
def test_a_container_ends_in_the_doctor(name: str) -> None:
    last = (ROOT / "docker" / f"Dockerfile.{name}").read_text().rstrip().splitlines()[-1]
    assert last == 'CMD ["kvbackend", "doctor"]'


def test_the_cpu_file_can_be_executed_without_a_container_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ci/docker_check.sh does it; here commands are told, not run."""
    dockerfile, ran = script("ci/dockerfile.py"), []

    def run(stage: Any, command: str) -> None:
        ran.append((stage.root.name, command))
        if "pip wheel" in command:
            assert stage.variables["PIP_EXTRA_INDEX_URL"] == "nowhere"
            assert (stage.root / "src" / "csrc" / "cpu" / "isa.cpp").exists()
            assert (stage.root / "src" / "ci" / "constraints.txt").exists()
            assert not list(stage.root.rglob("*.so"))
            (stage.root / "wheels").mkdir()
            (stage.root / "wheels" / "one.whl").touch()
        elif "/wheels" in command:
            assert (stage.root / "wheels" / "one.whl").exists()

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(dockerfile.Stage, "run", run)
    (tmp_path / "base").mkdir()
    file = ROOT / "docker" / "Dockerfile.cpu"
    dockerfile.execute(file, tmp_path / "base", tmp_path, {"TORCH_INDEX": "nowhere"})
    assert [words.split()[0] for _, words in ran] == ["apt-get", "pip", "pip", "kvbackend"]
    assert [root for root, _ in ran] == ["0", "0", "1", "1"]
    assert len(ran) - 1 == len(re.findall(r"^RUN ", file.read_text(), re.M))


# ------------------------------------------------------------------------------------------------------- workflows


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_what_a_workflow_calls_is_there(path: Path) -> None:
    lines = [shlex.split(line, comments=True) for line in path.read_text().splitlines()] if path.name == "run" else []
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    called = 0
    for words in lines or commands(path):
        script = next((word for word in words if word.startswith(("ci/", ".ci/"))), None)
        if script:
            assert (ROOT / script).stat().st_mode & 0o100, f"{script} cannot be run"
        if words[:1] == ["make"]:
            assert words[1] in targets, f"the Makefile has no target {words[1]}"
        called += bool(script) or words[:1] == ["make"]
    assert called


def test_every_script_is_called_by_a_workflow_or_says_that_it_is_optional() -> None:
    called = {word for path in WORKFLOWS for words in commands(path) for word in words}
    called |= set(shlex.split((ROOT / ".ci" / "run").read_text(), comments=True))
    called.add("ci/check.sh")  # by `make check`
    for script in sorted((ROOT / "ci").glob("*.sh")):
        assert f"ci/{script.name}" in called or "Optional" in script.read_text(), script.name


def test_the_cpu_workflow_covers_what_is_declared() -> None:
    matrix = workflow(ROOT / ".github" / "workflows" / "cpu.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == declared_pythons()
    oldest = next(spec.version for spec in SpecifierSet(python_requirement()) if spec.operator == ">=")
    assert matrix["python"][0] == oldest
    torch, have = declared_torch(), [Version(text) for text in matrix["torch"]]
    assert all(text in torch for text in matrix["torch"])
    assert min(have).release[:2] == native.MIN_TORCH
    assert f"{max(have).major}.{max(have).minor + 1}" not in torch, "a newer torch is declared than the newest tested"
    rows = wanted.read(str(ROOT / "ci" / "matrix.toml"))
    of_ci = [(row["python"], row["torch"]) for row in rows if row["arch"] == "x86_64"]
    assert of_ci == list(product(matrix["python"], matrix["torch"]))  # which its own test holds against our matrix


def test_the_wheel_is_tried_under_the_last_patch_of_every_torch_that_is_declared() -> None:
    known = {row["torch"] for row in load_matrix().rows("torch_cuda")} & {
        row["torch"] for row in load_matrix().rows("python_torch")
    }
    declared = [text for text in known if text in declared_torch() and Version(text).release[:2] >= native.MIN_TORCH]
    last = {Version(text).release[:2]: text for text in sorted(declared, key=Version)}
    steps = workflow(ROOT / ".github" / "workflows" / "cpu.yml")["jobs"]["wheel"]["steps"]
    [tried] = [words[1:] for step in steps if (words := step.get("run", "").split())[:1] == ["ci/wheel_check.sh"]]
    assert tried == list(last.values())


def python_requirement() -> str:
    return re.search(r'^requires-python = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]


def test_self_hosted_labels() -> None:
    jobs = workflow(ROOT / ".github" / "workflows" / "devices.yml")["jobs"].values()
    assert [job["runs-on"] for job in jobs] == [["self-hosted", "cuda-h200"], ["self-hosted", "ascend-950"]]


# ------------------------------------------------------------------------------------------------------------ rest


def test_the_kernels_oldest_torch_is_one_number() -> None:
    target = re.search(r'^TORCH_TARGET = "0x(\w\w)(\w\w)0{12}"', (ROOT / "setup.py").read_text(), re.M)
    assert tuple(int(part, 16) for part in target.groups()) == native.MIN_TORCH
    oldest = ".".join(map(str, native.MIN_TORCH))
    assert f"torch>={oldest}" in pyproject("requires")


@pytest.mark.parametrize(
    ("nvcc", "why"),
    [
        ("/no/such/nvcc", "/no/such/nvcc cannot be started"),
        (shutil.which("false"), "false knows no GPU; csrc/cuda is for"),
    ],
)
def test_an_nvcc_that_is_none_is_told(nvcc: str, why: str) -> None:
    """Told, not raised: where the other libraries are built too, an installation goes on without this one."""
    command = [sys.executable, "setup.py", "--quiet", "build_cuda"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NVCC": nvcc}, capture_output=True, text=True)
    assert done.returncode == 1
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_objects_follow_what_their_precompiled_header_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    build = script("setup.py")
    monkeypatch.chdir(tmp_path)
    sources = Path("csrc") / "cpu"
    sources.mkdir(parents=True)
    (sources / "number.h").write_text("constexpr int number = 1;\n")
    (sources / "kernel.h").write_text('#pragma once\n#include "number.h"\n')
    (sources / "op.cpp").write_text('#include "kernel.h"\nint op() { return number; }\n')
    held = Path("held")

    def compiled() -> tuple[bytes, int]:
        flags = build.precompiled(held, [], [])
        build.compile_one(build.COMPILER, [], sources / "op.cpp", Path("op.o"), flags)
        return Path("op.o").read_bytes(), Path("op.o").stat().st_mtime_ns

    if "Free Software Foundation" not in build.compiler_says("--version"):
        pytest.skip("only GCC makes precompiled headers here: set CXX to a g++")
    first = compiled()
    assert (held / "kernel.h.gch").exists()
    assert "kernel.h" not in Path("op.d").read_text()  # or the file was not used
    assert compiled() == first
    (sources / "number.h").write_text("constexpr int number = 2;\n")
    second = compiled()
    assert second[0] != first[0]
    # one that the compiler cannot use, as after it was replaced by another release, does no harm
    (held / "kernel.h.gch").write_text("")
    third = compiled()
    assert third[0] == second[0]
    assert third[1] > second[1]
    assert "kernel.h" in Path("op.d").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here: apt-get install make")
def test_an_environment_of_another_torch_is_made_again(tmp_path: Path) -> None:
    """The environment is told by its stamp; commands are printed, not run."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "ci/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("csrc", "kvbackend/ops", ".venv"):
        (tmp_path / folder).mkdir(parents=True)

    def printed(*arguments: str) -> str:
        command = ["make", "--dry-run", "setup", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    for made, other in ((), ("TORCH=2.10.0",)), (("TORCH=2.10.0",), ()):
        stamp = re.search(r"^echo '(.*)' >\.venv/\.done$", printed(*made), re.M)
        assert stamp
        (tmp_path / ".venv" / ".done").write_text(f"{stamp[1]}\n")
        assert "pip install" not in printed(*made)
        assert "pip install" in printed(*other)


def test_hooks_and_make_check_use_the_same_tools() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = dict(line.split("==") for line in (ROOT / "ci" / "lint.txt").read_text().splitlines() if "==" in line)
    assert {repo["rev"] for repo in hooks} == {f"v{tools['ruff']}", f"v{tools['clang-format']}"}


def test_issue_forms_ask_for_the_doctors_report() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    for form in forms:
        body = yaml.safe_load(form.read_text())["body"]
        asked = [field["attributes"] for field in body if field.get("validations", {}).get("required")]
        assert any("kvbackend doctor --report" in field.get("description", "") for field in asked), form.name
    assert forms


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 150
