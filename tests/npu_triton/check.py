"""What ci/npu_triton_check.sh runs, in an environment with triton-ascend and ascendnpu-ir (docs/ascend.md):

compiled      what launchers launch for calls of production size, for two chips, against the page's table
interpreted   contract samples by triton-ascend's interpreter, against the reference in float64
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from kvbackend import backends, formats
from kvbackend.backends.npu_triton import TRITON_ASCEND
from kvbackend.backends.npu_triton.limits import WIDEST
from kvbackend.codecs import split
from kvbackend.ops import registry
from tests.cuda_triton import interpreted, quantized, shapes

from .compiling import TARGETS, Built, Compiler
from .judging import LIMIT, NAMES

PAGE = Path(__file__).parents[2] / "docs" / "ascend.md"
MARK = "<!-- compiled by triton-ascend -->\n"
END = "\n<!-- end -->\n"

SERVED = [name for name in registry if backends.registered()["npu_triton"].adapter(name)]
NOT_COMPILED = ("swap_blocks",)  # its pairs come from the host, so not on 'meta'; its kernel is that of copy_blocks


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def codec_calls(kv_formats: Iterable[str], dim: int, dtype: torch.dtype) -> Iterator[shapes.Call]:
    """Rows of 8 heads into formats and back."""
    x = meta(256, 8, dim, dtype=dtype)
    for kv_format in kv_formats:
        fmt = formats.get(kv_format)
        role = "value" if split.across_tokens(fmt, "key") else "key"
        how = dict(
            kv_format=kv_format, role=role, global_scale=meta(1, dtype=torch.float32) if fmt.global_scale else None
        )
        case = f"{kv_format}, rows of {dim}"
        yield "quantize_kv", case, dict(x=x, **how)
        codes = meta(*split.codes_shape(fmt, x.shape), dtype=split.storage(fmt))
        scales = meta(*split.scales_shape(fmt, role, x.shape), dtype=split.scale_dtype(fmt))
        yield "dequantize_kv", case, dict(codes=codes, scales=scales, **how)


def widest_calls() -> Iterator[shapes.Call]:
    """Rows of as many numbers as the backend takes."""
    case = f"rows of {WIDEST}"
    rows, slots = meta(64, 2, WIDEST), meta(64, dtype=torch.int64)
    cache, angles = meta(16, 16, 2, WIDEST), meta(4096, WIDEST, dtype=torch.float32)
    written = dict(key=rows, value=rows, key_cache=cache, value_cache=cache)
    yield "reshape_and_cache", case, dict(**written, slot_mapping=slots)
    ragged = dict(block_table=meta(3, 8, dtype=torch.int32), cu_seqlens=meta(4, dtype=torch.int32), num_tokens=60)
    yield "gather_cache", case, dict(cache=cache, **ragged)
    for interleaved in (False, True):
        yield "apply_rope", case, dict(x=rows, positions=slots, cos_sin=angles, interleaved=interleaved)
    yield "merge_attn_states", case, dict(outs=meta(4, 64, 2, WIDEST), lses=meta(4, 64, 2, dtype=torch.float32))
    every = ("fp8_e4m3", "fp8_e4m3:channel", "fp8_e5m2:token_head", "int8", "mxfp8", "nvfp4", "int4")
    yield from codec_calls(every, WIDEST, torch.float32)


def calls() -> Iterator[shapes.Call]:
    """Calls of production size of each op that the backend serves."""
    yield from (call for call in shapes.FULL.calls() if call[0] in SERVED and call[0] not in NOT_COMPILED)
    sides = dict.fromkeys(side for name in quantized.PAGED for side in formats.pair(name))
    yield from codec_calls([side for side in sides if formats.get(side).quantized], 128, torch.bfloat16)
    slots, pages = meta(256, dtype=torch.int64), meta(2048, 64, 576)
    caches = dict(ckv_cache=pages[..., :512], kpe_cache=pages[..., 512:])
    latents = dict(ckv=meta(256, 512), kpe=meta(256, 64), slot_mapping=slots)
    yield "concat_and_cache_mla", "bf16", dict(**latents, **caches)
    index = shapes.FULL.index(1)
    yield "lightning_indexer", "decode", dict(**index, k=2048)
    yield "candidate_blocks", "decode", dict(**index, num_candidates=64, candidate_block_size=128)
    recent = shapes.FULL.scoring(shapes.FULL.prefill, last_queries=32, window=1024)
    yield "accumulate_scores", "the last 32 of a prompt, window", recent
    yield from widest_calls()


def unlisted() -> Iterator[shapes.Call]:
    """Every record, pair of records and format, which the table leaves out."""
    for op_name in ("store_rows", "transcode"):
        for sample, example in registry[op_name].make_samples("meta", torch.bfloat16):
            yield op_name, sample, example
    yield from shapes.FULL.every_format()


def compiled(chip: str, every: Callable[[], Iterable[shapes.Call]]) -> list[tuple[str, str, Built]]:
    """Each kernel once, with the first call that launches it."""
    machine, found = Compiler(chip), []
    for op_name, case, example in every():
        before = len(machine.built)
        machine.call(op_name, **example)
        found += [(op_name, case, built) for built in machine.built[before:]]
    return found


@triton.jit
def _add_one(x, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(x + n, tl.load(x + n) + 1.0)


def overflow_is_seen(chip: str) -> bool:
    """Whether a kernel for which UB has no room is told from one that fits."""
    machine, x = Compiler(chip), torch.empty(1 << 17, device="meta")
    with machine.installed():
        machine.start(_add_one, (1,), x, N=1 << 13)
        machine.start(_add_one, (1,), x, N=1 << 17)
    fits, overflows = machine.built
    return not fits.faults and any(fault.startswith("error: ub overflow") for fault in overflows.faults)


def table(found: dict[str, list[tuple[str, str, Built]]]) -> str:
    """The page's lines: KiB of each memory on each chip."""
    head = f"KiB of {', '.join(NAMES.values())}; there are {', '.join(map(str, LIMIT.values()))}"
    lines = [f"{head}.", "", "| op | first call that launches it | kernel |" + "".join(f" {c} |" for c in TARGETS)]
    lines.append("|---" * (3 + len(TARGETS)) + "|")
    for row in zip(*found.values(), strict=True):
        op_name, case, built = row[0]
        cells = (" / ".join(f"{built.used[name]:.1f}" for name in LIMIT) for _, _, built in row)
        lines.append(f"| `{op_name}` | {case} | `{built.name}` |" + "".join(f" {cell} |" for cell in cells))
    return "\n" + "\n".join(lines) + "\n"


def start_interpreter(names: list[str], out: Any) -> subprocess.Popen[bytes]:
    """A process of its own, since TRITON_INTERPRET must be set before triton is imported."""
    command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.interpreted", *names]
    return subprocess.Popen(command, env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=out)


def main(arguments: list[str]) -> int:
    """Both parts; --write writes the page's table."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    print(f"triton-ascend {version('triton-ascend')}, {triton.__file__}; ascendnpu-ir {version('ascendnpu-ir')}")
    wrong = [f"{name} is here too" for name in ("triton", "torch_npu") if name in {d.name for d in distributions()}]
    if version("triton-ascend") != TRITON_ASCEND:
        wrong.append(f"the backend names triton-ascend {TRITON_ASCEND}")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # nothing is taken from an earlier run
        process = start_interpreter([*SERVED, *interpreted.OTHERS], out)
        with ProcessPoolExecutor(max_workers=len(TARGETS), mp_context=get_context("spawn")) as pool:
            found = dict(zip(TARGETS, pool.map(compiled, TARGETS, [calls] * len(TARGETS)), strict=True))
            others = dict(zip(TARGETS, pool.map(compiled, TARGETS, [unlisted] * len(TARGETS)), strict=True))
            if not all(pool.map(overflow_is_seen, TARGETS)):
                wrong.append("a kernel that does not fit into UB was not told from one that does")
        if process.wait():
            wrong.append("the interpreter's process ended early")
        else:
            out.seek(0)
            verdicts = json.load(out)
            wrong += [line for name in verdicts for line in interpreted.complaints(name, verdicts[name])]
            print(f"interpreted: {sum(len(verdicts[name]) for name in SERVED)} samples of {len(SERVED)} ops")
    for chip, listed in found.items():
        rows = listed + others[chip]
        print(f"{chip}: {len(rows)} kernels of {len({op for op, _, _ in rows})} ops")
        wrong += [f"{chip}: {op}, {case}: {built.name} {fault}" for op, case, built in rows for fault in built.faults]
    called = {op for op, _, _ in calls()}
    wrong += [f"{name}: no call of it is compiled" for name in SERVED if name not in (*called, *NOT_COMPILED)]
    head, mark, rest = PAGE.read_text().partition(MARK)
    old, end, tail = rest.partition(END)
    new = table(found)
    if "--write" in arguments and not wrong:
        PAGE.write_text(head + mark + new + end + tail)
    elif old != new:
        wrong.append(f"the table of {PAGE.name} is not of this code: run ci/npu_triton_check.sh --write")
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
