"""Judge one op on one backend: its samples, run and compared with the reference in float64 on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import REFERENCE, Backend
from ..dispatch import use
from ..errors import UnsupportedError
from ..native import library
from ..ops import registry
from ..spec import Op, Sample

# The largest difference from the reference in float64, relative to the largest magnitude in the result. A result is
# rounded to its dtype, which may move it by one unit in the last place of the largest element: 2^-7 (bfloat16) and
# 2^-10 (float16). In float32 the sums round: some units of 2^-24 for some hundred terms, 2e-6 is 34 of them.
# Whatever is no float must match to the bit.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-12}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


STATUSES = ("pass", "refused", "fail", "crashed", "untested")


@dataclass(frozen=True)
class Key:
    """What a cell is about; format: the KV formats that the sample's call names."""

    op: str
    backend: str
    device: str
    dtype: str
    format: str
    sample: str

    @property
    def turn(self) -> tuple[str, ...]:
        """What samples are made for at a time."""
        return self.op, self.backend, self.device, self.dtype


KEY = tuple(part.name for part in fields(Key))


@dataclass(frozen=True)
class Cell(Key):
    """The verdict on one op, backend, device, dtype and sample.

    status     "pass"; "refused" with the backend's reasons; "fail" with the error; "crashed": the process that ran it
               ended; "untested": nothing ran it
    max_error  of everything that came back, relative to the largest value of the reference's
    evidence   what ran where, in words; empty where nothing did
    """

    status: str
    reasons: tuple[str, ...] = ()
    max_error: float | None = None
    evidence: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As the command prints it with --json."""
        return asdict(self)


class Expected:
    """What the reference in float64, which rounds nowhere that matters, makes of a sample: once for all backends.

    It runs on the host: devices lack operations in float64, or do them slowly.
    """

    def __init__(self, op: Op, args: Mapping[str, Any]) -> None:
        self.op, self.before = op, copy_arguments(args, "cpu")

    @cached_property
    def results(self) -> dict[str, Tensor]:
        """What the call gives back and writes, by name; worked out when first asked for."""
        wanted = in_float64(self.op, self.before)
        return flat_results(self.op, self.op.reference(**self.op.bind((), wanted)), wanted)


Case = tuple[str, dict[str, Any], Expected]


def cells(
    ops: Iterable[str] | None = None,
    only_backends: Iterable[str] | None = None,
    device: str = "cpu",
    dtypes: Iterable[torch.dtype] = DTYPES,
) -> Iterator[Cell]:
    """Walk ops x backends of the device x dtypes x samples in this process, in the registry's order."""
    for op in map(registry.__getitem__, ops or registry):
        cases = {dtype: cases_of(op, device, dtype) for dtype in dtypes}
        for backend in served(device, only_backends):
            for dtype, samples in cases.items():
                yield from (run_cell(op, backend, device, dtype, *case) for case in samples)


def cases_of(op: Op, device: str, dtype: torch.dtype, quick: bool = False) -> list[Case]:
    """The samples of an op, for all backends: name, arguments, and what is expected of each."""
    made = op.make_samples(device, dtype)
    return [(name, args, Expected(op, args)) for name, args in (quick_samples(made) if quick else made)]


def served(device: str, only_backends: Iterable[str] | None = None) -> list[str]:
    """The names of the backends that run on a device, in the order in which they are asked."""
    names = [*(backend.name for backend in backends.serving(torch.device(device).type)), REFERENCE]
    return names if only_backends is None else [name for name in names if name in only_backends]


def quick_samples(samples: Iterable[Sample]) -> Iterator[Sample]:
    """The first sample of each format, and the one of production size."""
    seen = set()
    for name, args in samples:
        kv_format = format_of(args)
        if kv_format not in seen or name == "production":
            yield name, args
        seen.add(kv_format)


def format_of(args: Mapping[str, Any]) -> str:
    """The KV formats that a call names, each once: of its arguments `*format`, and transcode's `*layout`."""
    named = [value for name, value in args.items() if name.endswith(("format", "layout")) and isinstance(value, str)]
    return " / ".join(dict.fromkeys(named)) or "auto"


def name_of(dtype: torch.dtype) -> str:
    """As the cells spell it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def run_cell(
    op: Op,
    backend: str,
    device: str,
    dtype: torch.dtype,
    sample: str,
    args: Mapping[str, Any],
    expected: Expected | None = None,
) -> Cell:
    """Run one sample on one backend and judge it by the reference in float64; expected: of that sample."""
    about = op.name, backend, device, name_of(dtype), format_of(args), sample
    evidence = f"contract sample, torch {torch.__version__}"
    if backend == "cpu":
        evidence += f", {library('cpu').isa} kernels"
    expected = expected or Expected(op, args)
    want = expected.results
    try:
        got = copy_arguments(args)
        with use(backend, ops=op.name):
            result = op(**got)
        results = {name: tensor.cpu() for name, tensor in flat_results(op, result, got).items()}
        after = copy_arguments(got, "cpu")
    except UnsupportedError as error:
        reasons = tuple(line.strip() for line in str(error).splitlines()[1:-1])
        return Cell(*about, "refused", reasons)
    except Exception as error:  # whatever it is, it is this cell's verdict
        said = str(error).strip().partition("\n")[0]
        return Cell(*about, "fail", (f"{type(error).__name__}: {said}",), None, evidence)
    faults, largest = [], 0.0
    for name, tensor in results.items():
        apart = difference(tensor, want[name].to(tensor.dtype))
        largest = max(largest, apart)
        allowed = 0.0 if op.exact else TOLERANCES.get(tensor.dtype, 0.0)
        if not apart <= allowed:
            faults.append(
                f"{name} differs from the reference by {apart:.3g} of its largest value; allowed {allowed:.3g}"
            )
    faults += [
        f"{name} was written, but the op does not declare it"
        for name, value in after.items()
        if isinstance(value, Tensor) and name not in op.mutates and difference(value, expected.before[name])
    ]
    return Cell(*about, "fail" if faults else "pass", tuple(faults), largest, evidence)


def ask_cell(op: Op, backend: Backend, dtype: torch.dtype, sample: str, args: Mapping[str, Any]) -> Cell:
    """What a backend of a device that is not here says of one sample: refused, or untested. args: on device meta."""
    about = op.name, backend.name, backend.device or "", name_of(dtype), format_of(args), sample
    adapter = backend.adapter(op.name)
    if adapter is None:
        return Cell(*about, "refused", (backend.absence(op.name),))
    reasons = tuple(adapter.unsupported(**op.dispatcher.views(op.bind((), args))))
    return Cell(*about, "refused", reasons) if reasons else Cell(*about, "untested", backend.missing())


def in_float64(op: Op, args: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the arguments, in float64 where the op takes that: what an exact reference would see."""
    takes = {array.name for array in op.arrays if torch.float64 in array.dtypes}
    copies = copy_arguments(args)
    return {name: value.double() if name in takes and value is not None else value for name, value in copies.items()}


def flat_results(op: Op, result: Any, args: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a call gave back and what it wrote, by name."""
    outputs = () if result is None else result if isinstance(result, tuple) else (result,)
    named = {f"output {i}": tensor for i, tensor in enumerate(outputs)}
    return named | {name: args[name] for name in op.mutates if args.get(name) is not None}


def difference(got: Tensor, want: Tensor) -> float:
    """The largest difference relative to the largest finite magnitude; NaN and infinities must be where they should."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    got, want = got.detach().cpu().double(), want.detach().cpu().double()  # a device may have no float64
    finite = want.isfinite()
    if not torch.equal(got[~finite].nan_to_num(7.0), want[~finite].nan_to_num(7.0)) or not got[finite].isfinite().all():
        return float("inf")
    if not finite.any():
        return 0.0
    return float((got[finite] - want[finite]).abs().max() / want[finite].abs().max().clamp(min=1e-30))


def copy_arguments(args: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """Copies with the same strides, offsets and sharing of storage: a fused cache stays fused. None: where they are."""
    storages: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() == 0:
            target = tensor.device if device is None else device
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=target)
        if storage.data_ptr() not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(storage)
            storages[storage.data_ptr()] = whole.clone() if device is None else whole.to(device, copy=True)
        whole = storages[storage.data_ptr()]
        usable = whole.numel() // tensor.element_size() * tensor.element_size()
        return whole[:usable].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {name: copy(value) if isinstance(value, Tensor) else value for name, value in args.items()}


def summarize(found: Iterable[Cell]) -> dict[str, int]:
    """How many cells have each status."""
    counts = dict.fromkeys(STATUSES, 0)
    for cell in found:
        counts[cell.status] += 1
    return counts
