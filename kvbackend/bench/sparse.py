"""Ops that select and attend to selected tokens, at the sizes of DeepSeek-V3.2, beside torch and SGLang's kernel.

Peers that do the same work: `torch.topk`; torch's matmul over gathered rows, in buffers that exist already; its scores
or ours as a matrix and then `torch.topk`; and SGLang's decode attention over a table of the selected slots. Pages come
from memory: each call takes the next of several block tables or selections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from ..ops import registry
from ..ops._samples import Maker
from . import peers
from .attention import MLA_SCALE, RANK, gathered_mla, latent_pages
from .limits import matrix_limit
from .pages import ROTATIONS, batches
from .timing import Case

POOL_BYTES = 1 << 28  # more than caches hold
CONTEXTS = (1 << 15, 1 << 17)
TOPK, BLOCK_SIZE, INDEX_HEADS, INDEX_DIM = 2048, 64, 64, 128


def topk(make: Maker, *, others: bool) -> Iterator[Case]:
    """topk_indices of one row of scores."""
    for n in (8192, *CONTEXTS):
        scores = torch.randn(1, n, generator=make.generator)  # bfloat16 would tie
        for k in (512, TOPK):
            call = dict(scores=scores, k=k, order="position")
            yield Case(
                "topk_indices", f"{k} of {n}", [call], torch.float32,
                peers={"torch.topk": lambda call: torch.topk(call["scores"], call["k"])},
            )  # fmt: skip


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


def _torch_logits(pages: Tensor, context: int) -> Callable[[dict[str, Any]], Tensor]:
    """Scores of all queries by torch, over copies of the keys in buffers that exist already."""
    keys = pages.new_empty(context // BLOCK_SIZE, BLOCK_SIZE, INDEX_DIM)
    of_heads = pages.new_empty(context, INDEX_HEADS)

    def run(call: dict[str, Any]) -> Tensor:
        torch.index_select(pages, 0, call["block_table"][0], out=keys)
        rows, found = keys.view(-1, INDEX_DIM), []
        for q, weights in zip(call["q"], call["weights"].bfloat16(), strict=True):
            torch.matmul(rows, q.t(), out=of_heads)
            found.append(torch.mv(of_heads.relu_(), weights))
        return torch.stack(found)

    return run


def logits(make: Maker, *, others: bool) -> Iterator[Case]:
    """indexer_logits of one query."""
    pages = _pages(make, INDEX_DIM)
    for context in CONTEXTS:
        calls = _indexed(make, pages, 1, context)
        yield Case(
            "indexer_logits", f"1 x {context}", calls, moved_bytes=2 * INDEX_DIM * context, limit="read_gbs",
            peers={"torch, buffers given": _torch_logits(pages, context)},
        )  # fmt: skip


def indexer(make: Maker, *, others: bool) -> Iterator[Case]:
    """lightning_indexer, decode and prefill."""
    pages = _pages(make, INDEX_DIM)
    for queries in (1, 64):
        calls = _indexed(make, pages, queries, CONTEXTS[0])
        scored = registry["indexer_logits"].resolve(**calls[0])

        def ours(call: dict[str, Any], scored: Callable[..., Tensor] = scored) -> Tensor:
            return scored(**{name: value for name, value in call.items() if name != "k"})

        named: dict[str, peers.Peer] = {"our score matrix, torch.topk": partial(_best_of, ours)}
        if others:
            named["torch, torch.topk"] = partial(_best_of, _torch_logits(pages, CONTEXTS[0]))
        chosen = [dict(call, k=TOPK) for call in calls]
        yield Case("lightning_indexer", f"{queries} x {CONTEXTS[0]}", chosen, peers=named)


def _best_of(scored: Callable[[dict[str, Any]], Tensor], call: dict[str, Any]) -> Tensor:
    return scored(call).topk(TOPK).indices


def attention(make: Maker, *, others: bool) -> Iterator[Case]:
    """sparse_mla_attention of one query a sequence."""
    pages = latent_pages()
    for heads in (16, 128):
        for sequences, context in ((1, CONTEXTS[0]), (1, CONTEXTS[1]), (8, CONTEXTS[0])):
            yield _attention(make, pages, heads, sequences, context, others)


def _attention(make: Maker, pages: Tensor, heads: int, sequences: int, context: int, others: bool) -> Case:
    num_blocks, block_size, width = pages.shape
    q = make.randn(sequences, heads, width)
    asked = dict(
        q_nope=q[..., :RANK], q_pe=q[..., RANK:], ckv_cache=pages[..., :RANK], kpe_cache=pages[..., RANK:],
        softmax_scale=MLA_SCALE,
    )  # fmt: skip
    calls, slots = [], {}
    for batch in islice(cycle(batches(make, pages, sequences, context)), ROTATIONS):
        chosen = torch.stack([make.permutation(context)[:TOPK].sort().values for _ in range(sequences)])
        calls.append(dict(asked, **batch, topk_indices=chosen.int()))
        block = batch["block_table"].gather(1, chosen // block_size)
        slots[calls[-1]["topk_indices"].data_ptr()] = (block * block_size + chosen % block_size).int()
    lengths = make.ints([TOPK] * sequences)

    def over_slots(dense: peers.Peer, call: dict[str, Any]) -> Tensor:
        """Attention to a cache of as many tokens as were selected, in blocks of one row."""
        selected = slots[call["topk_indices"].data_ptr()]
        return dense(dict(block_table=selected, seq_lens=lengths, softmax_scale=MLA_SCALE))

    rows = pages.view(num_blocks * block_size, 1, width)
    gathered = gathered_mla(rows, q, pages.new_empty(sequences, TOPK, width), TOPK)
    named: dict[str, peers.Peer] = {"torch index_select, matmul": partial(over_slots, gathered)}
    if others and peers.has("decode_attention_cpu"):
        sgl = peers.sgl_decode(q, rows, rows[..., :RANK], 1, MLA_SCALE)
        named["sgl decode_attention"] = partial(over_slots, sgl)
    return Case(
        "sparse_mla_attention", f"{sequences} x {TOPK} of {context}, {heads} heads", calls, peers=named,
        moved_bytes=2 * sequences * width * TOPK, operations=2 * sequences * (width + RANK) * heads * TOPK,
        limit="row_read_gbs" if heads == 16 else matrix_limit(),
    )  # fmt: skip
