"""A third party's backend package, installed for one test: found by its entry point, here and in child processes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbackend import backends
from kvbackend.ops import registry

HEAD = "DEVICE = 'cpu'\nORDER = 900\ndef missing(): return ()\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`install(name, head, **modules)`: a backend on the path as pip would have laid it."""

    def forget() -> None:
        backends.registered.cache_clear()
        for op in registry.values():
            op.dispatcher.forget()

    def lay(name: str, head: str = HEAD, **modules: str) -> None:
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(textwrap.dedent(head))
        for op, text in modules.items():
            (package / f"{op}.py").write_text(textwrap.dedent(text))
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[kvbackend.backends]\n{name} = {name}\n")
        forget()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield lay
    forget()
    for name in [name for name in sys.modules if name.partition(".")[0] in {p.name for p in tmp_path.iterdir()}]:
        del sys.modules[name]
