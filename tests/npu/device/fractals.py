"""NZ and plain pages: what the device writes and reads in one is what `layouts.transcode` makes of the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import kvbackend
from kvbackend.layouts import transcode
from kvbackend.matrix import TOLERANCES, difference
from kvbackend.ops import registry
from tests.npu import cases
from tests.npu.device.moving import moved

BLOCKS, BLOCK_SIZE, HEADS, DIM = 7, 16, 2, 64


def faults() -> Iterator[tuple[str, str]]:
    """Each round trip and what is wrong with it; empty: nothing."""
    for name, trip in (("rows written in NZ", written), ("attention over NZ pages", attended)):
        try:
            yield name, trip()
        except RuntimeError as error:
            yield name, str(error).splitlines()[0]


def written() -> str:
    """npu_scatter_pa_kv_cache in PA_NZ, taken apart, against the same rows in Norm; then NZ again."""
    import torch_npu

    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(9, HEADS, DIM, generator=generator).bfloat16() for _ in range(2)]
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:9].int()
    plain = [torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2)]
    fractals = transcode((plain[0], plain[1]), "NHD", "NZ", BLOCK_SIZE)
    given = dict(key=rows[0], value=rows[1], slots=slots)
    on_device = moved(given | dict(zip(("k", "v", "k_nz", "v_nz"), (*plain, *fractals), strict=True)), "npu:0")
    key, value, where = (on_device[name] for name in given)
    torch_npu.npu_scatter_pa_kv_cache(key, value, on_device["k"], on_device["v"], where, cache_mode="Norm")
    pages = on_device["k_nz"].flatten(1, 2), on_device["v_nz"].flatten(1, 2)
    torch_npu.npu_scatter_pa_kv_cache(key, value, *pages, where, cache_mode="PA_NZ")
    norm = on_device["k"].cpu(), on_device["v"].cpu()
    nz = on_device["k_nz"].cpu(), on_device["v_nz"].cpu()
    if not norm[0].any():
        return "nothing was written"
    there, back = transcode(norm, "NHD", "NZ", BLOCK_SIZE), transcode(nz, "NZ", "NHD", BLOCK_SIZE)
    same = [torch.equal(*pair) for pair in (*zip(there, nz, strict=True), *zip(back, norm, strict=True))]
    return "" if all(same) else "PA_NZ is not the order that layouts.transcode has for NZ"


def attended() -> str:
    """npu_fused_infer_attention_score_v2 over pages in NZ against the op over plain ones."""
    import torch_npu

    call = cases.paged_attention(
        torch.bfloat16, q_lens=(1, 1), seq_lens=(19, 9), head_dim=DIM, kv_heads=HEADS, block_size=BLOCK_SIZE
    )
    caches = tuple(call[name].nan_to_num(0) for name in ("key_cache", "value_cache"))
    nz = transcode((caches[0], caches[1]), "NHD", "NZ", BLOCK_SIZE)
    on_device = moved(call | dict(k_nz=nz[0], v_nz=nz[1]), "npu:0")
    k_nz, v_nz = on_device.pop("k_nz"), on_device.pop("v_nz")
    with kvbackend.use("npu", ops="paged_attention"):
        want, _ = registry["paged_attention"](**on_device)
    got, _ = torch_npu.npu_fused_infer_attention_score_v2(
        on_device["q"], k_nz, v_nz, actual_seq_qlen=[1, 2], actual_seq_kvlen=[19, 9],
        block_table=on_device["block_table"], num_query_heads=call["q"].shape[1], num_key_value_heads=HEADS,
        softmax_scale=call["softmax_scale"], input_layout="TND", block_size=BLOCK_SIZE,
    )  # fmt: skip
    apart = difference(got.cpu(), want.cpu())
    return "" if apart <= TOLERANCES[torch.bfloat16] else f"differs by {apart:.3g} from plain pages"
