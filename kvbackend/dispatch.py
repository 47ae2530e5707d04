"""Who runs a call: the walk over backends, explicit choice, the cache of decisions, and `explain`.

Precedence: `use(...)`, then KVBACKEND_BACKEND_<OP>, then KVBACKEND_BACKEND, then automatic. An explicit choice never
falls back. The automatic one takes the first backend of the tensors' device without a reason against the call; when
none is left the reference runs, after one warning that lists every reason (KVBACKEND_FALLBACK=error refuses instead,
=silent says nothing).
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from . import backends
from .backends import REFERENCE, Backend
from .errors import ArgumentError, UnsupportedError
from .facts import Fact, key_source, scalars_named, sizes_only, views

if TYPE_CHECKING:
    from .spec import Op

logger = logging.getLogger("kvbackend")

MAX_DECISIONS = 4096  # per op; past it the cache starts anew, so that ever-new shapes cannot fill the memory


def _environment() -> Any:
    """Something with `get(key: bytes)`. A look at os.environ takes a microsecond, one at its byte table 30 ns."""
    table = getattr(os.environ, "_data", None)
    return table if os.name == "posix" and isinstance(table, dict) else _PortableEnvironment


class _PortableEnvironment:
    @staticmethod
    def get(key: bytes) -> str | None:
        return os.environ.get(key.decode())


_environ = _environment()


def _env(variable: str) -> str:
    """An environment variable as it is now; empty where unset."""
    return os.fsdecode(_environ.get(variable.encode()) or "")


class FallbackWarning(RuntimeWarning):
    """Automatic choice ended at the reference."""


# ---------------------------------------------------------------------------------------------- explicit choice


class use:  # noqa: N801  (reads as a statement: `with kvbackend.use("reference"):`)
    """Choose a backend explicitly, in the whole process, until `close()` or the end of the `with` block.

    backend   a backend's name, "reference", or None for automatic choice
    ops       names of the ops it applies to; None: all. The innermost `use` that names the op decides.
    Raises ArgumentError for a name that does not exist. Threads see it; child processes inherit the environment's
    KVBACKEND_BACKEND instead.
    """

    _stack: ClassVar[list[use]] = []
    _lock = threading.Lock()
    version = 0  # changes with every choice: part of every decision's key

    def __init__(self, backend: str | None, ops: str | Iterable[str] | None = None) -> None:
        from . import ops as known

        if backend is not None:
            _must_exist(backend, "use")
        self.backend = backend
        self.ops = None if ops is None else frozenset([ops] if isinstance(ops, str) else ops)
        for name in sorted(self.ops or ()):
            if name not in known.registry:
                raise ArgumentError(f"use names op {name!r}; the ops are {', '.join(known.registry)}: check the name")
        with self._lock:
            use._stack = [*use._stack, self]
            use.version += 1

    def close(self) -> None:
        """Take the choice back."""
        with self._lock:
            use._stack = [choice for choice in use._stack if choice is not self]
            use.version += 1

    def __enter__(self) -> use:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _must_exist(backend: str, origin: str) -> None:
    if backend not in backends.names():
        raise ArgumentError(
            f"{origin} names backend {backend!r}; installed are {', '.join(backends.names())}: choose one of these"
        )


def requested(op_name: str) -> tuple[str | None, str]:
    """The explicitly chosen backend of an op, or None for automatic choice; and who chose it."""
    for choice in reversed(use._stack):
        if choice.ops is None or op_name in choice.ops:
            return choice.backend, "use"
    _need_known_ops()
    for variable in (f"KVBACKEND_BACKEND_{op_name.upper()}", "KVBACKEND_BACKEND"):
        value = _env(variable)
        if value:
            _must_exist(value, variable)
            return value, variable
    return None, ""


def _need_known_ops() -> None:
    """A variable for an op that does not exist would choose nothing, silently."""
    from . import ops

    for variable in os.environ:
        name = variable.removeprefix("KVBACKEND_BACKEND_")
        if name != variable and name.lower() not in ops.registry:
            raise ArgumentError(f"{variable} names no op; the ops are {', '.join(ops.registry)}: check the name")


def disabled() -> frozenset[str]:
    """The backends that KVBACKEND_DISABLE lists."""
    listed = frozenset(name.strip() for name in _env("KVBACKEND_DISABLE").split(",") if name.strip())
    for name in sorted(listed):
        _must_exist(name, "KVBACKEND_DISABLE")
    return listed


def fallback_policy() -> str:
    """What happens where automatic choice ends at the reference: "warn", "error" or "silent"."""
    policy = _env("KVBACKEND_FALLBACK") or "warn"
    if policy not in ("error", "warn", "silent"):
        raise ArgumentError(f"KVBACKEND_FALLBACK is {policy!r}; it must be error, warn or silent: set one of these")
    return policy


# ------------------------------------------------------------------------------------------------------ verdicts


@dataclass(frozen=True)
class Verdict:
    """One backend's answer to a call."""

    name: str
    status: str  # "chosen" | "refused" | "lower": it could, but an earlier one was chosen
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.status}" + "".join(f"\n    {reason}" for reason in self.reasons)


@dataclass(frozen=True)
class Explanation:
    """Every backend of the tensors' device, in order, with its reasons; `chosen` is None where the call is refused."""

    op: str
    device: str
    chosen: str | None
    backends: tuple[Verdict, ...]

    def to_dict(self) -> dict[str, Any]:
        """As `kvbackend explain --json` prints it."""
        return asdict(self)

    def __str__(self) -> str:
        head = f"{self.op} on {self.device}: {self.chosen or 'refused'}"
        return "\n".join([head, *(f"  {line}" for verdict in self.backends for line in str(verdict).splitlines())])


def explain(op: str | Op, **example: Any) -> Explanation:
    """Who would run this call, and why the others would not.

    op        an op or its name
    example   the call's arguments, as the op takes them; tensors may be on device 'meta'... of the device meant
    """
    from . import ops

    chosen_op = ops.get(op) if isinstance(op, str) else op
    return chosen_op.dispatcher.explain(chosen_op.bind((), example))


# ---------------------------------------------------------------------------------------------------- dispatcher


class Dispatcher:
    """Chooses for one op and remembers what it chose."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self._readers: list[Callable[..., Any]] = []
        self._facts: dict[Fact, None] = {}
        self._decisions: dict[Any, Callable[..., Any]] = {}
        self._warned: set[tuple[str, ...]] = set()
        self._lock = threading.RLock()
        self._fast: Callable[..., Any] = self._first_call

    def entry(self, *args: Any, **kwargs: Any) -> Any:
        """What torch calls. An indirection, since the fast path is rewritten when a new fact is read."""
        return self._fast(*args, **kwargs)

    def add_reader(self, function: Callable[..., Any]) -> None:
        """Count what `function` names among the facts that decisions rest on."""
        if function not in self._readers:
            self._readers.append(function)

    def forget(self) -> None:
        """Drop every decision, as if no call had been made."""
        with self._lock:
            self._decisions, self._warned = {}, set()
            self._facts, self._fast = {}, self._first_call

    # the walk

    def device_type(self, args: Mapping[str, Any]) -> str:
        """The device whose backends are asked: an accelerator if any tensor is on one."""
        types = [args[array.name].device.type for array in self.op.arrays if args[array.name] is not None]
        return next((kind for kind in types if kind not in ("cpu", "meta")), types[0] if types else "cpu")

    def views(self, args: Mapping[str, Any], notes: dict[Fact, None] | None = None) -> dict[str, Any]:
        """The arguments as predicates see them."""
        return views(self.op, args, {} if notes is None else notes)

    def reasons(self, backend: Backend, seen: Mapping[str, Any]) -> Iterator[str]:
        """Why a backend cannot take this call."""
        if backend.name in disabled():
            yield "disabled by KVBACKEND_DISABLE: take it off the list"
        yield from backend.missing()
        adapter = backend.adapter(self.op.name)
        if adapter is None:
            yield backend.absence(self.op.name)
        else:
            self.add_reader(adapter.unsupported)
            yield from adapter.unsupported(**seen)

    def refuse_gradients(self, args: Mapping[str, Any]) -> None:
        """Raise ArgumentError where torch would want a gradient."""
        if torch.is_grad_enabled():
            for array in self.op.arrays:
                if args[array.name] is not None and args[array.name].requires_grad:
                    raise ArgumentError(
                        f"{array.name} requires grad; {self.op.name} has no gradient formula, and torch would "
                        f"silently leave the gradient empty: call it under torch.no_grad() or detach {array.name}"
                    )

    def choose(self, args: Mapping[str, Any], notes: dict[Fact, None]) -> tuple[str, Callable[..., Any]]:
        """The backend for a call, and its function; raises ArgumentError or UnsupportedError."""
        op = self.op
        op.arrays.check(args)
        self.refuse_gradients(args)
        seen = self.views(args, notes)
        op._check(**seen)
        name, origin = requested(op.name)
        fallback_policy()  # a misspelled one is told at once, not at the first fallback
        if name == REFERENCE:
            return REFERENCE, op.reference
        device = self.device_type(args)
        if name is not None:
            backend = backends.registered()[name]
            reasons = list(self.reasons(backend, seen))
            if backend.device not in (device, None):
                reasons.insert(0, f"serves device type {backend.device}; the tensors are on {device}")
            if reasons:
                raise UnsupportedError(self._explicit_message(name, origin, reasons))
            return name, backend.adapter(op.name).run  # type: ignore[union-attr]
        refused = []
        for backend in backends.serving(device):
            reasons = list(self.reasons(backend, seen))
            if not reasons:
                return backend.name, backend.adapter(op.name).run  # type: ignore[union-attr]
            refused.append(Verdict(backend.name, "refused", tuple(reasons)))
        self._fall_back(device, refused)
        return REFERENCE, op.reference

    def explain(self, args: Mapping[str, Any]) -> Explanation:
        """Every backend's verdict on a call; see the function `explain`."""
        op = self.op
        op.arrays.check(args)
        seen = self.views(args)
        op._check(**seen)
        device, chosen, verdicts = self.device_type(args), None, list[Verdict]()
        wanted, origin = requested(op.name)
        fallback = "error" if REFERENCE in disabled() else fallback_policy()
        for backend in [*backends.serving(device), None]:
            name = backend.name if backend else REFERENCE
            reasons = tuple(self.reasons(backend, seen)) if backend else ()
            if wanted is not None and name != wanted:
                reasons = (*reasons, f"{origin} chose {wanted}")
            elif not backend and wanted is None and chosen is None and fallback == "error":
                reasons = (
                    "KVBACKEND_FALLBACK=error or KVBACKEND_DISABLE: the reference is not used unless chosen explicitly",
                )
            if reasons:
                verdicts.append(Verdict(name, "refused", reasons))
            elif chosen is None:
                chosen = name
                verdicts.append(Verdict(name, "chosen"))
            else:
                verdicts.append(Verdict(name, "lower"))
        return Explanation(op.name, device, chosen, tuple(verdicts))

    def _explicit_message(self, name: str, origin: str, reasons: list[str]) -> str:
        narrow = f"KVBACKEND_BACKEND_{self.op.name.upper()}"
        return (
            f"{self.op.name} cannot run on backend {name!r}, which {origin} chose; an explicit choice never falls back:"
            + "".join(f"\n    {reason}" for reason in reasons)
            + f"\n  to choose another backend for this op alone: {narrow}=..., or use(..., ops={self.op.name!r})"
        )

    def _fall_back(self, device: str, refused: list[Verdict]) -> None:
        policy = "error" if REFERENCE in disabled() else fallback_policy()
        why = "\n".join(f"  {line}" for verdict in refused for line in str(verdict).splitlines())
        message = why or f"  no backend serves device type {device}"
        if policy == "error":
            raise UnsupportedError(
                f"no backend can run {self.op.name} on {device}, and the reference may not be used:\n{message}"
            )
        if policy == "warn" and (key := (device, message)) not in self._warned:
            self._warned.add(key)
            warnings.warn(
                f"{self.op.name} runs on the slow torch reference; no backend of {device} takes the call:\n{message}\n"
                f"  (KVBACKEND_FALLBACK=error makes this an error, =silent says nothing)",
                FallbackWarning,
                stacklevel=2,
            )

    # the fast path

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._write_fast_path()
        return self._fast(*args, **kwargs)

    def _decide(self, *values: Any) -> Callable[..., Any]:
        """The slow path: check, choose, and let the fast path know."""
        args = dict(zip(self.op.parameters, values, strict=True))
        notes: dict[Fact, None] = {}
        readers = len(self._readers)
        backend, run = self.choose(args, notes)
        run = self._wrap(backend, run)
        with self._lock:
            if len(self._readers) != readers or not notes.keys() <= self._facts.keys():
                self._facts.update(notes)
                self._write_fast_path()
            if len(self._decisions) >= MAX_DECISIONS:
                self._decisions.clear()
            self._decisions[self._key(*values)] = run
        return run

    def _write_fast_path(self) -> None:
        """Compile `fast(<the op's parameters>)`, and `key(...)`, which it looks decisions up by."""
        self._decisions = {}
        variables = [f"KVBACKEND_BACKEND_{self.op.name.upper()}", *_ENVIRONMENT]
        grads = [f"{a.name} is not None and {a.name}.requires_grad" for a in self.op.arrays if a.may_require_grad]
        policy = [f"_environ.get({name.encode()!r})" for name in variables]
        policy += ["_use.version", f"_grad_enabled() and ({' or '.join(grads) or False})"]
        lines = key_source(self.op, self._facts, [*sorted(self._scalars(self._readers)), *policy])
        names = ", ".join(self.op.parameters)
        source = [
            f"def _read_key({_parameter_source(self.op)}):",
            *_indent(lines, 1),
            "    return _key",
            f"def _fast({_parameter_source(self.op)}):",
            "    try:",
            *_indent(lines, 2),
            "        _run = _decisions.get(_key)",
            "    except ValueError:  # sizes that do not fit each other: the slow path tells which",
            "        _run = None",
            "    if _run is None:",
            f"        _run = _decide({names})",
            *_indent(_run_source(names), 1),
        ]
        space = self._compile(source, _decisions=self._decisions, _decide=self._decide)
        self._key, self._fast = space["_read_key"], space["_fast"]

    def _scalars(self, readers: Iterable[Callable[..., Any]]) -> set[str]:
        return set().union(*(scalars_named(self.op, reader) for reader in readers))

    def _compile(self, source: list[str], **space: Any) -> dict[str, Any]:
        space.update(_use=use, _environ=_environ, _grad_enabled=torch.is_grad_enabled, _translate=_translate)
        exec(compile("\n".join(source), f"<kvbackend.{self.op.name}>", "exec"), space)
        return space

    def _wrap(self, backend: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Add what the environment asks for: value checks, a log line before each call."""
        op = self.op
        check, log = _env("KVBACKEND_CHECK"), _env("KVBACKEND_LOG")
        for name, value, allowed in (("KVBACKEND_CHECK", check, "values"), ("KVBACKEND_LOG", log, "calls")):
            if value not in ("", allowed):
                raise ArgumentError(f"{name} is {value!r}; it must be {allowed!r} or unset: set one of these")
        if not check and not log:
            return run

        def wrapped(*values: Any) -> Any:
            args = dict(zip(op.parameters, values, strict=True))
            if check:
                op.check_values(args)
            if log:
                _log_call(op.name, backend, args)
            return run(*values)

        return wrapped

    def resolve(self, args: Mapping[str, Any]) -> Callable[..., Any]:
        """A callable with the choice made; see Op.resolve."""
        notes: dict[Fact, None] = {}
        backend, chosen = self.choose(args, notes)
        run = self._wrap(backend, chosen)
        readers = [reader for reader in self._readers if reader is self.op._check]
        shorter = None
        if backend != REFERENCE:
            found = backends.registered()[backend]
            adapter = found.adapter(self.op.name)
            readers.append(adapter.unsupported)  # type: ignore[union-attr]
            if getattr(adapter, "REFUSES", False) and run is chosen:
                shorter = found.shorter
        scalars = sorted(self._scalars(readers))
        names, parameters = ", ".join(self.op.parameters), _parameter_source(self.op)
        source = [
            f"def _read_key({parameters}):",
            *_indent(key_source(self.op, notes, scalars), 1),
            "    return _key",
            f"def _read_quickly({parameters}):",
            *_indent(key_source(self.op, notes, scalars, places=not shorter), 1),
            "    return _key",
            f"def {self.op.name}({parameters}):",
            "    try:",
            *_indent(key_source(self.op, notes, scalars, places=not shorter), 2),
            "        _other = _key != _expected",
            "    except (AttributeError, IndexError, RuntimeError, ValueError):  # no tensor, or one for a number",
            "        _other = True",
            "    if _other:",
            f"        _explain({names})",
            "    try:",
            f"        return _run({names})",
            "    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # of a wrong type, for one",
            "        _error = error",
            f"    _explain({names})",
            "    raise _translate(_error) from None",
        ]

        def explain(*values: Any) -> None:
            """Raise if the call is wrong, or not one of those that the choice was made for."""
            now = self.op.bind(values, {})
            self.op.validate(now)
            try:
                same = space["_read_key"](*values) == wanted
            except IndexError:  # dims that the facts of the choice are about are not there
                same = False
            if not same:
                raise UnsupportedError(
                    f"this resolved {self.op.name} (backend {backend}) was made for other arguments: {_describe(now)}; "
                    f"it takes other batch, token and block counts, but the same dtypes, devices, head counts, layouts "
                    f"and options: call {self.op.name}.resolve(...) again"
                )

        space = self._compile(source, _run=run, _explain=explain)
        wanted, space["_expected"] = space["_read_key"](**args), space["_read_quickly"](**args)
        resolved: Callable[..., Any] = space[self.op.name]
        resolved.backend = backend  # type: ignore[attr-defined]
        resolved.__doc__ = f"{self.op.name} on backend {backend}; made by resolve()."
        return shorter(self.op, args, scalars, resolved) if shorter and sizes_only(notes) else resolved


_ENVIRONMENT = ("KVBACKEND_BACKEND", "KVBACKEND_DISABLE", "KVBACKEND_FALLBACK", "KVBACKEND_CHECK", "KVBACKEND_LOG")


# What a kernel that finds a wrong call puts before its message (csrc/common/check.h)
_KERNEL_MARK = "[kvbackend] "


def _run_source(names: str) -> list[str]:
    return [
        "try:",
        f"    return _run({names})",
        "except RuntimeError as error:",
        "    raise _translate(error) from None",
    ]


def _translate(error: Exception) -> Exception:
    """A native kernel can only throw RuntimeError; those that mean a wrong call become ArgumentError."""
    _, mark, message = str(error).partition(_KERNEL_MARK)
    return ArgumentError(message.splitlines()[0]) if mark else error


def _parameter_source(op: Op) -> str:
    return ", ".join(
        name if parameter.default is inspect.Parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in op.signature.parameters.items()
    )


def _indent(lines: Iterable[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def _describe(args: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if isinstance(value, torch.Tensor)
        else f"{name}={value!r}"
        for name, value in args.items()
        if value is not None
    )


def _log_call(op: str, backend: str, args: Mapping[str, Any]) -> None:
    if not logger.handlers and not logging.getLogger().handlers:  # the variable alone must be enough to see lines
        logger.addHandler(logging.StreamHandler())
    logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
    logger.info("%s on %s: %s", op, backend, _describe(args))
