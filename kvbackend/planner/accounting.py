"""Bytes of a cache, exactly: rows x formats, per layer, per sequence of n tokens, as records and as pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby

from .. import formats
from .checks import check
from .schemes import FULL_PRECISION, Scheme, is_kivi, ranks
from .shapes import Layer, Model, Rows, Vector


@dataclass(frozen=True)
class Stored:
    """Rows of one layer in one format.

    row_bytes   codes and scales of one row
    term        how row_bytes comes about, as text
    page_rows   rows of one page, page_bytes its bytes
    unread      rows that are read elsewhere, in full precision
    share       part of the tokens that eviction keeps
    limit       rows kept at most, None if they grow with the text
    fixed_scale_bytes   scales that the cache has once
    """

    rows: Rows
    row_bytes: int
    term: str
    page_rows: int
    page_bytes: int
    unread: int = 0
    share: Fraction = Fraction(1)
    limit: int | None = None
    fixed_scale_bytes: int = 0

    def count(self, tokens: int) -> int:
        """Rows after `tokens` tokens."""
        rows = max(int(tokens * self.share), 0) // self.rows.tokens_per_row
        return rows if self.limit is None else min(rows, self.limit)

    def bytes_at(self, tokens: int) -> int:
        """Bytes of the rows of one sequence."""
        return self.count(tokens) * self.row_bytes

    def pages_at(self, tokens: int) -> int:
        """Pages that one sequence holds at most: a sliding window that starts inside a page holds one more."""
        if self.limit is not None and self.rows.window is not None and not self.rows.ring:
            unbounded = max(int(tokens * self.share), 0)
            return min(-(-unbounded // self.page_rows), -(-(self.limit - 1) // self.page_rows) + 1)
        return -(-self.count(tokens) // self.page_rows)

    def allocated_at(self, tokens: int) -> int:
        """Bytes of the pages of one sequence."""
        return self.pages_at(tokens) * self.page_bytes

    @property
    def per_token(self) -> Fraction:
        """Bytes by which one more token makes the rows grow, once every window is full."""
        return self._growth * self.row_bytes

    @property
    def allocated_per_token(self) -> Fraction:
        """The same for pages."""
        return self._growth * Fraction(self.page_bytes, self.page_rows)

    @property
    def fixed(self) -> Fraction:
        """Bytes beyond `per_token` x tokens, once every window is full."""
        return Fraction((self.limit or 0) * self.row_bytes)

    @property
    def _growth(self) -> Fraction:
        """Rows that one more token adds."""
        return Fraction(0) if self.limit is not None else self.share / self.rows.tokens_per_row


@dataclass(frozen=True)
class StoredLayer:
    """What one layer stores and reads under a scheme."""

    index: int
    layer: Layer
    stored: tuple[Stored, ...]
    read: tuple[tuple[tuple[Stored, ...], int | None], ...]

    @property
    def per_token(self) -> Fraction:
        """Bytes per token of this layer."""
        return sum((part.per_token for part in self.stored), Fraction(0))

    def read_bytes_at(self, tokens: int) -> int:
        """Bytes that one decode step of one sequence reads here; of selected rows, the smallest."""
        total = 0
        for parts, limit in self.read:
            for part in sorted(parts, key=lambda part: part.row_bytes):
                rows = max(part.count(tokens) - part.unread, 0)
                if limit is not None:
                    rows = min(rows, limit)
                    limit -= rows
                total += rows * part.row_bytes
        return total


@dataclass(frozen=True)
class Cache:
    """A model's cache under a scheme, or the `only` layers of one pipeline stage: every number a plan rests on."""

    model: Model
    scheme: Scheme
    block_size: int
    only: range | None = None
    layers: tuple[StoredLayer, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self.model, self.scheme, self.block_size)
        every = range(len(self.model.layers)) if self.only is None else self.only
        layers = tuple(self._stored_layer(index, self.model.layers[index]) for index in every)
        object.__setattr__(self, "layers", layers)

    def stage(self, layers: range) -> Cache:
        """The cache of one pipeline stage."""
        return self if layers == range(len(self.model.layers)) else replace(self, only=layers)

    @property
    def per_token(self) -> Fraction:
        """Bytes per token: records only."""
        return sum((layer.per_token for layer in self.layers), Fraction(0))

    @property
    def allocated_per_token(self) -> Fraction:
        """Bytes per token of the pages, their padding included."""
        return sum((part.allocated_per_token for part in self._parts()), Fraction(0))

    @property
    def fixed_per_sequence(self) -> Fraction:
        """Bytes of a sequence beyond `per_token` x tokens, once every window is full: windows and states."""
        return sum((part.fixed for part in self._parts()), Fraction(self.state_bytes))

    @property
    def state_bytes(self) -> int:
        """Bytes per sequence of compressor states."""
        return sum(layer.layer.state_bytes for layer in self.layers)

    @property
    def fixed_scale_bytes(self) -> int:
        """Bytes of the scales that the whole cache has once."""
        return sum(part.fixed_scale_bytes for part in self._parts())

    def bytes_at(self, tokens: int) -> int:
        """Bytes of one sequence of `tokens` tokens: records and states."""
        return self.state_bytes + sum(part.bytes_at(tokens) for part in self._parts())

    def allocated_at(self, tokens: int) -> int:
        """Bytes of one sequence of `tokens` tokens: pages and states."""
        return self.state_bytes + sum(part.allocated_at(tokens) for part in self._parts())

    def read_bytes_at(self, tokens: int) -> int:
        """Bytes of the cache that one decode step of one sequence reads."""
        return sum(layer.read_bytes_at(tokens) for layer in self.layers)

    def pool_bytes(self, num_blocks: int) -> int:
        """Bytes of a pool of `num_blocks` blocks that every layer with growing rows shares block ids of."""
        return num_blocks * sum(part.page_bytes for part in self._parts() if part.limit is None)

    def formula(self) -> str:
        """Bytes per token with the numbers put in, equal layers taken together."""
        terms = []
        order = sorted(self.layers, key=lambda layer: self._signature(layer))
        for signature, group in groupby(order, key=self._signature):
            same = list(group)
            if same[0].per_token:
                terms.append((same[0].index, f"{len(same)} {signature}"))
        left = " + ".join(term for _, term in sorted(terms)) or "0"
        return f"{left} = {number(self.per_token)} B per token"

    def formula_of_fixed(self) -> str:
        """Fixed bytes per sequence with the numbers put in."""
        added = (f"{part.limit} rows x {part.row_bytes}" for part in self._parts() if part.limit is not None)
        states = (f"{layer.layer.state_bytes} (state)" for layer in self.layers if layer.layer.state_bytes)
        text = " + ".join(_tally([*added, *states])) or "0"
        return f"{text} = {number(self.fixed_per_sequence)} B per sequence"

    def _signature(self, layer: StoredLayer) -> str:
        parts = " + ".join(_rate(part) for part in layer.stored if part.limit is None)
        return f"{layer.layer.kind} layers x ({parts})"

    def _parts(self) -> Iterable[Stored]:
        return (part for layer in self.layers for part in layer.stored)

    def _stored_layer(self, index: int, layer: Layer) -> StoredLayer:
        by_rows = {rows: self._stored(index, rows) for rows in layer.keeps}
        for read in layer.reads:
            if read.rows not in by_rows:  # of another layer, in that layer's format
                by_rows[read.rows] = self._stored(layer.source, read.rows)
        stored = tuple(part for rows in layer.keeps for part in by_rows[rows])
        reads = tuple((by_rows[read.rows], read.limit) for read in layer.reads)
        return StoredLayer(index, layer, stored, reads)

    def _stored(self, index: int, rows: Rows) -> tuple[Stored, ...]:
        """The rows in their format, and those that are kept in full precision besides."""
        scheme = self.scheme
        names = scheme.formats_of(self.model, index, rows)
        rows = self._low_rank(index, rows)
        limit = rows.window
        share = Fraction(1)
        if rows.role != "window":
            if isinstance(scheme.keep, int):
                limit = min(filter(None, (limit, scheme.keep)))
            elif scheme.keep is not None:
                share = scheme.keep
        kept = 0
        if rows.role == "kv" and not self.model.compressed and set(names) != {FULL_PRECISION}:
            kept = self._kept_rows(names)
            kept = kept if limit is None else min(kept, limit)
        coded = self._one(rows, names, kept, share, limit)
        return (self._one(rows, (FULL_PRECISION,) * 2, 0, share, kept), coded) if kept else (coded,)

    def _kept_rows(self, names: tuple[str, ...]) -> int:
        """Rows of a sequence in full precision, at most: the rule counts in whole blocks, which end where they may.

        KIVI's keys keep the block whose groups are open, and the one before while it is filled.
        """
        size, recent = self.block_size, self.scheme.recent
        late = size if is_kivi(names[0]) else 0
        recent = max(recent, 1) if late else recent
        return -(-self.scheme.sinks // size) * size + (recent + size - 1 if recent else 0) + late

    def _one(self, rows: Rows, names: tuple[str, ...], unread: int, share: Fraction, limit: int | None) -> Stored:
        page_rows = rows.page_rows or self.block_size // rows.tokens_per_row
        if names[0] in formats.record_names():
            record = formats.record(names[0])
            row_bytes, term = record.row_bytes, str(record.row_bytes)
            page_bytes, fixed = record.page_bytes(page_rows), 0
        else:
            pairs = [(vector, _format(vector, names)) for vector in rows.vectors]
            row_bytes = sum(fmt.bytes_per_token(v.heads, v.dim) for v, fmt in pairs)
            term = " + ".join(_term(vector, fmt) for vector, fmt in pairs)
            page_bytes = page_rows * row_bytes
            fixed = sum(fmt.fixed_scale_bytes(v.heads, v.dim) for v, fmt in pairs)
        return Stored(rows, row_bytes, term, page_rows, page_bytes, unread, share, limit, fixed)

    def _low_rank(self, index: int, rows: Rows) -> Rows:
        if rows.holds != "heads" or not (self.scheme.rank or self.scheme.ratios):
            return rows
        layers = len(self.model.layers)
        vectors = (
            Vector(v.name, v.heads, ranks(self.scheme, layers, v.dim, v.name == "value")[index]) for v in rows.vectors
        )
        return replace(rows, vectors=tuple(vectors))


def _format(vector: Vector, names: tuple[str, ...]) -> formats.KVFormat:
    """The format of one vector. MLA's rotary part is small and sensitive, so only the latent is ever quantized."""
    found = formats.get(names[vector.name == "value"])
    return formats.get(FULL_PRECISION) if vector.name == "rope" and found.quantized else found


def _rate(part: Stored) -> str:
    """Bytes per token of growing rows, as text."""
    per_row, share = part.rows.tokens_per_row, part.share
    term = f"({part.term})" if share != 1 and " + " in part.term else part.term
    return f"{term}{f' / {per_row}' if per_row > 1 else ''}{f' x {number(share)}' if share != 1 else ''}"


def _term(vector: Vector, fmt: formats.KVFormat) -> str:
    """One vector's bytes, as text: heads x (codes + scales)."""
    codes = fmt.code_bytes_per_token(1, vector.dim)
    scales = fmt.scale_bytes_per_token(1, vector.dim)
    one = f"({codes} + {scales})" if scales else f"{vector.dim} x {number(Fraction(fmt.bits, 8))}"
    return one if vector.heads == 1 else f"{vector.heads} x {one}"


def number(value: Fraction | int) -> str:
    """A count of bytes as text, without a rounded digit where it is exact."""
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    exact = value.denominator & (value.denominator - 1) == 0 and value.denominator <= 1 << 16
    return f"{float(value):.{16 if exact else 4}f}".rstrip("0")


def _tally(terms: Iterable[str]) -> list[str]:
    """Equal terms taken together: "32 x term"."""
    return [f"{count} x {term}" for term, count in Counter(terms).items()]
