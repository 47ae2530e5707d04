"""Attention to the most relevant tokens of a paged cache: what is stored stays, what a step reads is chosen anew.

Each query scores pages of tokens by a bound on any logit inside them, then the tokens of the best pages by their own
logits, and attends to the best of these, the first tokens and the most recent ones.
Source: Quest (arXiv 2406.10774) for the bound; StreamingLLM (arXiv 2309.17453) for first and recent tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
from torch import Tensor

from .. import formats, ops
from ..errors import ArgumentError
from .kivi import is_kivi
from .layers import GqaLayer, GqaPages
from .paged import PagedCache

TopK = int | Sequence[int] | Callable[[int], int]
STAGES = ("index", "top_k", "attention")
_QUERIES = 32  # whose candidate keys are held at a time
_LIMIT = 0.2  # part of the attention time that choosing may take before it is said


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
        for name, least in (("sinks", 0), ("recent", 1), ("page_size", 1), ("candidates", 1), ("reselect", 0)):
            if getattr(self, name) < least:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be {least} or more: pass a count")

    def of_layer(self, layer: int, num_layers: int) -> int:
        """topk of a layer; raises ArgumentError for a rule that does not give a count of 1 or more."""
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
        if not isinstance(count, int) or count < 1:
            raise ArgumentError(f"topk is {count!r} in layer {layer}; it must be 1 or more: pass a count of tokens")
        return count


@dataclass
class _Summary:
    """What is known of the pages of one sequence in one layer; a page is page_size tokens, the last may be open.

    low, high   [pages, Hk, D] smallest and largest number of each channel, in float32
    keys, values   [pages, Hk, D | Dv] sums, where summaries take part
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
    timed         add up seconds per stage in `seconds`, which waits for the device

    Each kv head chooses for itself, by the largest logit of its query heads. Choices are positions in the text, so they
    hold for a cache of any block size. Chosen tokens of one query do not depend on other queries or sequences.
    Not thread-safe.
    """

    def __init__(self, cache: PagedCache, sparsity: Sparsity, dense_below: int | str = 0, timed: bool = False) -> None:
        self.cache, self.sparsity, self.dense_below, self.timed = cache, sparsity, dense_below, timed
        if isinstance(dense_below, str) and dense_below != "auto":
            raise ArgumentError(f"dense_below is {dense_below!r}; it must be a count of tokens or 'auto': pass one")
        self.topk = tuple(sparsity.of_layer(layer, len(cache.layers)) for layer in range(len(cache.layers)))
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._known: dict[int, _Known] = {}
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
            _RowView.of(pages)

    # ----------------------------------------------------------------------------------------------------- calls

    def write(
        self, layer: int, seqs: Sequence[int], counts: Sequence[int], slots: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Write the newest tokens of sequences, counts of each, already appended; key, value [sum(counts), Hk, D]."""
        self.cache.layers[layer].write(slots, key, value)
        parts = zip(seqs, counts, key.split(list(counts)), value.split(list(counts)), strict=True)
        with self._stage("index"):
            for seq, count, keys, values in parts:
                known = self._known.setdefault(seq, _Known())
                length = self.cache.length(seq) - count
                summary = known.pages.get(layer)
                if (summary.length if summary else 0) != length:
                    self._rebuild(layer, seq, length)
                self._extend(layer, seq, keys, values)

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
        if not 0 <= layer < len(self.topk):
            raise ArgumentError(f"layer is {layer}; the cache has {len(self.topk)}: pass an index below that")
        kv_heads = self.cache.layers[layer].caches[0].shape[2]
        if q.shape[1] % kv_heads:
            raise ArgumentError(
                f"q has {q.shape[1]} heads and layer {layer} has {kv_heads} kv heads; the first must be a multiple of "
                f"the second: pass the heads of one rank together"
            )
        outs, lses = [], []
        for seq, count, queries in zip(seqs, q_lens, q.split(list(q_lens)), strict=True):
            if count == 0:
                continue
            if self._dense(layer, q.shape[1], self.cache.length(seq)):
                with self._stage("attention"):
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

    def chosen(self, layer: int, seq: int) -> Tensor:
        """Positions [Hk, topk] of the last decode step's choice, ascending, -1 unused; raises where there is none."""
        choice = self._known.get(seq, _Known()).choices.get(layer)
        if choice is None:
            raise ArgumentError(
                f"sequence {seq} has no choice in layer {layer}; a sparse decode step makes one: call attend with one "
                f"query first, and see explain"
            )
        return choice.positions

    def explain(self, layer: int, heads: int, length: int) -> str:
        """Why queries of a layer with so many heads would attend to a sequence of `length` tokens as they do."""
        below, why = self._crossover(layer, heads)
        read = self._read(layer)
        if length <= read:
            return f"dense: a choice of {read} tokens would cover all {length}"
        return f"{'dense' if length < below else 'sparse'}: {length} tokens, threshold {below}; {why}"

    def forget(self, seq: int) -> None:
        """Drop what is known of a sequence, such as a freed one; it is computed again where it is needed."""
        self._known.pop(seq, None)

    def moved_to(self, cache: PagedCache, seqs: dict[int, int]) -> SparseAttention:
        """The same choices over another cache that holds the same tokens; seqs: id here -> id there."""
        other = SparseAttention(cache, self.sparsity, self.dense_below, self.timed)
        other._known = {seqs[seq]: known for seq, known in self._known.items() if seq in seqs}
        return other

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

    def advice(self) -> str | None:
        """What to do if choosing takes too much of the time; None if it does not, or nothing was timed."""
        total = sum(self.seconds.values())
        share = 1 - self.seconds["attention"] / total if total else 0.0
        if share <= _LIMIT or not self.seconds["top_k"]:  # without a choice, only pages were learnt
            return None
        return (
            f"choosing tokens takes {share:.0%} of the attention time (index {self.seconds['index']:.3f} s, top-k "
            f"{self.seconds['top_k']:.3f} s, attention {self.seconds['attention']:.3f} s); it pays below "
            f"{_LIMIT:.0%}: choose less often (reselect {max(2 * self.sparsity.reselect, 8)}), or a larger top-k"
        )

    # ----------------------------------------------------------------------------------------------------- pages

    def _extend(self, layer: int, seq: int, keys: Tensor, values: Tensor) -> None:
        """Take the newest tokens of a sequence into its pages."""
        known, size = self._known[seq], self.sparsity.page_size
        summary = known.pages.get(layer)
        length = summary.length if summary else 0
        pages = -(-(length + len(keys)) // size)
        if summary is None or pages > len(summary.low):
            summary = known.pages[layer] = self._grown(summary, max(2 * pages, 16), keys, values)
        page = torch.arange(length, length + len(keys), device=keys.device) // size
        keys, values = keys.float(), values.float()
        where = page[:, None, None].expand_as(keys)
        summary.low.scatter_reduce_(0, where, keys, "amin")
        summary.high.scatter_reduce_(0, where, keys, "amax")
        if summary.keys is not None and summary.values is not None:
            summary.keys.index_add_(0, page, keys)
            summary.values.index_add_(0, page, values)
        summary.length += len(keys)

    def _grown(self, summary: _Summary | None, pages: int, keys: Tensor, values: Tensor) -> _Summary:
        def page_tensor(old: Tensor | None, rows: Tensor, fill: float) -> Tensor:
            new = torch.full((pages, *rows.shape[1:]), fill, device=rows.device)
            if old is not None:
                new[: len(old)] = old
            return new

        old = summary or _Summary(keys[:0], keys[:0], keys[:0], values[:0])
        sums = self.sparsity.summaries
        return _Summary(
            page_tensor(old.low, keys, torch.inf),
            page_tensor(old.high, keys, -torch.inf),
            page_tensor(old.keys, keys, 0.0) if sums else None,
            page_tensor(old.values, values, 0.0) if sums else None,
            old.length,
        )

    def _rebuild(self, layer: int, seq: int, length: int) -> None:
        """Learn the first `length` tokens from the cache: the sequence was forked, truncated or filled elsewhere."""
        self._known[seq].pages.pop(layer, None)
        self._known[seq].choices.pop(layer, None)
        if length:
            keys, values = (rows[:length] for rows in self.cache.read(layer, seq))
            self._extend(layer, seq, keys, values)

    # -------------------------------------------------------------------------------------------------- choosing

    def _attend_one(
        self, layer: int, q: Tensor, seq: int, softmax_scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of one sequence's last queries [T, H, D] to what they choose; out and lse."""
        pages = self.cache.layers[layer]
        assert isinstance(pages, GqaPages)
        view = _RowView.of(pages)
        kv_heads, length, count = pages.key_cache.shape[2], self.cache.length(seq), len(q)
        known = self._known.setdefault(seq, _Known())
        if layer not in known.pages or known.pages[layer].length != length:
            self._rebuild(layer, seq, length)
        by_head = q.unflatten(1, (kv_heads, -1))  # [T, Hk, G, D]
        last = torch.arange(length - count, length, device=q.device)  # position of each query
        table = self.cache.batch([seq], [0])["block_table"][0].long()
        positions, steps = self._positions(layer, seq, by_head, last, view, table)  # [T, Hk, topk]
        ends = self._ends(last - steps)
        with self._stage("attention"):
            first = torch.arange(self.sparsity.sinks, device=q.device)
            widest = self.sparsity.recent + steps + self.sparsity.page_size - 1
            recent = last[:, None] - torch.arange(widest - 1, -1, -1, device=q.device)  # [T, widest]
            recent = recent.masked_fill(recent < ends[:, None].clamp(min=len(first)), -1)
            first = first.expand(count, -1).masked_fill(first > last[:, None], -1)
            forced = torch.cat((first, recent), 1)[:, None].expand(-1, kv_heads, -1)
            every = torch.cat((positions, forced), -1).flatten(0, 1)  # [T * Hk, n]
            head = torch.arange(kv_heads, device=q.device).repeat(count)
            sequences, width = every.shape
            out, lse = ops.paged_attention(
                by_head.flatten(0, 1),  # [T * Hk, G, D]: each head of each query is a sequence of its own
                **view.arguments,
                block_table=view.rows(table, every, head[:, None]),
                seq_lens=torch.full((sequences,), width, dtype=torch.int32, device=q.device),
                cu_seqlens_q=torch.arange(sequences + 1, dtype=torch.int32, device=q.device),
                max_seqlen_q=1,
                softmax_scale=softmax_scale,
                softcap=softcap,
                return_lse=True,
            )
            if self.sparsity.summaries:
                rest = self._attend_summaries(known.pages[layer], by_head, ends, positions, softmax_scale, softcap)
                outs, lses = (torch.stack(part) for part in zip((out, lse), rest, strict=True))
                out, lse = ops.merge_attn_states(outs, lses)
        return out.reshape(count, q.shape[1], -1), lse.reshape(count, q.shape[1])

    def _positions(
        self, layer: int, seq: int, by_head: Tensor, last: Tensor, view: _RowView, table: Tensor
    ) -> tuple[Tensor, int]:
        """Positions [T, Hk, topk] that queries choose between the first and the recent tokens, ascending, -1 unused.

        And how many steps ago that was: the tokens since then come on top of the recent ones.
        """
        known, reselect, count = self._known[seq], self.sparsity.reselect, len(last)
        choice, length = known.choices.get(layer), self.cache.length(seq)
        if count == 1 and choice is not None and (not reselect or length - choice.length < reselect):
            return choice.positions[None], length - choice.length if reselect else 0
        parts = zip(by_head.split(_QUERIES), last.split(_QUERIES), strict=True)
        found = torch.cat([self._choose(known.pages[layer], *part, view, table, self.topk[layer]) for part in parts])
        if count == 1:
            known.choices[layer] = _Choice(found[0], length)
        return found, 0

    def _ends(self, last: Tensor) -> Tensor:
        """Where the recent tokens of queries at positions [T] begin: at a page, so that no page is recent in part."""
        size = self.sparsity.page_size
        return (last + 1 - self.sparsity.recent).clamp(min=0) // size * size

    def _choose(
        self, summary: _Summary, by_head: Tensor, last: Tensor, view: _RowView, table: Tensor, topk: int
    ) -> Tensor:
        size, (count, kv_heads) = self.sparsity.page_size, by_head.shape[:2]
        ends = self._ends(last)
        pages = summary.length // size
        queries = by_head.float()
        with self._stage("index"):
            low, high = summary.low[:pages], summary.high[:pages]
            bound = torch.einsum("thgd,phd->thgp", queries.clamp(min=0), high)
            bound += torch.einsum("thgd,phd->thgp", queries.clamp(max=0), low)
            starts = torch.arange(pages, device=last.device) * size
            inside = (starts < ends[:, None]) & (starts + size > self.sparsity.sinks)  # [T, pages], all of it past
            bound = bound.amax(2).masked_fill(~inside[:, None], -torch.inf)  # [T, Hk, pages]
        with self._stage("top_k"):
            wanted = min(-(-self.sparsity.candidates * topk // size), max(pages, 1))
            best = ops.topk_indices(bound.flatten(0, 1), wanted, order="position").long()  # [T * Hk, wanted]
            token = best[..., None] * size + torch.arange(size, device=last.device)
            token = token.masked_fill(best[..., None] < 0, -1).flatten(1).unflatten(0, (count, kv_heads))
            usable = (token >= self.sparsity.sinks) & (token < ends[:, None, None])
            token = token.masked_fill(~usable, -1)  # [T, Hk, candidates]
        with self._stage("index"):
            head = torch.arange(kv_heads, device=last.device)[:, None]
            keys = view.keys(view.rows(table, token, head))  # [T, Hk, candidates, D]
            scores = torch.einsum("thgd,thcd->thgc", queries, keys).amax(2)
            scores = scores.masked_fill(token < 0, -torch.inf)
        with self._stage("top_k"):
            picked = ops.topk_indices(scores.flatten(0, 1), topk, order="position").long().unflatten(0, (count, -1))
            return token.gather(-1, picked.clamp(min=0)).masked_fill(picked < 0, -1)

    def _attend_summaries(
        self, summary: _Summary, by_head: Tensor, ends: Tensor, positions: Tensor, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        """Attention [T * Hk, G, Dv] to the means of pages, each with the mass of its tokens that were not chosen.

        ends   [T] where the recent tokens of each query begin
        """
        size, pages = self.sparsity.page_size, summary.length // self.sparsity.page_size
        assert summary.keys is not None
        assert summary.values is not None
        start = torch.arange(pages, device=ends.device) * size
        inside = (start + size - start.clamp(min=self.sparsity.sinks)).clamp(min=0)  # tokens after the first ones
        left = inside.masked_fill(start >= ends[:, None], 0)[:, None].expand(-1, positions.shape[1], -1).float()
        page = (positions.clamp(min=0) // size).clamp(max=max(pages - 1, 0))
        left = left - torch.zeros_like(left).scatter_add_(-1, page, (positions >= 0).float())
        logits = torch.einsum("thgd,phd->thgp", by_head.float(), summary.keys[:pages] / size) * scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        logits = logits + left[:, :, None].log()  # -inf where nothing is left
        lse = logits.logsumexp(-1)
        weights = (logits - lse[..., None]).exp().nan_to_num(0)
        out = torch.einsum("thgp,phd->thgd", weights, summary.values[:pages] / size)
        return out.flatten(0, 1).to(by_head.dtype), lse.flatten(0, 1)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        if not self.timed:
            yield
            return
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self.cache.device.type != "cpu":
            torch.accelerator.synchronize(self.cache.device)
        return time.perf_counter()


@dataclass(frozen=True)
class _RowView:
    """Pages of a layer as blocks of one row of one head each: `rows` says which, `arguments` is the cache of these.

    A row of a head begins at a multiple of `unit` elements, the largest that divides every stride, and that multiple
    is its block. So no row is copied, and blocks of any size and layout look alike.
    """

    pages: GqaPages
    steps: tuple[int, int, int]  # of block, slot and head, in units

    @classmethod
    def of(cls, pages: GqaPages) -> _RowView:
        """Raises ArgumentError for pages whose keys, values and scales do not lie alike."""
        for name in formats.pair(pages.kv_format):
            granularity = "none" if name == "auto" else formats.get(name).granularity
            if granularity in ("head", "channel"):
                raise ArgumentError(
                    f"kv_format is {pages.kv_format!r}, with static scales per {granularity}; sparse attention reads "
                    f"each head by itself: choose scales per tensor or per token"
                )
        found = {_steps(tensor) for tensor in pages.tensors}
        if len(found) > 1:
            raise ArgumentError(
                f"pages of kv_format {pages.kv_format!r} lie in memory in {len(found)} ways; sparse attention needs "
                f"keys, values and scales in one order: make the cache with layout='NHD'"
            )
        return cls(pages, found.pop())

    def rows(self, table: Tensor, positions: Tensor, head: Tensor) -> Tensor:
        """Blocks [...] int64 of tokens at positions [...] of the sequence of a block table, in a head; -1 stays."""
        block_size = self.pages.key_cache.shape[1]
        token = positions.clamp(min=0)
        block, offset = table[token // block_size], token % block_size
        by_block, by_slot, by_head = self.steps
        return (block * by_block + offset * by_slot + head * by_head).masked_fill(positions < 0, -1)

    @property
    def arguments(self) -> dict[str, Any]:
        """What paged_attention wants to know of the cache of rows."""
        arguments = self.pages.arguments
        for name in ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache"):
            if arguments[name] is not None:
                arguments[name] = _as_rows(arguments[name], self.steps)
        return arguments

    def keys(self, rows: Tensor) -> Tensor:
        """Keys [..., D] of rows [...], dequantized to float32; those of row -1 are any."""
        gather = self.pages.gather_arguments[0]
        view = {name: _as_rows(gather[name], self.steps) if gather[name] is not None else None
                for name in ("cache", "scale_cache")}  # fmt: skip
        flat = rows.clamp(min=0).reshape(1, -1)
        found = ops.gather_cache(
            **{**gather, **view},
            block_table=flat,
            cu_seqlens=torch.tensor([0, flat.shape[1]], dtype=torch.int32, device=rows.device),
            num_tokens=flat.shape[1],
            out_format="auto",  # the cache's dtype, and float32 for codes
        )
        return found.float().reshape(*rows.shape, -1)


def _steps(tensor: Tensor) -> tuple[int, int, int]:
    """Strides of block, slot and head of pages [nb, bs, Hk, ...], in units of their greatest common divisor."""
    strides = tensor.stride()[:3]
    unit = gcd(*strides)
    return tuple(stride // unit for stride in strides)  # type: ignore[return-value]


def _as_rows(tensor: Tensor, steps: tuple[int, int, int]) -> Tensor:
    """Pages [nb, bs, Hk, *row] as [rows, 1, 1, *row]."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape[:3], steps, strict=True))
    unit = gcd(*tensor.stride()[:3])
    shape = (last + 1, 1, 1, *tensor.shape[3:])
    return tensor.as_strided(shape, (unit, unit, unit, *tensor.stride()[3:]))
