"""A paged cache that an eviction policy keeps small: kept rows move together, and blocks that are left over go back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import formats, ops
from ..cache import GqaLayer, MlaLayer, PagedCache
from ..cache.kivi import is_kivi
from ..cache.stages import Stages
from ..errors import ArgumentError
from ..eviction import Policy, StreamingLLM
from ..ops._math import as_bytes


@dataclass
class _State:
    """A sequence: its tables in the cache, and what was seen of its queries in each layer."""

    tables: list[int]  # ids in the cache: one for all layers, or one for each
    tokens: int = 0  # of the text, evicted ones included
    prompt: int | None = None  # tokens when it was first asked to evict
    done: bool = False
    layers: list[_Observed] = field(default_factory=list)


@dataclass
class _Observed:
    """What a layer knows of a sequence's queries."""

    sums: Tensor | None = None  # [Hk, rows] attention of all queries so far
    queries: Tensor | None = None  # [n, H, D] the newest
    count: int = 0  # queries seen so far
    until: int = 0  # tokens of the text when they were seen
    options: dict[str, Any] = field(default_factory=dict)  # of accumulate_scores


@dataclass
class _Summary:
    """Rows that stand for what was evicted: [Hs, slots] rows after compaction, keys, values, ln of how many."""

    rows: Tensor
    keys: Tensor  # [slots, Hk, D]
    values: Tensor
    bias: Tensor  # [slots, Hk]


@dataclass
class _Cut:
    """One table of one sequence, about to be compacted."""

    state: _State
    table: int  # which of the state's tables
    rows: int
    budget: int
    shared: bool
    kept: dict[int, Tensor] = field(default_factory=dict)  # layer -> [1, Hs, budget]
    summaries: dict[int, _Summary] = field(default_factory=dict)


class EvictingCache:
    """Sequences over a PagedCache that hold only the tokens a policy keeps.

        cache = PagedCache([GqaLayer(8, 128)] * 32, num_blocks=1000, block_size=16, dtype=torch.bfloat16)
        kept = EvictingCache(cache, H2O(budget=1024))
        seq = kept.new_sequence()
        slots = kept.append([seq], [5])                     # of each layer
        for layer in range(kept.num_layers):
            batch = kept.batch(layer, [seq], [5])
            kept.pages(layer).write(slots[layer], key, value)
            out, _ = ops.paged_attention(q, **kept.pages(layer).arguments, **batch, softmax_scale=scale)
            kept.observe(layer, [seq], [5], q, scale)
        kept.evict([seq])                                   # blocks go back to cache.pool

    cache           empty of sequences of its own making; write and free through this object only. In any format but
                    "int4", whose keys share scales across tokens, and without keep_recent and keep_sinks
    policy          who is kept, and when: see `kvbackend.compress`
    num_layers      layers of the model. None: those of the cache, over one block table: all layers keep equally many
                    tokens. Where the cache has one layer and the model more of the same kind, each model layer gets a
                    table of its own in the one pool, and budgets may differ by layer (a block then holds block_size
                    tokens of one layer)
    summary_slots   rows of the budget that stand for evicted tokens: these are cut, in the order of the text, into so
                    many stretches of equal count, and each becomes the mean of its keys and of its values, with ln(n)
                    added to its logits, so that softmax sees the mass of n tokens. At the next eviction summaries
                    are summed up again, each counting as its n tokens. 0: what is evicted is lost
    slack           rows beyond the budget that are allowed before a policy that evicts whenever it can does; it then
                    goes back to the budget. 0 is the published rule; a block or more saves moving rows at every step

    Rows of a sequence stay in the order of the text. Positions are those of the text (`key_positions`, which `batch`
    hands to paged_attention), except under StreamingLLM(positions="cache"), where a row is its own position.
    Keys after RoPE that lie far apart cancel in a mean: give summaries enough slots, or cache keys before RoPE.
    With `per_head` policies a row holds another token in each kv head: a sliding window cannot be applied on top, since
    pages have one position per row.
    A call does all it says or raises ArgumentError or OutOfBlocks before any write. It looks at values, so it waits for
    the device. Not thread-safe.
    Source: the papers that the policies name. The correction: n equal keys have the softmax mass of one plus ln(n).
    """

    def __init__(
        self,
        cache: PagedCache,
        policy: Policy,
        num_layers: int | None = None,
        summary_slots: int = 0,
        slack: int = 0,
    ) -> None:
        held = len(cache.specs)
        self.cache, self.policy = cache, policy
        self.num_layers = held if num_layers is None else num_layers
        self.stages = Stages(cache.device, timed=False)  # scoring, choosing and moving; whoever times hands in another
        self.summary_slots, self.slack = summary_slots, slack
        if self.num_layers != held and (held != 1 or self.num_layers < 1):
            raise ArgumentError(
                f"num_layers is {num_layers} but cache has {held} layers; it must be {held}, or any number over a "
                f"cache of one layer: make the cache of [layer] for a block table per layer"
            )
        for name, count in (("summary_slots", summary_slots), ("slack", slack)):
            if count < 0:
                raise ArgumentError(f"{name} is {count}; it must be 0 or more: pass a count of rows")
        self._by_layer = self.num_layers != held
        self._check_cache()
        self._check_policy()
        self._allocate(cache.pool.num_blocks)
        self._sequences: dict[int, _State] = {}
        self._next_id = 0

    def _allocate(self, num_blocks: int) -> None:
        """Positions and biases beside the pages of so many blocks, all 0."""
        cache, policy = self.cache, self.policy
        shape, device = (num_blocks, cache.block_size), cache.device
        heads = [spec.kv_heads if isinstance(spec, GqaLayer) else 1 for spec in cache.specs]
        # positions [nb, bs, Hk | 1], one for all layers that keep the same tokens
        one = torch.zeros(*shape, 1, dtype=torch.int32, device=device) if policy.by_position else None
        self._positions = [
            one
            if one is not None
            else torch.zeros(*shape, count if policy.by_head else 1, dtype=torch.int32, device=device)
            for count in heads
        ]
        self._key_positions = [
            pages[..., 0] if pages.shape[2] == 1 else torch.zeros(*shape, dtype=torch.int32, device=device)
            for pages in self._positions
        ]
        self._bias = [torch.zeros(*shape, count, device=device) if self.summary_slots else None for count in heads]

    def grow(self, num_blocks: int) -> None:
        """Have so many blocks from now on, as `PagedCache.grow`; what `batch` gave out before is stale."""
        before = self._companions()
        self.cache.grow(num_blocks)
        self._allocate(num_blocks)
        for old, new in zip(before, self._companions(), strict=True):
            new[: len(old)] = old

    def _check_cache(self) -> None:
        for name in self.cache.kv_formats:
            if is_kivi(formats.pair(name)[0]):
                raise ArgumentError(
                    f"cache has kv_format {name!r}, whose keys share scales across tokens; rows that stay would leave "
                    f"their group: choose a format with scales per token, such as fp4_e2m1 or int8"
                )
        if self.cache.kept is not None:
            raise ArgumentError(
                "cache keeps recent or first tokens in full precision beside their codes; eviction moves rows between "
                "blocks, and these would stay behind: leave keep_recent and keep_sinks out, and give the policy a "
                "recent window or sinks"
            )

    def _check_policy(self) -> None:
        policy, cache = self.policy, self.cache
        latent = any(isinstance(spec, MlaLayer) for spec in cache.specs)
        if latent and (not policy.by_position or self.summary_slots):
            wants = f"{self.summary_slots} summary slots" if policy.by_position else policy.name
            raise ArgumentError(
                f"cache has MlaLayers, whose rows are latent and serve all heads; {wants} would need keys of kv heads: "
                f"use StreamingLLM(positions='original') or SlidingWindow without summaries"
            )
        if latent and self._cache_positions:
            raise ArgumentError(
                "cache has MlaLayers, which store rotary keys already turned; StreamingLLM with positions='cache' "
                "turns them at read: pass positions='original'"
            )
        if policy.by_layer and not self._by_layer and self.num_layers > 1:
            raise ArgumentError(
                f"{policy.name} gives layers budgets of their own, but the {self.num_layers} layers of this cache "
                f"share one block table and so one length; budgets by layer take a table per layer: pass a cache of "
                f"one layer and num_layers={self.num_layers}, or a policy with one budget"
            )
        for budget in policy.budgets:
            if isinstance(budget, int):
                policy.need_room(budget, self.summary_slots)
        policy.tokens(1 << 30, 0, self.num_layers)  # budgets that do not divide the layers

    # ------------------------------------------------------------------------------------------------- sequences

    def new_sequence(self) -> int:
        """The id of a new, empty sequence. Ids are this object's own, not the cache's."""
        tables = [self.cache.new_sequence() for _ in range(self._num_tables)]
        return self._add(_State(tables, layers=[_Observed() for _ in range(self.num_layers)]))

    def append(self, seqs: Sequence[int], num_tokens: Sequence[int]) -> tuple[Tensor, ...]:
        """Make room for more tokens of each sequence; their slots [sum(num_tokens)] int64, of each layer."""
        states = self._states(seqs)
        ids = [state.tables[table] for table in range(self._num_tables) for state in states]
        last = [self._last_block(seq) for seq in ids]
        slots = self.cache.append_batch(ids, [*num_tokens] * self._num_tables)
        for seq, (index, block) in zip(ids, last, strict=True):
            copy = self._blocks(seq)[index] if index >= 0 else block
            if copy != block:  # the cache copied its pages of a shared block, not ours
                for pages in self._companions():
                    pages[copy] = pages[block]
        positions = [state.tokens + i for state, count in zip(states, num_tokens, strict=True) for i in range(count)]
        position = torch.tensor(positions * self._num_tables, dtype=torch.int32, device=slots.device)
        for pages in (*self._positions, *self._key_positions):
            rows = pages.flatten(0, 1)
            rows[slots] = position if rows.dim() == 1 else position[:, None]
        for bias in self._bias:
            if bias is not None:
                bias.flatten(0, 1)[slots] = 0
        for state, count in zip(states, num_tokens, strict=True):
            state.tokens += count
        parts = slots.split(len(positions)) if positions else [slots] * self._num_tables
        return tuple(parts[self._table_of(layer)] for layer in range(self.num_layers))

    def fork(self, seq: int) -> int:
        """The id of a new sequence with the same tokens and the same past; it shares all blocks."""
        state = self._state(seq)
        child = _State([self.cache.fork(table) for table in state.tables], state.tokens, state.prompt, state.done)
        child.layers = [_Observed(**vars(observed)) for observed in state.layers]
        return self._add(child)

    def free(self, seq: int) -> None:
        """Forget a sequence, and free the blocks that no other one shares."""
        for table in self._state(seq).tables:
            self.cache.free(table)
        del self._sequences[seq]

    def tokens(self, seq: int) -> int:
        """Tokens of the text so far, evicted ones included."""
        return self._state(seq).tokens

    def rows(self, seq: int, layer: int = 0) -> int:
        """Rows that a layer holds of a sequence: kept tokens and summaries."""
        return self.cache.length(self._state(seq).tables[self._table_of(layer)])

    def kept(self, seq: int, layer: int = 0) -> Tensor:
        """Positions of the rows of a layer in the text, [1 or Hk, rows]; a summary has that of its last token."""
        table = self._state(seq).tables[self._table_of(layer)]
        return self._rows_of(self._positions[self._pages_of(layer)], table).mT.contiguous()

    # ----------------------------------------------------------------------------------------------------- calls

    def pages(self, layer: int) -> Any:
        """The pages that a layer writes and attends to."""
        return self.cache.layers[self._pages_of(layer)]

    def batch(self, layer: int, seqs: Sequence[int], q_lens: Sequence[int]) -> dict[str, Any]:
        """What an attention op wants to know of a batch in this layer, by the names of its arguments."""
        table, pages = self._table_of(layer), self._pages_of(layer)
        batch = self.cache.batch([state.tables[table] for state in self._states(seqs)], q_lens)
        if isinstance(self.cache.specs[pages], MlaLayer):
            return batch  # rows are in the order of the text, so rows serve the causal mask
        if not self._cache_positions:
            batch["key_positions"] = self._key_positions[pages]
        if self._bias[pages] is not None:
            batch["key_bias"] = self._bias[pages]
        return batch

    def key_arguments(self, layer: int) -> dict[str, Any]:
        """The keys that queries of a layer meet, by the names of accumulate_scores' arguments."""
        arguments: dict[str, Any] = self.pages(layer).key_arguments
        return arguments

    def positions(self, seqs: Sequence[int], q_lens: Sequence[int]) -> Tensor:
        """[sum(q_lens)] int64: what RoPE turns the queries of the last tokens by, and their keys before caching.

        Under StreamingLLM(positions="cache") they are rows of the cache and for queries only: keys are cached as they
        are.
        """
        ends = [self.rows(seq) if self._cache_positions else self.tokens(seq) for seq in seqs]
        values = [end - count + i for end, count in zip(ends, q_lens, strict=True) for i in range(count)]
        return torch.tensor(values, dtype=torch.int64, device=self.cache.device)

    def observe(
        self, layer: int, seqs: Sequence[int], q_lens: Sequence[int], q: Tensor, softmax_scale: float, **options: Any
    ) -> None:
        """Show a layer the queries of its attention, after their keys are written. Policies that need none ignore it.

        q         [sum(q_lens), H, D] as paged_attention got them
        options   more arguments of accumulate_scores, those that the attention had: window, softcap, sinks, k_scale ...
        """
        states = self._states(seqs)
        policy, pages = self.policy, self.pages(layer)
        if options.get("window", -1) > 0 and policy.by_head:
            raise ArgumentError(
                f"window is {options['window']} and {policy.name} keeps other tokens in each kv head; pages have one "
                f"position for all heads, so a window cannot be told: pass per_head=False to the policy, or no window"
            )
        if not policy.query_dependent or all(state.done for state in states):
            return
        options = {"softmax_scale": softmax_scale, **options}
        if policy.observes < 0:
            batch = self.batch(layer, seqs, q_lens)
            longest = max((self.rows(seq, layer) for seq in seqs), default=0)
            mass = torch.zeros(len(states), pages.key_cache.shape[2], longest, device=q.device)
            ops.accumulate_scores(q, **self.key_arguments(layer), **batch, scores=mass, **options)
            for index, (seq, state) in enumerate(zip(seqs, states, strict=True)):
                observed, rows = state.layers[layer], self.rows(seq, layer)
                total = mass[index, :, :rows].clone()
                if observed.sums is not None:
                    total[:, : observed.sums.shape[1]] += observed.sums
                observed.sums = total
        else:
            for state, queries in zip(states, q.split(list(q_lens)), strict=True):
                observed = state.layers[layer]
                newest = queries if observed.queries is None else torch.cat((observed.queries, queries))
                observed.queries = newest[-policy.observes :].clone()
        for state, count in zip(states, q_lens, strict=True):
            observed = state.layers[layer]
            observed.count += count
            observed.until, observed.options = state.tokens, options

    # -------------------------------------------------------------------------------------------------- evicting

    def evict(self, seqs: Iterable[int] | None = None) -> int:
        """Bring sequences back to the policy's budget where it is time; how many blocks the pool has more of.

        seqs   None: all
        Raises ArgumentError, with nothing changed, where a budget is too small for what is always kept, where queries
        that decide were not observed, where their scores are NaN, and where a sequence whose blocks are shared would
        lose tokens by what its own queries attend to.
        """
        chosen = list(dict.fromkeys(self._sequences if seqs is None else seqs))
        states, free = self._states(chosen), self.cache.blocks_free
        cuts = [cut for seq, state in zip(chosen, states, strict=True) for cut in self._cuts(seq, state)]
        for cut in cuts:
            self._choose(cut)
        moved = [cut for cut in cuts if cut.shared]
        copies = [self.cache.new_sequence() for _ in moved]
        try:
            self.cache.append_batch(copies, [cut.budget for cut in moved])
        except BaseException:
            for copy in copies:
                self.cache.free(copy)
            raise
        targets = dict(zip(map(id, moved), copies, strict=True))
        for cut in cuts:
            with self.stages.time("gather"):
                self._apply(cut, targets.get(id(cut)))
        for state in states:
            if state.tokens == 0:
                continue
            state.prompt = state.tokens if state.prompt is None else state.prompt
            state.done = self.policy.once
            if state.done:  # nobody asks again
                state.layers = [_Observed() for _ in state.layers]
        return self.cache.blocks_free - free

    def _cuts(self, seq: int, state: _State) -> Iterable[_Cut]:
        """The tables of a sequence that are over their budget."""
        if state.done or state.tokens == 0:
            return
        prompt = state.tokens if state.prompt is None else state.prompt
        slack = 0 if self.policy.once else self.slack
        for table, cached in enumerate(state.tables):
            budget = self.policy.tokens(prompt, table, self.num_layers if self._by_layer else 1)
            self.policy.need_room(budget, self.summary_slots)
            rows = self.cache.length(cached)
            if rows <= budget + slack:
                continue
            shared = sum(self.cache.pool.ref_count(block) > 1 for block in self._blocks(cached))
            if shared and self.policy.query_dependent:
                raise ArgumentError(
                    f"sequence {seq} shares {shared} of its blocks with forks; {self.policy.name} drops tokens by what "
                    f"this sequence's own queries attend to, which would rewrite the others' cache: evict before "
                    f"forking, free the forks first, or use a policy by position"
                )
            yield _Cut(state, table, rows, budget, shared > 0)

    def _choose(self, cut: _Cut) -> None:
        """Which rows each layer keeps, and what the others leave behind. Writes nothing."""
        policy, slots = self.policy, self.summary_slots
        real = cut.budget - slots
        first, last = policy.forced(real)
        pooling, kernel = policy.pooling
        device = self.cache.device
        length = torch.tensor([cut.rows], dtype=torch.int32, device=device)
        for layer in self._layers_of(cut.table):
            if policy.by_position and cut.kept and not slots:  # as the layer before
                cut.kept[layer] = next(iter(cut.kept.values()))
                continue
            with self.stages.time("index"):
                scores = self._scores(cut, layer)  # [1 or Hk, rows]
            bias = self._bias[self._pages_of(layer)]
            if bias is not None:  # summaries are no tokens: they are summed up anew
                sizes = self._rows_of(bias, cut.state.tables[cut.table]).mT  # [Hk, rows]
                scores = scores.masked_fill(sizes[: len(scores)] > 0, -torch.inf)
            with self.stages.time("top_k"):
                keep = ops.select_tokens(
                    scores[None], length, real, num_sinks=first, num_recent=last, pooling=pooling, kernel=kernel
                )
            if bias is not None:
                keep, summary = self._summarize(cut, layer, keep[0])
                cut.summaries[layer] = summary
                keep = keep[None]
            cut.kept[layer] = keep

    def _scores(self, cut: _Cut, layer: int) -> Tensor:
        """What the policy chooses by, [1 or Hk, rows]; all finite."""
        policy, observed = self.policy, cut.state.layers[layer]
        cached = cut.state.tables[cut.table]
        if policy.by_position:
            return torch.zeros(1, cut.rows, device=self.cache.device)
        if not policy.query_dependent:
            scores = policy.scores(self.cache.read(self._pages_of(layer), cached)[0])
            assert scores is not None
        else:
            self._need_observed(cut.state, layer)
            if observed.sums is not None:
                scores = observed.sums
            else:
                assert observed.queries is not None
                pages = self.pages(layer)
                count = len(observed.queries)
                batch = self.cache.batch([cached], [count])
                batch |= {"key_positions": self._key_positions[self._pages_of(layer)]}
                if self.summary_slots:
                    batch |= {"key_bias": self._bias[self._pages_of(layer)]}
                scores = torch.zeros(1, pages.key_cache.shape[2], cut.rows, device=self.cache.device)
                arguments = {**self.key_arguments(layer), **batch, **observed.options}
                ops.accumulate_scores(observed.queries, **arguments, scores=scores)
                scores = scores[0]
        if not bool(scores.isfinite().all()):
            kind = "NaN" if bool(scores.isnan().any()) else "infinity"
            raise ArgumentError(
                f"scores of layer {layer} hold {kind}; all must be finite to choose what to keep: look for {kind} in "
                f"the queries and keys of this layer"
            )
        return scores if policy.by_head else scores.mean(0, keepdim=True)

    def _need_observed(self, state: _State, layer: int) -> None:
        observed, wanted = state.layers[layer], self.policy.observes
        wanted = state.tokens if wanted < 0 else min(wanted, state.tokens)
        if observed.count < wanted or observed.until != state.tokens:
            last = f"the last {wanted}" if self.policy.observes > 0 else f"all {wanted}"
            raise ArgumentError(
                f"layer {layer} observed {observed.count} queries, the last at token {observed.until} of "
                f"{state.tokens}; {self.policy.name} chooses by {last}: call observe in every layer after its keys are "
                f"written"
            )

    def _summarize(self, cut: _Cut, layer: int, keep: Tensor) -> tuple[Tensor, _Summary]:
        """Make rows of the evicted ones. keep [Hs, n] -> rows to keep [Hs, n + slots] with a place for each summary."""
        sets, slots = keep.shape[0], self.summary_slots
        pages, cached = self._pages_of(layer), cut.state.tables[cut.table]
        row = torch.arange(cut.rows, device=keep.device).expand(sets, -1)
        mask = torch.ones_like(row, dtype=torch.bool).scatter_(1, keep.long(), False)
        count = cut.rows - keep.shape[1]
        gone = torch.where(mask, row, cut.rows).sort(-1).values[:, :count]  # [Hs, count], in the order of the text
        keys, values = self.cache.read(pages, cached)
        bias = self._bias[pages]
        assert bias is not None
        heads = keys.shape[1]
        weight = self._rows_of(bias, cached).mT.double().exp()  # [Hk, rows]: how many tokens a row stands for
        by_head = gone.expand(heads, -1)
        weight = weight.gather(1, by_head)  # [Hk, count]
        ends = [(i + 1) * count // slots for i in range(slots)]
        member = torch.zeros(slots, count, dtype=torch.float64, device=keep.device)
        for i, end in enumerate(ends):
            member[i, ends[i - 1] if i else 0 : end] = 1
        share = member[:, None] * weight  # [slots, Hk, count]
        size = share.sum(-1)  # [slots, Hk]
        share = share / size[..., None]
        head = torch.arange(heads, device=keep.device)[:, None]
        means = [torch.einsum("mhe,hed->mhd", share, rows[by_head, head].double()) for rows in (keys, values)]
        places = gone[:, [end - 1 for end in ends]]  # [Hs, slots]: each where its last token was
        kept = torch.cat((keep.long(), places), 1).sort(-1).values
        rows = torch.searchsorted(kept, places.contiguous())
        dtype = self.cache.dtype
        return kept.int(), _Summary(rows, means[0].to(dtype), means[1].to(dtype), size.log().float())

    def _apply(self, cut: _Cut, target: int | None) -> None:
        """Move the kept rows to the front, of this table or of a new one, and free the blocks behind them."""
        state, cached = cut.state, cut.state.tables[cut.table]
        blocks, ahead = self._blocks(cached), 0
        if target is not None:  # the new blocks before the shared ones: rows still move forwards only
            new = self._blocks(target)
            blocks, ahead = new + blocks, len(new) * self.cache.block_size
        table = torch.tensor([blocks], dtype=torch.int32, device=self.cache.device)
        done: set[int] = set()
        for layer, rows in cut.kept.items():
            pages = self._pages_of(layer)
            moved = rows + ahead
            for tensor in self._paged(pages):
                if id(tensor) not in done:  # layers may share positions
                    done.add(id(tensor))
                    ops.compact_cache(tensor, table, moved)
            observed = state.layers[layer]
            if observed.sums is not None:
                picked = rows[0].long().expand(observed.sums.shape[0], -1)
                observed.sums = observed.sums.gather(1, picked)
        if target is None:
            self.cache.truncate(cached, cut.budget)
        else:
            self.cache.free(cached)
            state.tables[cut.table] = cached = target
        for layer, summary in cut.summaries.items():
            self._write_summary(layer, cached, summary)
        for layer in cut.kept:
            pages = self._pages_of(layer)
            if self._positions[pages].shape[2] > 1:
                slots = self._slots(cached)
                newest = self._positions[pages].flatten(0, 1)[slots].amax(-1)
                self._key_positions[pages].flatten(0, 1)[slots] = newest

    def _write_summary(self, layer: int, cached: int, summary: _Summary) -> None:
        pages, bias = self._pages_of(layer), self._bias[self._pages_of(layer)]
        assert bias is not None
        slots = self._slots(cached)[summary.rows]  # [Hs, slots]
        if len(slots) == 1:
            self.cache.layers[pages].write(slots[0], summary.keys, summary.values)
            bias.flatten(0, 1)[slots[0]] = summary.bias
            return
        block, offset = slots.mT // self.cache.block_size, slots.mT % self.cache.block_size  # [slots, Hk]
        head = torch.arange(slots.shape[0], device=slots.device)
        for side, rows in enumerate((summary.keys, summary.values)):
            for tensor, coded in self.pages(layer).coded(side, rows):
                as_bytes(tensor)[block, offset, head] = as_bytes(coded)
        bias[block, offset, head] = summary.bias

    # --------------------------------------------------------------------------------------------------- figures

    @property
    def companion_bytes_per_token(self) -> int:
        """Bytes that positions and biases take beside each slot of the pages."""
        slots = max(self.cache.pool.num_blocks * self.cache.block_size, 1)
        return sum(pages.numel() * pages.element_size() for pages in self._companions()) // slots

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that sequences hold, with their positions and biases; a shared block counts once."""
        per_token = self.cache.bytes_per_token + self.companion_bytes_per_token
        return self.cache.blocks_used * self.cache.block_size * per_token

    def __repr__(self) -> str:
        return f"<EvictingCache: {self.policy}, {len(self._sequences)} sequences over {self.cache!r}>"

    # ----------------------------------------------------------------------------------------------------- parts

    @property
    def _num_tables(self) -> int:
        return self.num_layers if self._by_layer else 1

    @property
    def _cache_positions(self) -> bool:
        return isinstance(self.policy, StreamingLLM) and self.policy.positions == "cache"

    def _table_of(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise ArgumentError(
                f"layer is {layer}; there are {self.num_layers}: pass an index from 0 to {self.num_layers - 1}"
            )
        return layer if self._by_layer else 0

    def _pages_of(self, layer: int) -> int:
        return 0 if self._by_layer else layer

    def _layers_of(self, table: int) -> Iterable[int]:
        return (table,) if self._by_layer else range(self.num_layers)

    def _add(self, state: _State) -> int:
        seq, self._next_id = self._next_id, self._next_id + 1
        self._sequences[seq] = state
        return seq

    def _state(self, seq: int) -> _State:
        if seq not in self._sequences:
            raise ArgumentError(
                f"seq is {seq!r}, which this object does not hold; it has {len(self._sequences)} sequences: pass an id "
                f"from new_sequence or fork"
            )
        return self._sequences[seq]

    def _states(self, seqs: Iterable[int]) -> list[_State]:
        return [self._state(seq) for seq in seqs]

    def _blocks(self, cached: int) -> list[int]:
        """The blocks of one of the cache's sequences, in order."""
        blocks: list[int] = self.cache.batch([cached], [0])["block_table"][0].tolist()
        return blocks

    def _last_block(self, cached: int) -> tuple[int, int]:
        """(index, id) of the block that an append writes to first, if it is in use; else (-1, -1)."""
        if self.cache.length(cached) % self.cache.block_size == 0:
            return -1, -1
        blocks = self._blocks(cached)
        return len(blocks) - 1, blocks[-1]

    def _slots(self, cached: int) -> Tensor:
        """The slots of all rows of one of the cache's sequences, [rows] int64."""
        row = torch.arange(self.cache.length(cached), device=self.cache.device)
        blocks = torch.tensor(self._blocks(cached), dtype=torch.int64, device=self.cache.device)
        size = self.cache.block_size
        return blocks[row // size] * size + row % size

    def _rows_of(self, pages: Tensor, cached: int) -> Tensor:
        """[rows, ...] of one of the cache's sequences."""
        return pages.flatten(0, 1)[self._slots(cached)]

    def _paged(self, pages: int) -> list[Tensor]:
        """Everything that has a row for each token of a layer."""
        bias = self._bias[pages]
        return [*self.cache.layers[pages].tensors, self._positions[pages], *([] if bias is None else [bias])]

    def _companions(self) -> list[Tensor]:
        """The paged tensors that are not the cache's own, each once."""
        derived = [self._key_positions[i] for i, pages in enumerate(self._positions) if pages.shape[2] > 1]
        every = [*self._positions, *derived, *(bias for bias in self._bias if bias is not None)]
        return list({id(pages): pages for pages in every}.values())
