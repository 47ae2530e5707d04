"""Attention to the most relevant tokens of a paged cache: what is stored stays, what a step reads is chosen anew.

Each query scores pages of tokens by a bound on any logit inside them, then the tokens of the best pages by their own
logits, and attends to the best of these, the first tokens and the most recent ones.
Source: Quest (arXiv 2406.10774) for the bound; StreamingLLM (arXiv 2309.17453) for first and recent tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import formats, ops
from ..errors import ArgumentError
from ..typed import check_fields, checked
from .kivi import is_kivi
from .layers import GqaLayer, GqaPages
from .paged import PagedCache
from .parts import is_quantized
from .stages import Stages, advice

TopK = int | Sequence[int] | Callable[[int], int]
_MOST = 2**31 - 1  # tokens are counted in int32
_QUERIES = 32  # whose candidate keys are held at a time


@dataclass(frozen=True)
class Sparsity:
    """How many tokens a query attends to, and how they are found.

    topk        tokens besides the first and the recent ones: a number, a list with one for each layer, or a function
                of the layer's index. Shallow layers more, deep ones fewer: `lambda layer: 512 if layer < 8 else 128`
    sinks       first tokens, always attended to
    recent      last tokens, the query itself among them, always attended to, and what else their first page holds
    page_size   tokens of a page that is scored as one; it need not match the cache's block size
    candidates  pages whose tokens are scored one by one: as many as hold candidates * topk tokens. 1: the best pages
                are taken whole
    reselect    decode steps that one choice serves; tokens that come meanwhile are all attended to. 1 chooses at every
                step, 0 once for a sequence, so that only its recent tokens change. A call with several queries chooses
                for each of them
    summaries   each page that is not chosen, or the part of it that is not, takes part as the mean of its keys and of
                its values, with the softmax mass of its tokens. False: it is left out of the step
    """

    topk: TopK
    sinks: int = 4
    recent: int = 64
    page_size: int = 16
    candidates: int = 4
    reselect: int = 1
    summaries: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in (("sinks", 0), ("recent", 1), ("page_size", 1), ("candidates", 1), ("reselect", 0)):
            if not least <= getattr(self, name) <= _MOST:
                raise ArgumentError(
                    f"{name} is {getattr(self, name)}; it must be from {least} to {_MOST}: pass a count"
                )

    @checked
    def of_layer(self, layer: int, num_layers: int) -> int:
        """topk of a layer; raises ArgumentError for a rule that does not give a count of 1 or more."""
        if not 0 <= layer < num_layers:
            raise ArgumentError(f"layer is {layer} of {num_layers}; layers are counted from 0: pass one of them")
        if callable(self.topk):
            count = self.topk(layer)
        elif not isinstance(self.topk, Sequence):
            count = self.topk
        else:
            if len(self.topk) != num_layers:
                raise ArgumentError(
                    f"topk has {len(self.topk)} entries for {num_layers} layers; a list has one for each: pass as many"
                )
            count = self.topk[layer]
        if not isinstance(count, int) or not 1 <= count <= _MOST:
            raise ArgumentError(
                f"topk is {count!r} in layer {layer}; it must be from 1 to {_MOST}: pass a count of tokens"
            )
        return count


@dataclass
class _Summary:
    """What is known of the pages of one sequence in one layer; a page is page_size tokens, the last may be open.

    low, high   [pages, Hk, D] smallest and largest number of each channel, in the cache's dtype
    keys, values   [pages, Hk, D | Dv] sums in float32, where summaries take part
    length      tokens seen
    """

    low: Tensor
    high: Tensor
    keys: Tensor | None
    values: Tensor | None
    length: int = 0


@dataclass
class _Choice:
    """What a decode step chose: positions [Hk, topk], -1 unused, and the length of the sequence then."""

    positions: Tensor
    length: int


@dataclass
class _Known:
    """One sequence: pages and choices of each layer."""

    pages: dict[int, _Summary] = field(default_factory=dict)
    choices: dict[int, _Choice] = field(default_factory=dict)


class SparseAttention:
    """Reads a PagedCache by `Sparsity`; write keys and values through this object, so that it knows their pages.

        sparse = SparseAttention(cache, Sparsity(topk=256))
        slots = cache.append(seq, 5)
        for layer in range(len(cache.layers)):
            sparse.write(layer, [seq], [5], slots, key, value)
            out, _ = sparse.attend(layer, q, [seq], [5], softmax_scale)

    cache         a cache of GqaLayers, without keep_recent and keep_sinks
    sparsity      what is chosen
    dense_below   contexts of fewer tokens are attended to in full, as are those that a choice would cover whole;
                  "auto": those for which dense attention is the faster one here, as far as `cache.crossover` knows
    timed         add up the seconds of each of `kvbackend.cache.stages` in `seconds`, which waits for the device

    Each kv head chooses for itself, by the largest logit of its query heads. Choices are positions in the text, so they
    hold for a cache of any block size. Chosen tokens of one query do not depend on other queries or sequences.
    Not thread-safe.
    """

    @checked
    def __init__(self, cache: PagedCache, sparsity: Sparsity, dense_below: int | str = 0, timed: bool = False) -> None:
        self.cache, self.sparsity, self.dense_below = cache, sparsity, dense_below
        if dense_below != "auto" if isinstance(dense_below, str) else dense_below < 0:
            raise ArgumentError(f"dense_below is {dense_below!r}; it must be a count of tokens or 'auto': pass one")
        self.topk = tuple(sparsity.of_layer(layer, len(cache.layers)) for layer in range(len(cache.layers)))
        self.stages = Stages(cache.device, timed)
        self._known: dict[int, _Known] = {}
        self._first_block = torch.zeros(1, 1, dtype=torch.int32, device=cache.device)
        self._crossovers: dict[tuple[int, int], tuple[int, str]] = {}  # by layer and query heads
        for name in cache.kv_formats:
            if is_kivi(formats.pair(name)[0]):
                raise ArgumentError(
                    f"cache has kv_format {name!r}, whose keys share scales across tokens; sparse attention reads "
                    f"single tokens: choose a format with scales per token, such as fp4_e2m1 or int8"
                )
        if cache.kept is not None:
            raise ArgumentError(
                "cache keeps recent or first tokens in full precision beside their codes; sparse attention reads one "
                "place: leave keep_recent and keep_sinks out, and choose a format with scales per token"
            )
        for pages in cache.layers:
            if not isinstance(pages, GqaPages):
                raise ArgumentError(
                    "cache has MlaLayers; sparse attention over latent rows is sparse_mla_attention's, with "
                    "lightning_indexer: use these"
                )

    # ----------------------------------------------------------------------------------------------------- calls

    @checked
    def write(
        self, layer: int, seqs: Sequence[int], counts: Sequence[int], slots: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Write the newest tokens of sequences, counts of each, already appended; key, value [sum(counts), Hk, D]."""
        pages = self.cache.pages(layer)
        counts = self._need_rows("counts", counts, seqs, key=key, value=value)
        with self.stages.time("codec") if is_quantized(pages.kv_format) else nullcontext():
            pages.write(slots, key, value)
        parts = zip(seqs, counts, key.split(counts), value.split(counts), strict=True)
        for seq, count, keys, values in parts:
            known = self._known.setdefault(seq, _Known())
            length = self.cache.length(seq) - count
            summary = known.pages.get(layer)
            if (summary.length if summary else 0) != length:
                self._rebuild(layer, seq, length)
            with self.stages.time("index"):
                self._extend(layer, seq, keys, values)

    @checked
    def attend(
        self,
        layer: int,
        q: Tensor,
        seqs: Sequence[int],
        q_lens: Sequence[int],
        softmax_scale: float,
        return_lse: bool = False,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention from the last q_lens tokens of sequences, causal; out and lse as paged_attention gives them.

        q   [T, H, D], T being sum(q_lens)
        """
        kv_heads = self.cache.pages(layer).caches[0].shape[2]
        q_lens = self._need_rows("q_lens", q_lens, seqs, q=q)
        if q.dim() != 3:
            raise ArgumentError(f"q has shape {tuple(q.shape)}; it must be [T, H, D]: pass each head's query")
        if q.shape[1] % kv_heads:
            raise ArgumentError(
                f"q has {q.shape[1]} heads and layer {layer} has {kv_heads} kv heads; the first must be a multiple of "
                f"the second: pass the heads of one rank together"
            )
        outs, lses = [], []
        for seq, count, queries in zip(seqs, q_lens, q.split(q_lens), strict=True):
            if count == 0:
                continue
            if self._dense(layer, q.shape[1], self.cache.length(seq)):
                with self.stages.time("attention"):
                    out, lse = self.cache.attend(
                        layer, queries, [seq], [count], softmax_scale, return_lse=True, softcap=softcap
                    )
            else:
                out, lse = self._attend_one(layer, queries, seq, softmax_scale, softcap)
            outs.append(out)
            lses.append(lse)
        if not outs:
            spec = self.cache.specs[layer]
            assert isinstance(spec, GqaLayer)
            return q.new_empty(0, q.shape[1], spec.value_width), q.new_empty(0, q.shape[1], dtype=torch.float32)
        out, lse = torch.cat(outs), torch.cat(lses)
        if sinks is not None:
            out, _ = ops.merge_attn_states(out[None], lse[None], sinks.float())
        return out, lse if return_lse else lse.new_empty(0)

    @checked
    def chosen(self, layer: int, seq: int) -> Tensor:
        """Positions [Hk, topk] of the last decode step's choice, ascending, -1 unused; raises where there is none."""
        choice = self._known.get(seq, _Known()).choices.get(layer)
        if choice is None:
            raise ArgumentError(
                f"sequence {seq} has no choice in layer {layer}; a sparse decode step makes one: call attend with one "
                f"query first, and see explain"
            )
        return choice.positions

    @checked
    def explain(self, layer: int, heads: int, length: int) -> str:
        """Why queries of a layer with so many heads would attend to a sequence of `length` tokens as they do."""
        self.cache.pages(layer)
        for name, value, least in (("heads", heads, 1), ("length", length, 0)):
            if value < least:
                raise ArgumentError(f"{name} is {value}; it must be {least} or more: pass a count")
        below, why = self._crossover(layer, heads)
        read = self._read(layer)
        if length <= read:
            return f"dense: a choice of {read} tokens would cover all {length}"
        return f"{'dense' if length < below else 'sparse'}: {length} tokens, threshold {below}; {why}"

    @checked
    def choose_again(self, seq: int) -> None:
        """Let the next decode step of a sequence choose, whatever `reselect` says."""
        self._known.get(seq, _Known()).choices.clear()

    @checked
    def forget(self, seq: int) -> None:
        """Drop what is known of a sequence, such as a freed one; it is computed again where it is needed."""
        self._known.pop(seq, None)

    @checked
    def moved_to(self, cache: PagedCache, seqs: Mapping[int, int]) -> SparseAttention:
        """The same choices over another cache that holds the same tokens; seqs: id here -> id there."""
        other = SparseAttention(cache, self.sparsity, self.dense_below, self.stages.timed)
        other._known = {seqs[seq]: known for seq, known in self._known.items() if seq in seqs}
        return other

    def _need_rows(self, name: str, counts: Sequence[int], seqs: Sequence[int], **rows: Tensor) -> list[int]:
        """The counts; raises ArgumentError unless their sum is how many rows each of these tensors has."""
        _, counts = self.cache.last_tokens(seqs, counts, name)
        for row, tensor in rows.items():
            if tensor.dim() == 0 or len(tensor) != sum(counts):
                raise ArgumentError(
                    f"{row} has shape {tuple(tensor.shape)}; {name} adds up to {sum(counts)} tokens: pass a row of each"
                )
        return counts

    def _dense(self, layer: int, heads: int, length: int) -> bool:
        return length < self._crossover(layer, heads)[0] or length <= self._read(layer)

    def _read(self, layer: int) -> int:
        """Tokens that a query reads, about."""
        return self.sparsity.sinks + self.sparsity.recent + self.topk[layer]

    def _crossover(self, layer: int, heads: int) -> tuple[int, str]:
        if not isinstance(self.dense_below, str):
            return self.dense_below, "dense_below says so"
        if (layer, heads) not in self._crossovers:
            from . import crossover  # which measures this class

            case = crossover.Case.of(self.cache, layer, heads, self.sparsity)
            self._crossovers[layer, heads] = crossover.dense_below(case)
        return self._crossovers[layer, heads]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage so far."""
        return self.stages.seconds

    def advice(self) -> str | None:
        """What to do if choosing takes too much of the time; None if it does not, or nothing was timed."""
        return advice(self.seconds, self.sparsity.reselect)

    # ----------------------------------------------------------------------------------------------------- pages

    def _extend(self, layer: int, seq: int, keys: Tensor, values: Tensor) -> None:
        """Take the newest tokens of a sequence into its pages."""
        known, size = self._known[seq], self.sparsity.page_size
        summary = known.pages.get(layer)
        length = summary.length if summary else 0
        pages = -(-(length + len(keys)) // size)
        if summary is None or pages > len(summary.low):
            summary = known.pages[layer] = self._grown(summary, max(2 * pages, 16), keys, values)
        at = 0
        while at < len(keys):  # the open page, whole ones at once, what remains
            page, inside = divmod(length + at, size)
            count = 1 if inside else max((len(keys) - at) // size, 1)
            taken, where = slice(at, at + count * size - inside), slice(page, page + count)
            rows = keys[taken].unflatten(0, (count, -1))
            low, high = rows.to(summary.low.dtype).aminmax(dim=1)
            torch.minimum(summary.low[where], low, out=summary.low[where])
            torch.maximum(summary.high[where], high, out=summary.high[where])
            if summary.keys is not None and summary.values is not None:
                summary.keys[where] += rows.sum(1, dtype=torch.float32)
                summary.values[where] += values[taken].unflatten(0, (count, -1)).sum(1, dtype=torch.float32)
            at = taken.stop
        summary.length += len(keys)

    def _grown(self, summary: _Summary | None, pages: int, keys: Tensor, values: Tensor) -> _Summary:
        def page_tensor(old: Tensor | None, rows: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
            new = torch.full((pages, *rows.shape[1:]), fill, dtype=dtype, device=rows.device)
            if old is not None:
                new[: len(old)] = old
            return new

        old = summary or _Summary(keys[:0], keys[:0], keys[:0], values[:0])
        own, sums = self.cache.dtype, self.sparsity.summaries
        return _Summary(
            page_tensor(old.low, keys, torch.inf, own),
            page_tensor(old.high, keys, -torch.inf, own),
            page_tensor(old.keys, keys, 0.0, torch.float32) if sums else None,
            page_tensor(old.values, values, 0.0, torch.float32) if sums else None,
            old.length,
        )

    def _rebuild(self, layer: int, seq: int, length: int) -> None:
        """Learn the first `length` tokens from the cache: the sequence was forked, truncated or filled elsewhere."""
        self._known[seq].pages.pop(layer, None)
        self._known[seq].choices.pop(layer, None)
        if length:
            with self.stages.time("gather"):
                keys, values = (rows[:length] for rows in self.cache.read(layer, seq))
            with self.stages.time("index"):
                self._extend(layer, seq, keys, values)

    # -------------------------------------------------------------------------------------------------- choosing

    def _attend_one(
        self, layer: int, q: Tensor, seq: int, softmax_scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of one sequence's last queries [T, H, D] to what they choose; out and lse."""
        pages = self.cache.layers[layer]
        assert isinstance(pages, GqaPages)
        known, length = self._known.setdefault(seq, _Known()), self.cache.length(seq)
        if layer not in known.pages or known.pages[layer].length != length:
            self._rebuild(layer, seq, length)
        batch = self.cache.batch([seq], [len(q)])
        positions, steps = self._positions(layer, seq, q, batch)  # [T, Hk, topk]
        with self.stages.time("attention"):
            out, lse = ops.sparse_attention(
                q,
                **pages.arguments,
                **batch,
                topk_indices=positions,
                softmax_scale=softmax_scale,
                **self._middle(steps),
                softcap=softcap,
                return_lse=True,
            )
            if self.sparsity.summaries:
                rest = self._attend_summaries(known.pages[layer], q, length - steps, positions, softmax_scale, softcap)
                outs, lses = (torch.stack(part) for part in zip((out, lse), rest, strict=True))
                out, lse = ops.merge_attn_states(outs, lses)
        return out, lse

    def _middle(self, steps: int = 0) -> dict[str, int]:
        """Which tokens are chosen among, as the ops want to know it, when the choice is so many steps old."""
        sparsity = self.sparsity
        return dict(page_size=sparsity.page_size, num_sinks=sparsity.sinks, num_recent=sparsity.recent + steps)

    def _positions(self, layer: int, seq: int, q: Tensor, batch: dict[str, Any]) -> tuple[Tensor, int]:
        """Positions [T, Hk, topk] that queries choose between the first and the recent tokens, ascending, -1 unused.

        And how many steps ago that was: the tokens since then come on top of the recent ones.
        """
        known, reselect, count = self._known[seq], self.sparsity.reselect, len(q)
        choice, length = known.choices.get(layer), self.cache.length(seq)
        if count == 1 and choice is not None and (not reselect or length - choice.length < reselect):
            return choice.positions[None], length - choice.length if reselect else 0
        found, end = [], length - count
        for part in q.split(_QUERIES):
            end += len(part)
            if end < length or len(part) < count:
                batch = batch | dict(
                    seq_lens=torch.full_like(batch["seq_lens"], end),
                    cu_seqlens_q=batch["cu_seqlens_q"].clamp(max=len(part)),
                    max_seqlen_q=len(part),
                )
            found.append(self._choose(layer, known.pages[layer], part, batch, end))
        if count == 1:
            known.choices[layer] = _Choice(found[0][0], length)
        return torch.cat(found), 0

    def _choose(self, layer: int, summary: _Summary, q: Tensor, batch: dict[str, Any], end: int) -> Tensor:
        """What queries [T, H, D] choose, the last ones of a sequence of `end` tokens."""
        pages, topk, size = self.cache.layers[layer], self.topk[layer], self.sparsity.page_size
        assert isinstance(pages, GqaPages)
        known, common = -(-end // size), batch | self._middle()
        wanted = min(-(-self.sparsity.candidates * topk // size), known)
        with self.stages.time("index"):
            low, high = summary.low[None, :known], summary.high[None, :known]  # one block of all pages
            bounds = ops.page_logits(q.to(low.dtype), low, high, **common | dict(block_table=self._first_block))
        with self.stages.time("top_k"):
            best = ops.topk_indices(bounds.flatten(0, 1), wanted, order="position")  # [T * Hk, wanted]
        with self.stages.time("index"):
            candidates = best.unflatten(0, bounds.shape[:2])
            scores = ops.token_logits(q, **pages.key_arguments, **common, pages=candidates)
        with self.stages.time("top_k"):
            picked = ops.topk_indices(scores.flatten(0, 1), topk, order="position").long()
            tokens = best[..., None] * size + torch.arange(size, device=q.device)  # [T * Hk, wanted, size]
            chosen = tokens.flatten(1).gather(1, picked.clamp(min=0)).masked_fill(picked < 0, -1)
            return chosen.unflatten(0, bounds.shape[:2])

    def _attend_summaries(
        self, summary: _Summary, q: Tensor, end: int, positions: Tensor, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of queries [T, H, D] to the means of pages, each with the mass of its tokens that were not chosen.

        end   tokens of the sequence when positions [T, Hk, topk] were chosen
        """
        size, (count, kv_heads, _) = self.sparsity.page_size, positions.shape
        pages = summary.length // size
        last = torch.arange(end - count, end, device=q.device)
        ends = ((last + 1 - self.sparsity.recent).clamp(min=0) // size * size)[:, None]  # where the recent ones begin
        assert summary.keys is not None
        assert summary.values is not None
        start = torch.arange(pages, device=ends.device) * size
        inside = (start + size - start.clamp(min=self.sparsity.sinks)).clamp(min=0)  # tokens after the first ones
        left = inside.masked_fill(start >= ends, 0)[:, None].expand(-1, kv_heads, -1).float()
        page = (positions.clamp(min=0) // size).clamp(max=max(pages - 1, 0))
        left = left - torch.zeros_like(left).scatter_add_(-1, page, (positions >= 0).float())
        by_head = q.unflatten(1, (kv_heads, -1)).float()
        logits = torch.einsum("thgd,phd->thgp", by_head, summary.keys[:pages] / size) * scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        logits = logits + left[:, :, None].log()  # -inf where nothing is left
        lse = logits.logsumexp(-1)
        weights = (logits - lse[..., None]).exp().nan_to_num(0)
        out = torch.einsum("thgp,phd->thgd", weights, summary.values[:pages] / size)
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)
