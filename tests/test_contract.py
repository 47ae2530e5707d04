"""What every op promises on every backend. A new op or backend adds nothing here."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import kvbackend
from kvbackend import backends
from kvbackend.backends import REFERENCE
from kvbackend.dispatch import explain
from kvbackend.errors import ArgumentError
from kvbackend.matrix import DTYPES, copy_arguments, run_cell
from kvbackend.ops import registry
from tests import edges

OPS = sorted(registry)
EVERY_OP = pytest.mark.parametrize("name", OPS)
# a few odd samples are enough where each costs a compilation
FEW = 3


# Ops whose reference is all there is yet: chosen explicitly, since automatic choice warns.
WITHOUT_KERNEL: set[str] = set()
# Samples that the CPU kernel may refuse.
ALLOWED_REFUSALS: dict[str, set[str]] = {
    "sparse_mla_attention": {"v32_nvfp4_352"},
    "indexer_logits": {"fp8 queries, decode", "fp8 queries, prefill"},
}


@pytest.fixture(autouse=True)
def _reference_where_it_is_all_there_is(request: pytest.FixtureRequest):
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name in WITHOUT_KERNEL and "backend" not in request.node.callspec.params:
        with kvbackend.use(REFERENCE, ops=name):
            yield
    else:
        yield


def samples(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict:
    return dict(registry[name].make_samples(device, dtype))


@pytest.mark.parametrize("backend", backends.names())
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@EVERY_OP
def test_every_sample_equals_the_reference(name: str, backend: str, dtype: torch.dtype, device: str) -> None:
    served = [REFERENCE, *(found.name for found in backends.serving(torch.device(device).type))]
    if backend not in served:
        pytest.skip(f"{backend} serves no {device} tensors; these backends do: {', '.join(served)}")
    found = [
        run_cell(registry[name], backend, device, dtype, *sample) for sample in samples(name, dtype, device).items()
    ]
    assert found
    faults = [f"{cell.sample}: {reason}" for cell in found for reason in cell.reasons if cell.status == "fail"]
    assert not faults, "\n".join(faults)
    if all(cell.status == "refused" for cell in found):
        pytest.skip("; ".join(sorted({reason for cell in found for reason in cell.reasons})))


@pytest.mark.parametrize("backend", backends.names())
@pytest.mark.parametrize("name", edges.OPS)
def test_sizes_where_engines_broke_equal_the_reference(name: str, backend: str, device: str) -> None:
    if backend not in [found.name for found in backends.serving(torch.device(device).type)]:
        pytest.skip(f"{backend} serves no {device} tensors")
    for sample, dtype, args in edges.calls(name):
        registry[name].check_values(registry[name].bind((), args))
        cell = run_cell(registry[name], backend, device, dtype, sample, copy_arguments(args, device))
        assert cell.status == "pass" or (cell.status == "refused" and backend != "cpu"), (sample, cell.reasons)


@EVERY_OP
def test_cpu_kernel_takes_every_sample_or_says_why(name: str) -> None:
    """On the CPU, where the library is always built in CI, only what is listed may be refused."""
    if name in WITHOUT_KERNEL:
        assert backends.registered()["cpu"].adapter(name) is None, "it has a kernel now: take it off the list"
        pytest.skip(f"has no kernel for {name}")
    refused = set()
    for sample, args in samples(name).items():
        cpu = next(verdict for verdict in explain(name, **args).backends if verdict.name == "cpu")
        if cpu.status == "refused":
            refused.add(sample)
    assert refused == ALLOWED_REFUSALS.get(name, set())


@EVERY_OP
def test_arguments_of_wrong_types_are_told(name: str) -> None:
    """By name, in the four ways of asking; torch's words stand for nothing that a caller wrote."""
    op = registry[name]
    good = op.bind((), next(iter(samples(name).values())))
    resolved = op.resolve(**good)
    arrays = {array.name for array in op.arrays}
    for argument, value in good.items():
        wrong = "x" if not isinstance(value, str) else 3
        for bad in (wrong, [value], object(), b"x", *([] if argument in arrays else [torch.zeros(2)])):
            takes_bytes = isinstance(bad, bytes) and isinstance(value, str)  # torch's own binding reads them as text
            for ask in (op.resolve, resolved, lambda **call: explain(op, **call), *([] if takes_bytes else [op])):
                with pytest.raises(ArgumentError, match=rf"^{argument} is .*; it must be .*: pass one$"):
                    ask(**{**good, argument: bad})
    for call in ({**good, "more": 1}, {key: value for key, value in good.items() if key not in arrays}):
        with pytest.raises(ArgumentError, match=f"^{name}: .*; it takes .*: pass these$"):
            op(**call)


@EVERY_OP
def test_adapters_have_the_signature_of_the_op(name: str) -> None:
    op = registry[name]
    for backend in backends.registered().values():
        adapter = backend.adapter(name)
        if adapter is None:
            continue
        readable = inspect.signature(adapter.unsupported).parameters.values()
        named = {p.name for p in readable if p.kind is not inspect.Parameter.VAR_KEYWORD}
        assert named <= set(op.parameters), f"{backend.name}: unsupported names what the op does not take"
        assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in readable), f"{backend.name}: unsupported lacks **_"
        if inspect.isfunction(adapter.run):
            assert tuple(inspect.signature(adapter.run).parameters) == op.parameters, backend.name


@EVERY_OP
def test_predicates_answer_on_meta_tensors(name: str) -> None:
    """Any machine can ask about any device: predicates read metadata only."""
    for args in samples(name, device="meta").values():
        op = registry[name]
        bound = op.bind((), args)
        op.validate(bound)
        for backend in backends.registered().values():
            reasons = list(op.dispatcher.reasons(backend, op.dispatcher.views(bound)))
            assert all(isinstance(reason, str) for reason in reasons)


@EVERY_OP
def test_opcheck(name: str) -> None:
    """torch's own test of schema, fake and functionalization."""
    for args in list(samples(name).values())[:FEW]:
        torch.library.opcheck(getattr(torch.ops.kvbackend, name).default, (), args)


@EVERY_OP
def test_compiles_without_graph_break(name: str) -> None:
    torch._dynamo.reset()
    op = registry[name]
    args = next(iter(samples(name).values()))
    compiled = torch.compile(lambda call: op(**call), fullgraph=True, dynamic=True, backend="aot_eager")
    wanted, got = copy_arguments(args), copy_arguments(args)
    want, result = op(**wanted), compiled(got)
    torch.testing.assert_close(result, want, equal_nan=True)
    for written in op.mutates:
        torch.testing.assert_close(got.get(written), wanted.get(written), equal_nan=True)


@EVERY_OP
def test_traces_with_sizes_that_only_the_run_knows(name: str) -> None:
    """Counts of tokens, sequences and blocks may be unbacked: check and fake must not branch on them."""
    op = registry[name]
    args = next(iter(samples(name).values()))
    counts = {"T", "B", "B+1", "<=T", "nb", "max_blocks", "n", "N"}
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True):
        symbols: dict[str, torch.SymInt] = {}

        def symbol(word: str) -> torch.SymInt:
            if word not in symbols:
                symbols[word] = environment.create_unbacked_symint()
                torch._check(symbols[word] >= 2)
            return symbols[word]

        call = dict(args)
        for array in op.arrays:
            if args.get(array.name) is None:
                continue
            tensor = args[array.name]
            sizes = [
                symbol("B") + 1
                if word == "B+1"
                else symbol("T")
                if word == "<=T"
                else symbol(word)
                if word in counts
                else size
                for word, size in zip(array.fixed, tensor.shape, strict=False)
            ]
            call[array.name] = torch.empty([*sizes, *tensor.shape[len(sizes) :]], dtype=tensor.dtype, device="cpu")
        op(**call)


class NoHostLook(TorchDispatchMode):
    """Raises where an op would make the host wait for the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.__name__.split(".")[0] in (
            "_local_scalar_dense",
            "nonzero",
            "is_nonzero",
            "masked_select",
            "unique",
        ):
            raise AssertionError(f"{function} waits for the device")
        return function(*args, **(kwargs or {}))


@EVERY_OP
def test_reference_never_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator each look at a value stops the stream, and cannot be captured in a graph."""
    monkeypatch.setattr("kvbackend.ops._math.check_cu_seqlens", lambda *_: None)  # looks at host tensors only
    op = registry[name]
    for args in samples(name).values():
        with NoHostLook():
            op.reference(**op.bind((), copy_arguments(args)))


@EVERY_OP
def test_refuses_inputs_that_require_grad(name: str) -> None:
    args = dict(next(iter(samples(name).values())))
    floats = [key for key, value in args.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if not floats:
        pytest.skip(f"{name} takes no floating-point tensor here")
    target = floats[0]
    args[target] = args[target].detach().clone().requires_grad_()
    with pytest.raises(kvbackend.ArgumentError, match="no gradient formula"):
        registry[name](**args)
    with torch.no_grad():
        registry[name](**args)


@EVERY_OP
def test_resolved_callable_takes_other_counts_and_refuses_other_dtypes(name: str) -> None:
    op = registry[name]
    every = samples(name)
    first, args = next(iter(every.items()))
    resolved = op.resolve(**args)
    wanted, got = copy_arguments(args), copy_arguments(args)
    want, result = op(**wanted), resolved(**got)
    torch.testing.assert_close(result, want, equal_nan=True, msg=first)
    other = next(iter(samples(name, torch.bfloat16).values()))
    if all(value.dtype == args[key].dtype for key, value in other.items() if isinstance(value, torch.Tensor)):
        return  # it takes one dtype whatever the sample's
    with pytest.raises(kvbackend.UnsupportedError, match="resolve"):
        resolved(**other)


@EVERY_OP
def test_value_checks_accept_every_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    for sample, args in samples(name).items():
        refused = sample in ALLOWED_REFUSALS.get(name, set())
        with kvbackend.use(REFERENCE, ops=name) if refused else nullcontext():
            registry[name](**copy_arguments(args))


@EVERY_OP
def test_documentation(name: str) -> None:
    """Every tensor argument is described; the source is named."""
    op = registry[name]
    doc = op.__doc__ or ""
    assert op.summary.endswith("."), "the docstring starts with one sentence"
    assert "Source:" in doc
    for parameter in op.parameters:
        assert parameter in doc, f"{parameter} is not described"
