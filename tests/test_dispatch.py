"""Choosing: order, explicit choice, precedence, fallback, the cache of decisions, plugins."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbackend
from kvbackend import backends, explain, use
from kvbackend.backends import REFERENCE, Backend
from kvbackend.dispatch import FallbackWarning
from kvbackend.ops import registry, reshape_and_cache


def sample(dtype: torch.dtype = torch.float32, name: str = "decode") -> dict[str, Any]:
    return dict(reshape_and_cache.make_samples("cpu", dtype))[name]


class Toy:
    """A backend for CPU tensors that records its calls."""

    def __init__(self, name: str, order: int, *reasons: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.asked = 0
        self.reasons = reasons
        self.backend = Backend(name, f"toy_{name}", "cpu", order, lambda: ())
        self.module = types.ModuleType(f"toy_{name}.reshape_and_cache")
        self.module.unsupported = self.unsupported  # type: ignore[attr-defined]
        self.module.run = lambda *args: self.calls.append(args)  # type: ignore[attr-defined]

    def unsupported(self, key: Any, **_: Any) -> Iterator[str]:
        self.asked += 1
        if key.shape[1] == 7:
            yield "7 kv heads are unlucky"
        yield from self.reasons


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Install toy backends in place of the real ones."""

    def install(*toys: Toy) -> None:
        found = {toy.backend.name: toy.backend for toy in sorted(toys, key=lambda toy: toy.backend.order)}
        modules = {(toy.backend.package, "reshape_and_cache"): toy.module for toy in toys}
        monkeypatch.setattr(backends, "registered", lambda: found)
        monkeypatch.setattr(backends, "_adapter", lambda package, op: modules.get((package, op)))
        reshape_and_cache.dispatcher.forget()

    yield install
    reshape_and_cache.dispatcher.forget()


def test_the_first_backend_without_a_reason_runs(install) -> None:
    first, second, third = Toy("first", 1, "no luck"), Toy("second", 2), Toy("third", 3)
    install(third, first, second)
    reshape_and_cache(**sample())
    assert [len(toy.calls) for toy in (first, second, third)] == [0, 1, 0]
    told = explain("reshape_and_cache", **sample())
    assert told.chosen == "second"
    assert [(verdict.name, verdict.status) for verdict in told.backends] == [
        ("first", "refused"), ("second", "chosen"), ("third", "lower"), (REFERENCE, "lower"),
    ]  # fmt: skip
    assert told.backends[0].reasons == ("no luck",)
    assert "no luck" in str(told)


def test_a_decision_is_kept_for_what_it_rests_on(install) -> None:
    toy = Toy("toy", 1)
    install(toy)
    for _ in range(3):
        reshape_and_cache(**sample())
    assert (toy.asked, len(toy.calls)) == (1, 3)
    other_count = sample() | dict(key=torch.randn(9, 2, 16), value=torch.randn(9, 2, 16))  # tokens: not read
    reshape_and_cache(**other_count)
    assert toy.asked == 1
    reshape_and_cache(**sample(torch.bfloat16))  # dtype: always part of the key
    assert toy.asked == 2
    for _ in range(3):
        reshape_and_cache(**sample())
        reshape_and_cache(**sample(torch.bfloat16))
    assert toy.asked == 2, "a new decision drops no other"


def test_the_fallback_warns_once_and_lists_every_reason(install) -> None:
    install(Toy("a", 1, "reason one", "reason two"), Toy("b", 2, "reason three"))

    def twice() -> None:
        reshape_and_cache(**sample())
        reshape_and_cache(**sample(torch.float16))

    with pytest.warns(FallbackWarning) as caught:
        twice()
    assert len(caught) == 1
    for reason in ("reason one", "reason two", "reason three"):
        assert reason in str(caught[0].message)


def test_fallback_error(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Toy("a", 1, "no luck"))
    monkeypatch.setenv("KVBACKEND_FALLBACK", "error")
    with pytest.raises(kvbackend.UnsupportedError, match="no luck"):
        reshape_and_cache(**sample())
    assert explain("reshape_and_cache", **sample()).chosen is None
    monkeypatch.setenv("KVBACKEND_FALLBACK", "silent")
    reshape_and_cache(**sample())
    monkeypatch.setenv("KVBACKEND_FALLBACK", "loudly")
    with pytest.raises(kvbackend.ArgumentError, match="error, warn or silent"):
        reshape_and_cache(**sample())


def test_explicit_choice_never_falls_back(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Toy("good", 1), Toy("bad", 2, "no luck"))
    with use("bad"), pytest.raises(kvbackend.UnsupportedError, match="no luck") as caught:
        reshape_and_cache(**sample())
    assert "KVBACKEND_BACKEND_RESHAPE_AND_CACHE" in str(caught.value), "the narrower choice is named"
    monkeypatch.setenv("KVBACKEND_BACKEND", "bad")
    with pytest.raises(kvbackend.UnsupportedError, match="no luck"):
        reshape_and_cache(**sample())


def test_precedence(install, monkeypatch: pytest.MonkeyPatch) -> None:
    toys = Toy("a", 1), Toy("b", 2), Toy("c", 3)
    install(*toys)

    def ran() -> str:
        before = [len(toy.calls) for toy in toys]
        reshape_and_cache(**sample())
        return next(toy.backend.name for toy, count in zip(toys, before, strict=True) if len(toy.calls) > count)

    assert ran() == "a"
    monkeypatch.setenv("KVBACKEND_BACKEND", "b")
    assert ran() == "b"
    monkeypatch.setenv("KVBACKEND_BACKEND_RESHAPE_AND_CACHE", "c")
    assert ran() == "c"
    with use("a"):
        assert ran() == "a"
        with use("b", ops=["reshape_and_cache"]):
            assert ran() == "b"
        with use("b", ops=["copy_blocks"]):
            assert ran() == "a"
        with use(None):
            assert ran() == "a", "None is automatic choice, over the environment's too"
    assert ran() == "c"


def test_use_is_a_setter_and_reaches_threads(install) -> None:
    install(a := Toy("a", 1), b := Toy("b", 2))
    choice = use("b")
    try:
        thread = threading.Thread(target=lambda: reshape_and_cache(**sample()))
        thread.start()
        thread.join()
        assert (len(a.calls), len(b.calls)) == (0, 1)
    finally:
        choice.close()
    reshape_and_cache(**sample())
    assert len(a.calls) == 1


def test_disabled_backends_are_not_used(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Toy("a", 1), b := Toy("b", 2))
    monkeypatch.setenv("KVBACKEND_DISABLE", " a ,")
    reshape_and_cache(**sample())
    assert len(b.calls) == 1
    assert "KVBACKEND_DISABLE" in explain("reshape_and_cache", **sample()).backends[0].reasons[0]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVBACKEND_BACKEND", "cudda"),
        ("KVBACKEND_BACKEND_RESHAPE", "cpu"),
        ("KVBACKEND_DISABLE", "cudda"),
        ("KVBACKEND_CHECK", "vals"),
        ("KVBACKEND_FALLBACK", "loudly"),
    ],
)
def test_misspelled_environment_is_told(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(kvbackend.ArgumentError, match=variable):
        reshape_and_cache(**sample())


def test_misspelled_use_is_told() -> None:
    with pytest.raises(kvbackend.ArgumentError, match="installed are cpu"):
        use("cudda")
    with pytest.raises(kvbackend.ArgumentError, match="reshape_and_cache"):
        use("cpu", ops=["reshape"])


def test_the_reference_can_be_disabled(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Toy("a", 1, "no luck"))
    monkeypatch.setenv("KVBACKEND_DISABLE", "reference")
    with pytest.raises(kvbackend.UnsupportedError, match="no luck"):
        reshape_and_cache(**sample())
    assert explain("reshape_and_cache", **sample()).chosen is None


def test_what_is_no_strided_tensor_is_told() -> None:
    for key in (None, 3, torch.zeros(1, 2, 16).to_sparse()):
        with pytest.raises((kvbackend.ArgumentError, RuntimeError), match="key"):
            reshape_and_cache.validate(reshape_and_cache.bind((), sample() | dict(key=key)))


def test_a_bug_in_a_predicate_surfaces(install) -> None:
    toy = Toy("toy", 1)

    def broken(key: Any, **_: Any) -> Iterator[str]:
        yield str(key.nonsense)

    toy.module.unsupported = broken  # type: ignore[attr-defined]
    install(toy)
    with pytest.raises(AttributeError, match="nonsense"):
        reshape_and_cache(**sample())


def test_a_wrong_call_is_told_on_a_hot_signature() -> None:
    """Sizes are compared on every call, not only on the first of a signature."""
    args = sample(name="block 16")
    reshape_and_cache(**args)
    before = args["key_cache"].clone()
    with pytest.raises(kvbackend.ArgumentError, match="slot_mapping"):
        reshape_and_cache(**(args | dict(slot_mapping=torch.arange(99))))
    torch.testing.assert_close(args["key_cache"], before, equal_nan=True)


def test_environment_reaches_a_subprocess() -> None:
    code = """
        import torch, kvbackend
        from kvbackend.ops import registry, reshape_and_cache
        sample = dict(reshape_and_cache.make_samples("cpu", torch.float32))["decode"]
        print(kvbackend.explain(reshape_and_cache, **sample).chosen)
    """
    environment = os.environ | {"KVBACKEND_BACKEND": "reference"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == REFERENCE


def test_calls_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KVBACKEND_LOG", "calls")
    with caplog.at_level("INFO", logger="kvbackend"):
        reshape_and_cache(**sample())
    assert "reshape_and_cache on" in caplog.text
    assert "key [1, 2, 16] float32" in caplog.text


def test_value_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    args = sample() | dict(slot_mapping=torch.tensor([10_000]))
    reshape_and_cache(**args)  # undefined, but harmless on the CPU
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    with pytest.raises(kvbackend.ArgumentError, match="slot 10000 at index 0"):
        reshape_and_cache(**args)


def test_a_plugin_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = backends._load("broken", "no_such_package_at_all")
    monkeypatch.setattr(backends, "registered", lambda: {"broken": broken})
    reshape_and_cache.dispatcher.forget()
    try:
        verdict = explain("reshape_and_cache", **sample()).backends[0]
        assert verdict.status == "refused"
        assert "no_such_package_at_all" in verdict.reasons[0]
    finally:
        reshape_and_cache.dispatcher.forget()


def test_a_plugin_that_lacks_a_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lacks_a_library.py").write_text("raise OSError('libtoy.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "libtoy.so" in next(iter(backends._load("broken", "lacks_a_library").missing()))


def test_many_signatures_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbackend.dispatch.MAX_DECISIONS", 8)
    for heads in range(1, 30):
        reshape_and_cache(
            torch.zeros(1, heads, 4), torch.zeros(1, heads, 4),
            torch.zeros(1, 4, heads, 4), torch.zeros(1, 4, heads, 4), torch.tensor([0]),
        )  # fmt: skip
    assert len(reshape_and_cache.dispatcher._decisions) <= 8


def test_every_op_has_a_group_and_a_summary() -> None:
    groups = {
        "paged cache", "dense attention", "sparse attention", "selecting", "compressing", "low rank", "rotary",
        "formats", "evicting",
    }  # fmt: skip
    for op in registry.values():
        assert op.group in groups
        assert 10 < len(op.summary) < 160
