"""aclrtMemcpyAsync, or aclrtMemcpyBatchAsync between host and device where CANN has it: csrc/npu/swap_blocks.cpp."""

from ... import native
from ...ops import registry
from . import own

op = registry["swap_blocks"]
run = native.kernel(op)


def unsupported(source, target, **_):
    yield from own.missing(op)
    yield from own.dense_pages(source=source, target=target)
    devices = {pool.device for pool in (source, target) if pool.device.type != "cpu"}
    if len(devices) > 1:
        yield f"source is on {source.device} and target on {target.device}; one NPU copies: copy through host memory"
