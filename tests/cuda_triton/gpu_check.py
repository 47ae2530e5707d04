"""What ci/gpu_check.sh runs: four parts, each of which writes what it found before the next begins.

providers  the libraries that are installed (FlashMLA, FlashInfer, DeepGEMM) on the cases of tests/providers, against
           the reference in float64
contract   every op's samples on the GPU against the reference in float64; also in matrix.json, which
           `kvbackend matrix merge` reads
graphs     each hot call captured, replayed on other values, compared to the bit with the call itself
times      medians by CUDA events, GB/s and TFLOP/s, as percents of a copy and of a matmul measured here, on
           sizes that fill the chip; beside them every other backend that takes the call, and torch's own attention on
           the same numbers, dense
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbackend import backends
from kvbackend.matrix import Cell, cells, copy_arguments, difference, documents, summarize
from kvbackend.ops import registry

from .. import device_times
from . import interpreted, peers, shapes

PEERS = ("flashinfer", "flash_mla", "flash_attn", "deep_gemm")
SECONDS = 440  # of the 8 minutes, after which contract samples, which come last, stop
DRY_TIMES = 4  # calls of the longer list that are timed on the CPU


class Check:
    """One run: where, how long, and what was found."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        self.shapes = shapes.SMALL if dry else shapes.FULL
        self.calls = list(self.shapes.calls())[:: 4 if dry else 1]
        self.start = time.monotonic()
        self.found: dict[str, Any] = {"dry": dry, "torch": torch.__version__, "triton": version("triton")}
        self.found["importable peers"] = [name for name in PEERS if find_spec(name)]
        if not dry:
            self.found["device"] = torch.cuda.get_device_name()
            self.found["capability"] = torch.cuda.get_device_capability()

    def write(self, part: str, value: Any) -> None:
        self.found[part] = value
        Path(os.environ["OUT"], "gpu_check.json").write_text(json.dumps(self.found, indent=1, default=str))
        print(f"{time.monotonic() - self.start:6.1f} s  {part}", flush=True)

    # ------------------------------------------------------------------------------------------------- contract

    def contract(self) -> bool:
        if self.dry:
            faults = {k: v for k, v in interpreted.verdicts("copy_blocks", False).items() if v}
            self.write("contract", {"copy_blocks": faults})
            self.write_cells(list(cells(["copy_blocks"], ["reference"])))
            return not faults
        report, good, found = {}, True, list[Cell]()
        for name, backend in launchable():
            if time.monotonic() - self.start > SECONDS:
                report[f"{name}, {backend}"] = "not run: out of time"
                good = False
                continue
            judged = list(cells([name], [backend], "cuda"))
            found += judged
            report[f"{name}, {backend}"] = {
                **summarize(judged),
                "faults": [(cell.sample, cell.dtype, cell.reasons) for cell in judged if cell.status == "fail"][:10],
            }
            good = good and not report[f"{name}, {backend}"]["faults"]
        self.write("contract", report)
        self.write_cells(found)
        return good

    def write_cells(self, found: list[Cell]) -> None:
        Path(os.environ["OUT"], "matrix.json").write_text(json.dumps(documents.document(found, [self.device])))

    # ------------------------------------------------------------------------------------------------ providers

    def providers(self) -> bool:
        report = peers.verdicts(self.device, self.dry)
        self.write("providers", report)
        return peers.good(report)

    # --------------------------------------------------------------------------------------------------- graphs

    def graphs(self) -> bool:
        report = {}
        for name, case, call in self.calls:
            args = materialize(call, self.device)
            first, second = copy_arguments(args), copy_arguments(args)
            eager = results(name, launcher(name, first)(), first)
            replayed = results(name, self.captured(name, second), second)
            report[f"{name}, {case}"] = [difference(b, a) for a, b in zip(eager, replayed, strict=True)]
        self.write("graphs", report)
        return not any(any(apart) for apart in report.values())

    def captured(self, name: str, args: dict[str, Any]) -> Any:
        """The result of a replay; dry, of a second call. What the calls before wrote is undone."""
        call = launcher(name, args)
        written = {key: args[key].clone() for key in registry[name].mutates if args.get(key) is not None}
        if self.dry:
            call()
            restore(args, written)
            return call()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        restore(args, written)
        for tensor in result if isinstance(result, tuple) else (result,):
            if tensor is not None and tensor.is_floating_point():
                tensor.fill_(7.0)  # what the replay must overwrite
        graph.replay()
        torch.cuda.synchronize()
        return result

    # ---------------------------------------------------------------------------------------------------- times

    def median_us(self, call: Callable[[], Any]) -> float:
        return device_times.median_us(call, self.device, self.dry)

    def times(self) -> bool:
        copy, matmul = device_times.ceilings(self.device, self.dry)
        self.write("ceilings", {"copy_gbs": copy, "matmul_tflops": matmul})
        report = []
        sizes = shapes.SMALL if self.dry else shapes.LARGE
        every = [*sizes.calls(), *peers.calls(sizes)]
        for name, case, call in self.calls + every[-DRY_TIMES:] if self.dry else every:
            args = materialize(call, self.device)
            others = peers.times(name, args, self.dry, self.median_us)
            if reasons := refused(name, args):
                report.append({"op": name, "case": case, "refused": reasons, "others": others})
                continue
            taken = self.median_us(launcher(name, args))
            gbs = traffic(name, args) / taken / 1e3
            row = {"op": name, "case": case, "median_us": taken, "gbs": gbs, "percent_of_copy": 100 * gbs / copy}
            row["others"] = others
            if operations := flops(name, args):
                row["tflops"] = operations / taken / 1e6
                row["percent_of_matmul"] = 100 * row["tflops"] / matmul
            if name == "paged_attention" and args["kv_format"] == "bf16" and "window" not in args:
                q, dense = gathered(args)
                row["sdpa_us"] = self.median_us(sdpa(args, q, dense))
                if q.shape[2] > 1:
                    row["flex_us"] = self.median_us(peers.flex(args, dense, q, compiled=not self.dry))
            report.append(row)
            self.write("times", report)
        return True


def restore(args: dict[str, Any], written: dict[str, Tensor]) -> None:
    for key, before in written.items():
        args[key].copy_(before)


def launchable() -> list[tuple[str, str]]:
    """Ops and the backends of our own that have them here; the libraries have a part for themselves."""
    ours = ["cuda_triton", *(backend.name for backend in peers.installed(False) if backend.name == "cuda")]
    return [(name, backend) for name in registry for backend in ours if backends.registered()[backend].adapter(name)]


def refused(name: str, args: dict[str, Any]) -> list[str]:
    """Why Triton's launcher does not take a call."""
    adapter = backends.registered()["cuda_triton"].adapter(name)
    assert adapter is not None
    return list(adapter.unsupported(**registry[name].dispatcher.views(registry[name].bind((), args))))


def launcher(name: str, args: dict[str, Any]) -> Callable[[], Any]:
    adapter = backends.registered()["cuda_triton"].adapter(name)
    assert adapter is not None
    bound = registry[name].bind((), args)
    return lambda: adapter.run(**bound)


def results(name: str, result: Any, args: dict[str, Any]) -> list[Tensor]:
    """What a call gave and wrote."""
    given = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    written = [args[key] for key in registry[name].mutates if args.get(key) is not None]
    return [tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for tensor in given + written]


def materialize(call: dict[str, Any], device: str) -> dict[str, Any]:
    """The call with numbers, drawn on the device."""
    with torch.device(device):
        return drawn(call, device, torch.Generator(device).manual_seed(3))


def drawn(call: dict[str, Any], device: str, generator: torch.Generator) -> dict[str, Any]:
    """Full sequences over shuffled blocks, queries at their ends, codes that are finite."""
    names = ("key_cache", "ckv_cache", "compressed_cache", "low_cache", "cache")
    cache = next((call[key] for key in names if call.get(key) is not None), None)
    made: dict[str, Any] = dict(call)
    pools: dict[int, Tensor] = {}
    for name, meta in call.items():
        if not isinstance(meta, Tensor):
            continue
        if name in ("block_table", "window_table"):
            value = torch.randperm(meta.numel(), generator=generator).reshape(meta.shape)
        elif name == "seq_lens":
            value = torch.full(meta.shape, length_of(call, cache))
        elif name in ("cu_seqlens_q", "cu_seqlens"):
            tokens = (
                call["num_tokens"] if name == "cu_seqlens" else len(call.get("q", call.get("kv", call.get("q_nope"))))
            )
            value = torch.arange(len(meta)) * (tokens // (len(meta) - 1))
        elif name == "state_slots":
            value = torch.arange(len(meta))
        elif name == "candidates":
            value = torch.arange(meta.shape[1]).expand(meta.shape)
        elif name == "kept":
            value = (torch.arange(meta.shape[-1]) * 2).expand(meta.shape)
        elif name == "slot_mapping":
            value = torch.randperm(rows_of(call, cache), generator=generator)[: len(meta)]
        elif name in ("topk_indices", "pages") and "seq_lens" in call:  # stretches of one permutation
            longest = rows_of(call, cache) // call["seq_lens"].shape[0]
            longest //= call["page_size"] if name == "pages" else 1
            starts = torch.randint(longest, (*meta.shape[:-1], 1), generator=generator)
            value = torch.randperm(longest, generator=generator)[(starts + torch.arange(meta.shape[-1])) % longest]
        elif name == "block_mapping":
            value = torch.tensor([[0, 1], [2, 3]])
        elif name == "positions":
            value = torch.arange(len(meta))
        elif name == "key_positions":
            value = torch.arange(meta.numel()).reshape(meta.shape) % length_of(call, cache)
        elif meta.dtype in (torch.float32, torch.bfloat16, torch.float16) and meta._base is None:
            value = torch.randn(meta.shape, generator=generator).abs() * 0.1 + 0.01
        elif meta._base is not None:  # parts of one pool
            base = meta._base
            if id(base) not in pools:
                pools[id(base)] = torch.randn(base.shape, generator=generator).to(base.dtype).to(device)
            made[name] = pools[id(base)].as_strided(meta.shape, meta.stride(), meta.storage_offset())
            continue
        else:  # codes and scales of a byte: small and finite in every format
            value = torch.randint(48, 64, meta.shape, generator=generator, dtype=torch.uint8).view(meta.dtype)
        made[name] = value.to(meta.dtype).to(device)
    return made


def length_of(call: dict[str, Any], cache: Tensor | None) -> int:
    """Tokens of a sequence: as many as fill its blocks, or have scores."""
    if "block_table" not in call:
        return int(call["scores"].shape[2])
    num_seqs, blocks = call["block_table"].shape
    rows = blocks * call["block_size"] if cache is None else rows_of(call, cache) // num_seqs
    return int(rows * call.get("compress_ratio", 1) * (call["page_size"] if "low_cache" in call else 1))


def rows_of(call: dict[str, Any], cache: Tensor) -> int:
    """Tokens that the pool holds."""
    blocks = cache.shape[0]
    return blocks * (64 if cache.dtype is torch.uint8 and cache.dim() == 2 else cache.shape[1])


def traffic(name: str, args: dict[str, Any]) -> float:
    """Bytes that must move: what is read once, and what is written."""
    sizes = {key: value.numel() * value.element_size() for key, value in args.items() if isinstance(value, Tensor)}
    pools = {key: size for key, size in sizes.items() if "cache" in key}
    other = sum(sizes.values()) - sum(pools.values())
    if name == "copy_blocks":
        return 2 * pools["cache"] / args["cache"].shape[0] * len(args["block_mapping"])
    if name == "transcode":
        return 2 * sizes["pages"]
    if name == "compact_cache":
        return 2 * pools["cache"] * args["kept"].shape[2] * len(args["block_table"]) / rows_of(args, args["cache"])
    if "slot_mapping" in args:
        cache = next(args[key] for key in pools)
        share = len(args["slot_mapping"]) / rows_of(args, cache)
        return other + share * sum(pools.values())
    if name in ("sparse_attention", "token_logits"):
        return other + args["q"].shape[0] * looked_at(args) / rows_of(args, args["key_cache"]) * sum(pools.values())
    if "topk_indices" in args:
        chosen_of = "ckv_cache" if name == "sparse_mla_attention" else "compressed_cache"
        share = args["topk_indices"].numel() / rows_of(args, args[chosen_of])
        return other + sizes.get("window_cache", 0) + share * sizes[chosen_of]
    if args.get("window", -1) > 0:
        share = args["window"] * len(args["seq_lens"]) / rows_of(args, args["key_cache"])
        return other + share * sum(pools.values())
    if name == "gather_cache":
        return other + sum(pools.values()) + 2 * args["num_tokens"] * args["cache"][0, 0].numel()
    return other + sum(pools.values())


def looked_at(args: dict[str, Any]) -> int:
    """Tokens of each kv head that a query reads, where they are chosen."""
    if "pages" in args:
        return int(args["pages"].shape[2] * args["page_size"])
    return int(args["topk_indices"].shape[2] + args["num_sinks"] + args["num_recent"])


def flops(name: str, args: dict[str, Any]) -> float:
    """Multiplications and additions of the products, causal ones counted."""
    if name == "paged_attention" and args.get("window", -1) < 0:
        queries, length = args["max_seqlen_q"], rows_of(args, args["key_cache"]) // len(args["seq_lens"])
        seen = len(args["seq_lens"]) * queries * (length - (queries - 1) / 2)
        return 4 * seen * args["q"].shape[1] * args["q"].shape[2]
    if name == "mla_attention":
        queries, length = args["max_seqlen_q"], rows_of(args, args["ckv_cache"]) // len(args["seq_lens"])
        seen = len(args["seq_lens"]) * queries * (length - (queries - 1) / 2)
        return 2 * seen * args["q_nope"].shape[1] * (2 * 512 + 64)
    if name == "sparse_mla_attention":
        return 2 * args["topk_indices"].numel() * args["q_nope"].shape[1] * (2 * 512 + 64)
    if name == "sparse_attention":
        return 4 * looked_at(args) * args["q"].numel()
    if name == "mla_project_kv":
        return 2 * args["hidden"].shape[0] * args["w_kva"].numel()
    if name == "indexer_logits":
        keys = rows_of(args, args["key_cache"]) // len(args["seq_lens"])
        return 2 * args["q"].numel() * keys
    if name == "shared_kv_attention":
        seen = args["topk_indices"].numel() + args["window"] * args["q"].shape[0]
        return 4 * seen * args["q"].shape[1] * 512
    return 0.0


def gathered(args: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Queries [B, H, n, D], and the same keys and values dense, [B, Hk, S, D]."""
    table, num_seqs = args["block_table"].long(), len(args["seq_lens"])
    dense = [args[name][table].flatten(1, 2).transpose(1, 2) for name in ("key_cache", "value_cache")]
    return args["q"].unflatten(0, (num_seqs, -1)).transpose(1, 2), dense


def sdpa(args: dict[str, Any], q: Tensor, dense: list[Tensor]) -> Callable[[], Any]:
    """torch's attention on dense keys: paging and a varlen batch cost nothing there."""
    queries, length = q.shape[2], dense[0].shape[2]
    mask = torch.ones(queries, length, dtype=torch.bool, device=q.device).tril(length - queries)
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, *dense, attn_mask=None if queries == 1 else mask, scale=args["softmax_scale"], enable_gqa=True
    )


def main(arguments: list[str]) -> int:
    check = Check("--dry" in arguments)
    good = [check.providers(), check.graphs(), check.times(), check.contract()]
    print(json.dumps(check.found, indent=1, default=str) if all(good) else "faults: see gpu_check.json")
    try:
        print(f"kvbackend {version('kvbackend')}")
    except PackageNotFoundError:
        print("kvbackend is not installed: run from its folder")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
