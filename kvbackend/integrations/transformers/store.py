"""Where the rows of a batch lie, and attention over them: eviction, then low rank, then a format, each if asked for.

A `Store` takes keys and values as the model makes them, after RoPE, and answers queries. What it keeps is a
`kvbackend.cache.PagedCache`, with a `kvbackend.compress.EvictingCache` around it where tokens are evicted. Low-rank
keys and those of StreamingLLM are kept before RoPE: turned back when they come, and turned again at every read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ... import cache, formats, ops
from ...cache import GqaLayer, MlaLayer, SparseAttention, Sparsity
from ...cache.paged import formats_of_layers
from ...cache.parts import is_quantized
from ...cache.stages import Stages
from ...compress import Calibration, EvictingCache, Policy, Projection, StreamingLLM, lowrank
from ...errors import ArgumentError
from ...planner.schemes import need_compatible, need_one_budget

PLAIN_FORMATS = ("fp32", "bf16", "fp16")

Pair = tuple[Projection, Projection]  # of the keys and of the values of a layer
Note = Callable[[str, dict[str, Any]], None]  # told each op with its arguments, before the call


@dataclass(frozen=True)
class Options:
    """How a batch is stored and read; `PagedCache` says what each means. Wrong ones raise ArgumentError here."""

    block_size: int = 16
    num_blocks: int | None = None
    kv_format: str | Sequence[str] = "auto"
    dtype: torch.dtype | None = None
    scales: Sequence[cache.layers.Scales | None] | None = None
    keep_recent: int = 0
    keep_sinks: int = 0
    evict: Policy | None = None
    summary_slots: int = 0
    slack: int = 0
    low_rank: Calibration | Sequence[Pair] | None = None
    rope_cos_sin: Tensor | None = None
    sparse: Sparsity | None = None
    sparse_prompt: bool = False
    dense_below: int | str = 0
    timed: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is {value}; it must be 1 or more: pass how many you want")
        for name in ("keep_recent", "keep_sinks", "summary_slots", "slack"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be 0 or more: pass a count of tokens")
        if self.evict is None and (self.summary_slots or self.slack):
            raise ArgumentError("summary_slots or slack is given without evict; they belong to a policy: pass one")
        if self.sparse is None and (self.sparse_prompt or self.dense_below):
            raise ArgumentError(
                "sparse_prompt or dense_below is given without sparse; they say how tokens are chosen: pass a "
                "kvbackend.cache.Sparsity, or leave them out"
            )
        need_compatible(
            kv_formats=self.formats(),
            evict=self.evict,
            kept=bool(self.keep_recent or self.keep_sinks),
            sparse=self.sparse is not None,
            low_rank=self.low_rank is not None,
            alike=len(self.formats()) == 1 and self.scales is None,
        )
        self.page_dtype()

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Of all options."""
        return tuple(field.name for field in fields(cls))

    @property
    def before_rope(self) -> bool:
        """Whether keys are kept before RoPE."""
        return self.low_rank is not None or self.by_row

    @property
    def by_row(self) -> bool:
        """Whether a key's position is its row in the cache."""
        return isinstance(self.evict, StreamingLLM) and self.evict.positions == "cache"

    def formats(self) -> tuple[str, ...]:
        """The formats that are named, each once."""
        return tuple(dict.fromkeys([self.kv_format] if isinstance(self.kv_format, str) else self.kv_format))

    def page_dtype(self) -> torch.dtype | None:
        """The dtype of rows that are not codes, and of attention; None: that of the model's keys."""
        named = set()
        for name in self.formats():
            named |= {side for side in formats.pair(name) if side in PLAIN_FORMATS}
        wanted = {getattr(torch, formats.get(name).storage) for name in named}
        allowed = [getattr(torch, formats.get(name).storage) for name in PLAIN_FORMATS]
        if self.dtype is not None and self.dtype not in allowed:
            raise ArgumentError(f"dtype is {self.dtype}; pages are {', '.join(map(str, allowed))}: choose one of these")
        if len(wanted | {self.dtype} - {None}) > 1:
            raise ArgumentError(
                f"kv_format names {', '.join(sorted(named))} and dtype is {self.dtype}; rows that are not codes have "
                f"one dtype: pass one of them"
            )
        return next(iter(wanted), self.dtype)

    def pairs(self, spec: GqaLayer | MlaLayer, num_layers: int) -> list[Pair] | None:
        """The projections of every layer, where there are any; raises ArgumentError if they are not for this model."""
        if self.low_rank is None:
            return None
        if isinstance(spec, MlaLayer):
            raise ArgumentError(
                "low_rank is given; this model caches a trained low-rank row (MLA) already: leave low_rank out"
            )
        given = self.low_rank
        pairs = projections(given) if isinstance(given, Calibration) else list(given)
        wanted = [(spec.kv_heads, spec.head_dim), (spec.kv_heads, spec.value_width)]
        for pair in pairs:
            found = [tuple(side.down.shape[:2]) for side in pair]
            if len(pairs) != num_layers or found != wanted:
                raise ArgumentError(
                    f"low_rank has {len(pairs)} layers of (heads, dim) {found} for keys and values; this model has "
                    f"{num_layers} of {wanted}: calibrate this model"
                )
        return pairs


def projections(
    found: Calibration, key_ranks: Sequence[int] | None = None, value_ranks: Sequence[int] | None = None
) -> list[Pair]:
    """The projections of a calibration, one pair for each layer; cut to lower ranks where these are given.

    What was not calibrated is kept whole, and so is what is cut to all dims of a head.
    """
    about = found.about
    heads, dim, count = about["kv_heads"], about["head_dim"], about["num_layers"]
    sides = []
    for fitted, ranks in ((found.keys, key_ranks), (found.values, value_ranks)):
        side = []
        for layer in range(count):
            rank = ranks[layer] if ranks is not None else fitted[layer].rank if fitted else dim
            side.append(lowrank.identity(heads, dim) if rank == dim else fitted[layer].pair.truncated(rank))
        sides.append(side)
    return list(zip(*sides, strict=True))


class Store:
    """The rows of a batch in every layer.

    options      how they are kept
    spec         what a layer makes of a token; all layers are alike
    num_blocks   blocks of the pool, for each layer where layers have tables of their own
    dtype        of rows that are not codes
    note         told of the ops that are called

    `pages` is the PagedCache; `kept` the EvictingCache around it, or None.
    """

    def __init__(
        self,
        options: Options,
        spec: GqaLayer | MlaLayer,
        num_layers: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        note: Note,
    ) -> None:
        self.options, self.spec, self.num_layers, self.note = options, spec, num_layers, note
        self.pairs = options.pairs(spec, num_layers)
        stored = [spec] * num_layers
        if self.pairs is not None:
            assert isinstance(spec, GqaLayer)
            stored = [GqaLayer(spec.kv_heads, key.rank, value.rank) for key, value in self.pairs]
            self.pairs = [(key.to(dtype, device), value.to(dtype, device)) for key, value in self.pairs]
        names = formats_of_layers(options.kv_format, num_layers)
        policy = options.evict
        self.tables = num_layers if policy is not None and policy.by_layer else 1
        if self.tables > 1:
            assert policy is not None
            if len(set(stored)) > 1:
                need_one_budget(policy)
            names, stored = names[:1], stored[:1]
        if options.before_rope:
            self._need_rope()
        self.pages = cache.PagedCache(
            stored, num_blocks * self.tables, options.block_size, dtype, device, kv_format=names, scales=options.scales,
            keep_recent=options.keep_recent, keep_sinks=options.keep_sinks,
        )  # fmt: skip
        self.sparse: SparseAttention | None = None
        if options.sparse is not None:
            self.sparse = SparseAttention(self.pages, options.sparse, options.dense_below, options.timed)
        self.stages = Stages(device, options.timed) if self.sparse is None else self.sparse.stages
        self.kept: _Kept | None = None
        if policy is not None:
            self.kept = _Kept(self.pages, policy, num_layers, options.summary_slots, options.slack)
            self.kept.store, self.kept.stages = self, self.stages
        self.rows: list[int] = []  # a sequence for each row of the batch
        self.counts: list[int] = []  # new tokens of each in this forward
        self.slots: tuple[Tensor, ...] = ()  # [T] int64, for each layer
        self.positions: Tensor | None = None  # [T] int64, in the text
        self._batch: dict[str, Any] | None = None  # of this forward

    def _need_rope(self) -> None:
        why = "low_rank" if self.pairs is not None else "StreamingLLM(positions='cache')"
        if isinstance(self.spec, MlaLayer):
            raise ArgumentError(f"{why} turns keys at read; MLA stores them turned: pass positions='original'")
        if self.options.rope_cos_sin is None:
            raise ArgumentError(
                f"{why} keeps keys before RoPE, but there is no rope_cos_sin to turn them by: make the cache with "
                f"new_cache(model), or pass the model's table"
            )

    # ------------------------------------------------------------------------------------------------- sequences

    @property
    def sequences(self) -> cache.PagedCache | EvictingCache:
        """Who makes, forks and frees sequences."""
        return self.pages if self.kept is None else self.kept

    def tokens(self, row: int) -> int:
        """Tokens of the text so far in a row of the batch."""
        return self.pages.length(self.rows[row]) if self.kept is None else self.kept.tokens(self.rows[row])

    def free(self, row: int) -> None:
        """Forget a sequence."""
        self.sequences.free(row)
        if self.sparse is not None:
            self.sparse.forget(row)

    def append(self, counts: Sequence[int], grows: bool) -> None:
        """Make room for new tokens of each row of the batch; or raise with nothing changed."""
        if not self.rows:
            self.rows = [self.sequences.new_sequence() for _ in counts]
        if grows:
            self._make_room(counts)
        self.counts, self._batch = list(counts), None
        if self.kept is not None:
            self.slots = self.kept.append(self.rows, counts)
        else:
            self.slots = (self.pages.append_batch(self.rows, counts),) * self.num_layers
        ends = [self.tokens(row) for row in range(len(counts))]
        values = [end - count + i for end, count in zip(ends, counts, strict=True) for i in range(count)]
        self.positions = torch.tensor(values, dtype=torch.int64, device=self.pages.device)

    def _make_room(self, counts: Sequence[int]) -> None:
        """Double the pools if these tokens, and a copy of each row's last block, might not fit."""
        pages, kept = self.pages, self.pages.kept
        wanted = self.tables * sum(-(-count // pages.block_size) + 1 for count in counts)
        full = 0 if kept is None else len(counts) * 2 * kept.blocks_per_sequence
        have = 0 if kept is None else kept.pool.num_blocks
        if wanted <= pages.blocks_free and full <= have:
            return
        num_blocks = pages.blocks_total
        if wanted > pages.blocks_free:
            num_blocks = max(2 * num_blocks, pages.blocks_used + wanted)
        num_blocks = max(num_blocks, full)
        if self.kept is not None:
            self.kept.grow(num_blocks)
        else:
            pages.grow(num_blocks, None if kept is None else max(full, have))

    def evict(self) -> int:
        """Bring every row back to the policy's budget; how many blocks became free. 0 without a policy."""
        return 0 if self.kept is None else self.kept.evict(self.rows)

    # ----------------------------------------------------------------------------------------------------- calls

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> Tensor:
        """Write new keys and values [T, Hk, D], and attend from their queries [T, H, D] to all; out [T, H, Dv].

        options   of paged_attention: window, softcap, sinks
        """
        if self.sparse is not None:
            return self._attend_sparse(layer, q, k, v, scale, **options)
        pages = self._pages_of(layer)
        with self._coding(pages):
            self._write(layer, k, v)
        if self.kept is None and self.pairs is None:
            self._tell("paged_attention", q=q, softmax_scale=scale, **self.batch(), **pages.arguments, **options)
            with self.stages.time("attention"):
                return self.pages.attend(layer, q, self.rows, self.counts, scale, **options)[0]
        with self.stages.time("gather") if self.pairs is not None else nullcontext():
            keys = pages.arguments if self.pairs is None else self.reconstructed(layer)
        with self.stages.time("attention"):
            if self.options.by_row:
                assert self.kept is not None
                q = self._turned(q, inverse=True)
                q = self._turned(q, self.kept.positions(self.rows, self.counts))
                if self.pairs is None:
                    keys["rope_cos_sin"] = self.options.rope_cos_sin
            arguments = dict(**self._batch_of(layer), **keys, q=q, softmax_scale=scale, **options)
            self._tell("paged_attention", **arguments)
            out, _ = ops.paged_attention(**arguments)
        if self.kept is not None:
            seen = dict(options)
            if self.options.by_row and self.pairs is None:
                seen["rope_cos_sin"] = self.options.rope_cos_sin
            with self.stages.time("index"):
                self.kept.observe(layer, self.rows, self.counts, q, scale, **seen)
        if self.pairs is not None:  # attention averages latent values; what stands for them comes after
            up = self.pairs[layer][1].up
            with self.stages.time("attention"):
                basis = up.repeat_interleave(out.shape[1] // up.shape[0], 0)
                out = ops.lowrank_reconstruct(out, basis)
        return out

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Turn back, project and store new keys and values, as far as each is asked for."""
        pages = self._pages_of(layer)
        if self.options.before_rope:
            k = self._turned(k, inverse=True)
        if self.pairs is not None:
            down = [side.down for side in self.pairs[layer]]
            self._tell("lowrank_project", x=k, projection=down[0])
            k, v = ops.lowrank_project(k, down[0]), ops.lowrank_project(v, down[1])
        if pages.key_groups:  # coded in groups, when these are full
            self._tell("quantize_kv", x=k[:0], kv_format=formats.pair(pages.kv_format)[0])
        else:
            self._tell("reshape_and_cache", key=k, value=v, slot_mapping=self.slots[layer], **pages.arguments)
        pages.write(self.slots[layer], k, v)

    def _coding(self, pages: Any) -> AbstractContextManager[None]:
        """Times a write that makes codes or latent rows; one that copies numbers is no stage."""
        coded = self.pairs is not None or is_quantized(pages.kv_format)
        return self.stages.time("codec") if coded else nullcontext()

    def _attend_sparse(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = -1, **options: Any
    ) -> Tensor:
        """Decode steps choose their tokens; prompts, unless they are to, and layers with a window do not."""
        assert self.sparse is not None
        pages = self._pages_of(layer)
        batch = self.batch()
        self._tell("reshape_and_cache", key=k, value=v, slot_mapping=self.slots[layer], **pages.arguments)
        self._tell("paged_attention", q=q, softmax_scale=scale, **batch, **pages.arguments)
        self.sparse.write(layer, self.rows, self.counts, self.slots[layer], k, v)
        call = layer, q, self.rows, self.counts, scale
        if window > 0 or (max(self.counts, default=0) > 1 and not self.options.sparse_prompt):
            with self.stages.time("attention"):
                return self.pages.attend(*call, window=window, **options)[0]
        chosen, size = self.slots[layer].new_zeros(len(q), k.shape[1], 1), self.sparse.sparsity.page_size
        bounds = k.new_zeros(1, 1, *k.shape[1:])
        self._tell("page_logits", q=q, low_cache=bounds, high_cache=bounds, **batch, page_size=size)
        self._tell("token_logits", q=q, pages=chosen, **batch, page_size=size, **pages.key_arguments)
        self._tell("topk_indices", scores=q[:, 0], k=1)
        self._tell("sparse_attention", q=q, topk_indices=chosen, softmax_scale=scale, **batch, **pages.arguments)
        return self.sparse.attend(*call, **options)[0]

    def attend_latent(self, layer: int, q: tuple[Tensor, Tensor], ckv: Tensor, kpe: Tensor, scale: float) -> Tensor:
        """The same for MLA: rows [T, kv_lora_rank | rope], absorbed queries [T, H, kv_lora_rank | rope]."""
        pages = self._pages_of(layer)
        self._tell("concat_and_cache_mla", ckv=ckv, kpe=kpe, slot_mapping=self.slots[layer], **pages.arguments)
        with self._coding(pages):
            pages.write(self.slots[layer], ckv, kpe)
        names = dict(zip(("q_nope", "q_pe"), q, strict=True))
        arguments = dict(**names, softmax_scale=scale, **self._batch_of(layer), **pages.arguments)
        self._tell("mla_attention", **arguments)
        with self.stages.time("attention"):
            if self.kept is None:
                return self.pages.attend(layer, q, self.rows, self.counts, scale)[0]
            out: Tensor = ops.mla_attention(**arguments)[0]
        return out

    def batch(self) -> dict[str, Any]:
        """The batch where layers share a table, by the names of the ops' arguments; made once a forward."""
        if self._batch is None:
            self._batch = self.pages.batch(self.rows, self.counts)
        return self._batch

    def _batch_of(self, layer: int) -> dict[str, Any]:
        """The same for one layer; the caller's own."""
        return dict(self.batch()) if self.kept is None else self.kept.batch(layer, self.rows, self.counts)

    def reconstructed(self, layer: int) -> dict[str, Any]:
        """Pages of a low-rank layer's keys as its queries meet them, and its latent values; as paged_attention's
        arguments. Rows lie where the layer's own pages have them."""
        assert self.pairs is not None
        basis = self.pairs[layer][0].up
        assert isinstance(self.spec, GqaLayer)
        shape = self.pages.blocks_total, self.pages.block_size, self.spec.kv_heads
        keys = basis.new_empty(*shape, self.spec.head_dim)
        values = basis.new_empty(*shape, self.pairs[layer][1].rank)
        for index, row in enumerate(self.rows):
            latent, value = self.read(layer, index)
            self._tell("lowrank_reconstruct", z=latent, basis=basis)
            key = self._turned_rows(ops.lowrank_reconstruct(latent, basis), row, layer)
            seq = row if self.kept is None else self.kept.table(row, layer)
            ops.reshape_and_cache(key, value, keys, values, self._slots_of(seq))
        return dict(key_cache=keys, value_cache=values)

    def read(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """What a layer holds of a row of the batch."""
        seq = self.rows[row] if self.kept is None else self.kept.table(self.rows[row], layer)
        return self.pages.read(layer if self.tables == 1 else 0, seq)

    def _turned_rows(self, key: Tensor, row: int, layer: int) -> Tensor:
        """All keys of a row of the batch, [rows, Hk, D], turned by their own positions."""
        count, heads, dim = key.shape
        table = self.options.rope_cos_sin
        assert table is not None
        if self.kept is None or self.options.by_row:
            return ops.apply_rope(key, torch.arange(count, device=key.device), table)
        position = self.kept.kept(row, layer).long().expand(heads, -1)  # [Hk, rows]
        turned = ops.apply_rope(key.reshape(-1, 1, dim), position.mT.reshape(-1).contiguous(), table)
        return turned.reshape(count, heads, dim)

    def _turned(self, x: Tensor, positions: Tensor | None = None, inverse: bool = False) -> Tensor:
        """Rows of the new tokens turned by RoPE, or turned back; at their positions in the text unless told."""
        table = self.options.rope_cos_sin
        assert table is not None
        assert self.positions is not None
        return ops.apply_rope(x, self.positions if positions is None else positions, table, inverse=inverse)

    def _slots_of(self, seq: int) -> Tensor:
        """The slots of all rows of a sequence of the PagedCache, [rows] int64."""
        row = torch.arange(self.pages.length(seq), device=self.pages.device)
        table = self.pages.batch([seq], [0])["block_table"][0].long()
        size = self.pages.block_size
        return table[row // size] * size + row % size

    def _pages_of(self, layer: int) -> Any:
        return self.pages.layers[layer if self.tables == 1 else 0]

    def _tell(self, name: str, **arguments: Any) -> None:
        self.note(name, arguments)

    # --------------------------------------------------------------------------------------------------- figures

    def held(self, layer: int) -> int:
        """Rows that a layer holds of the whole batch."""
        if self.kept is None:
            return sum(self.pages.length(row) for row in self.rows)
        return sum(self.kept.rows(row, layer) for row in self.rows)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row in all layers: codes and scales, or numbers; without copies and positions."""
        return self.pages.bytes_per_token * self.tables

    @property
    def cache_bytes(self) -> int:
        """Bytes of the blocks in use in all layers: rows, scales, full-precision copies, positions and biases."""
        pages = self.pages
        total = pages.blocks_used * pages.block_bytes + pages.fixed_scale_bytes
        if pages.kept is not None:
            total += pages.kept.pool.num_used * pages.block_size * pages.kept_bytes_per_token
        if self.kept is not None:
            total += pages.blocks_used * pages.block_size * self.kept.companion_bytes_per_token
        return total

    @property
    def projection_bytes(self) -> int:
        """Bytes of the low-rank projections, which belong to the model and not to a token."""
        sides = [side for pair in self.pairs or () for side in pair if side.rank < side.head_dim]
        return sum(part.numel() * part.element_size() for side in sides for part in (side.down, side.up))


class _Kept(EvictingCache):
    """An EvictingCache that scores low-rank keys as queries meet them."""

    store: Store

    def table(self, seq: int, layer: int) -> int:
        """The sequence of the PagedCache that holds a layer's rows."""
        return self._state(seq).tables[self._table_of(layer)]

    def key_arguments(self, layer: int) -> dict[str, Any]:
        """Reconstructed keys where these are low-rank."""
        if self.store.pairs is None:
            return super().key_arguments(layer)
        return {"key_cache": self.store.reconstructed(layer)["key_cache"]}
