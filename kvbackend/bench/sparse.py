"""Ops that select and attend to selected tokens, at the sizes of DeepSeek-V3.2, beside torch or the dense kernel.

Each case has one peer that does the same work: `torch.topk`; torch's matmul over gathered keys, in buffers that exist
already; scores as a matrix and then `torch.topk`; and mla_attention over as many tokens as were selected. Pages come
from memory: each call takes the next of several block tables or selections.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ..dispatch import use
from ..native import missing
from ..ops import registry
from ..ops._samples import Maker
from .timing import ROUNDS, Result, in_turn, interleaved, result_of

POOL_BYTES = 1 << 28  # more than caches hold
CONTEXTS = (1 << 15, 1 << 17)
TOPK, BLOCK_SIZE, INDEX_HEADS, INDEX_DIM = 2048, 64, 64, 128


@dataclass(frozen=True)
class Case:
    """Calls of one op, taken in turn, and a peer that does the same work."""

    op: str
    case: str
    calls: list[dict[str, Any]]
    peer: str
    run_peer: Callable[[], Any]
    dtype: torch.dtype = torch.bfloat16


def sparse_times(names: Iterable[str], rounds: int = ROUNDS) -> list[Result]:
    """Every case of these ops on the CPU kernels; nothing for ops that have none here."""
    results = []
    for name in names:
        if name not in CASES or list(missing(registry[name], "cpu")):
            continue
        for case in CASES[name](Maker(torch.device("cpu"), torch.bfloat16)):
            with use("cpu"), torch.no_grad():
                times = interleaved({"op": in_turn(name, case.calls), "peer": case.run_peer}, rounds)
            result = result_of(name, case.case, case.dtype, "cpu", times["op"])
            ratio = statistics.median(a / b for a, b in zip(times["op"], times["peer"], strict=True))
            median = statistics.median(times["peer"])
            result.peers.append({"name": case.peer, "median_us": round(median, 3), "ratio": round(ratio, 3)})
            results.append(result)
    return results


def _topk(make: Maker) -> Iterator[Case]:
    for n in (8192, *CONTEXTS):
        scores = torch.randn(1, n, generator=make.generator)  # bfloat16 would tie
        for k in (512, TOPK):
            call = dict(scores=scores, k=k, order="position")
            peer = partial(torch.topk, scores, k)
            yield Case("topk_indices", f"{k} of {n}", [call], "torch.topk", peer, torch.float32)


def _pages(make: Maker, width: int) -> Tensor:
    few = make.randn(1024, width)
    num_blocks = POOL_BYTES // (2 * BLOCK_SIZE * width)
    return few.repeat(-(-num_blocks * BLOCK_SIZE // 1024), 1)[: num_blocks * BLOCK_SIZE].view(
        num_blocks, BLOCK_SIZE, -1
    )


def _batch(make: Maker, pages: Tensor, queries: int, context: int) -> list[dict[str, Any]]:
    """The same sequence length in blocks of several block tables."""
    columns = context // BLOCK_SIZE
    return [
        dict(
            block_table=make.permutation(pages.shape[0])[:columns][None].int(), seq_lens=make.ints([context]),
            cu_seqlens_q=make.ints([0, queries]), max_seqlen_q=queries,
        )
        for _ in range(max(2, min(8, pages.shape[0] // columns)))
    ]  # fmt: skip


def _indexed(make: Maker, pages: Tensor, queries: int, context: int) -> list[dict[str, Any]]:
    asked = dict(q=make.randn(queries, INDEX_HEADS, INDEX_DIM), weights=make.randn(queries, INDEX_HEADS).float())
    return [dict(key_cache=pages, **asked, **batch) for batch in _batch(make, pages, queries, context)]


def _logits(make: Maker) -> Iterator[Case]:
    pages = _pages(make, INDEX_DIM)
    for context in CONTEXTS:
        calls = _indexed(make, pages, 1, context)
        keys, scores = (
            pages.new_empty(context // BLOCK_SIZE, BLOCK_SIZE, INDEX_DIM),
            pages.new_empty(context, INDEX_HEADS),
        )
        turn = cycle(calls)

        def peer(turn: Iterator[dict[str, Any]] = turn, keys: Tensor = keys, scores: Tensor = scores) -> Tensor:
            call = next(turn)
            torch.index_select(pages, 0, call["block_table"][0], out=keys)
            torch.matmul(keys.view(-1, INDEX_DIM), call["q"][0].t(), out=scores)
            return torch.mv(scores.relu_(), call["weights"][0].bfloat16())

        yield Case("indexer_logits", f"1 x {context}", calls, "torch, buffers given", peer)


def _indexer(make: Maker) -> Iterator[Case]:
    pages = _pages(make, INDEX_DIM)
    for queries in (1, 64):
        calls = _indexed(make, pages, queries, CONTEXTS[0])
        logits = in_turn("indexer_logits", calls)

        def peer(logits: Callable[[], Any] = logits) -> Tensor:
            return logits().topk(TOPK).indices

        chosen = [dict(call, k=TOPK) for call in calls]
        yield Case("lightning_indexer", f"{queries} x {CONTEXTS[0]}", chosen, "score matrix, torch.topk", peer)


def _attention(make: Maker) -> Iterator[Case]:
    pages, context = _pages(make, 576), CONTEXTS[1]
    for heads in (16, 128):
        q = make.randn(1, heads, 576)
        caches = dict(ckv_cache=pages[..., :512], kpe_cache=pages[..., 512:])
        asked = dict(q_nope=q[..., :512], q_pe=q[..., 512:], softmax_scale=0.1, **caches)
        dense = [dict(**asked, **batch) for batch in _batch(make, pages, 1, TOPK)]
        sparse = [
            dict(**asked, **batch, topk_indices=make.permutation(context)[:TOPK].sort().values[None].int())
            for batch in _batch(make, pages, 1, context)
        ]
        case = f"{TOPK} of {context}, {heads} heads"
        yield Case("sparse_mla_attention", case, sparse, f"mla_attention over {TOPK}", in_turn("mla_attention", dense))


CASES: dict[str, Callable[[Maker], Iterator[Case]]] = {
    "topk_indices": _topk,
    "indexer_logits": _logits,
    "lightning_indexer": _indexer,
    "sparse_mla_attention": _attention,
}
