"""Our own library for NPUs, csrc/npu, which is compiled for one torch_npu: `python setup.py build_npu`."""

from __future__ import annotations

from collections.abc import Iterator

from ... import native
from ...facts import fact
from ...spec import Op
from . import target


def missing(op: Op) -> Iterator[str]:
    """Why it has no kernel for an op here. It is not loaded where there is no NPU: the backend gives that reason."""
    if target.found().target is not None:
        if reason := native.library("npu").reason:
            yield reason
        yield from native.missing(op, "npu")


def dense_pages(**pools: object) -> Iterator[str]:
    """Blocks are copied as stretches of memory, wherever each begins."""
    for name, pool in pools.items():
        expression = f"{name}.is_contiguous() or {name}.shape[0] == 0 or {name}[0].is_contiguous()"
        if not fact(expression, **{name: pool}):
            yield f"{name} has strided blocks; the runtime copies dense ones: allocate keys and values in layout 'NHD'"
