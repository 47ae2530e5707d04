"""CANN's sparse_flash_mla over plain pages, and mixed_quant_sparse_flash_mla over fp8 records.

Their window is paged by position, ours is a ring: a table that names the ring's blocks over and over says the same,
since position p is row p % rows of the ring. Where `kv` is given, its rows are not in the ring yet; each sequence's
window is then put together in a ring of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops import _math, _pages, registry
from . import cann_ops, host_lengths, rotary, takes, target
from .sparse_mla_attention import packed
from .vendor_ops import MIXED_QUANT_SPARSE_FLASH_MLA as QUANTIZED
from .vendor_ops import ROTARY_MUL
from .vendor_ops import SPARSE_FLASH_MLA as PLAIN

op = registry["shared_kv_attention"]

QUANT_MODES = {"v4_fp8_608_ascend": 1, "v4_fp8_584_ascend": 2}  # by the record that both pools hold
BAND, CAUSAL, UNMASKED = 4, 3, 0  # mask modes
NO_SINK = torch.finfo(torch.float32).min  # sinks are mandatory; the weight of this one is 0
ROPE_DIM = 64  # of the records
PAGE = 128  # rows of a block of the rings that are put together here


def unsupported(
    q, window_cache, window, kv, compressed_cache, topk_indices, compress_ratio, window_format, kv_format, cos_sin, **_
):
    has_entries = compressed_cache is not None
    read = window_format if not has_entries or kv_format == window_format else f"{window_format} and {kv_format}"
    if read == "auto":
        vendor = PLAIN
    elif read in QUANT_MODES:
        vendor = QUANTIZED
    else:
        yield (
            f"window and compressed pages hold {read}; Ascend's kernels read 'auto', or one of "
            f"{', '.join(QUANT_MODES)} in both ({QUANTIZED.source}): write both pools in one of these"
        )
        return
    yield from vendor.missing()
    if not vendor.is_here():
        return
    yield from vendor.refuse("dtype", q.dtype, "q is", "convert it, and allocate plain pages alike")
    yield from vendor.refuse("dim", q.shape[2], "the dims of a row are", "use the reference for this model")
    yield from vendor.refuse("num_heads", q.shape[1], "q's heads are", "pad or split them")
    if vendor is PLAIN:
        yield from vendor.refuse("window", window, "window is", "use the reference for this model")
    elif kv is not None:
        yield (
            f"kv is given; {vendor.name} reads every row as a record ({vendor.source}): write the rows to window_cache "
            f"before the call, and pass None"
        )
    if kv is None:
        yield from _pool("window_cache", window_cache, read, vendor)
    if has_entries:
        yield from _pool("compressed_cache", compressed_cache, read, vendor)
        ratio = "ratio_all" if topk_indices is None else "ratio_chosen"
        yield from vendor.refuse(ratio, compress_ratio, "compress_ratio is", "use the reference for this model")
    if topk_indices is not None and vendor is PLAIN:
        yield from vendor.refuse("topk", max(topk_indices.shape[1], 1), "chosen entries are", "choose fewer")
    if cos_sin is not None:
        yield from ROTARY_MUL.missing()
        yield from ROTARY_MUL.refuse("rotary_dim", cos_sin.shape[1], "cos_sin's dims are", "rotate the result yourself")


def _pool(name, pages, kv_format, vendor):
    rows = _pages.block_size_of(pages, kv_format)
    yield from vendor.refuse("block_size", rows, f"rows of a block of {name} are", "allocate blocks of 128")
    yield from takes.dense(**{name: pages})


def run(
    q, window_cache, window_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, window, kv, compressed_cache,
    block_table, topk_indices, compress_ratio, window_format, kv_format, sinks, cos_sin, return_lse,
):  # fmt: skip
    call = dict(locals())
    num_tokens, num_heads, dim = q.shape
    if 0 in (num_tokens, *window_table.shape, window_cache.shape[0]) or max_seqlen_q <= 0:
        return op.reference(**call)
    has_entries = compressed_cache is not None and 0 not in (block_table.shape[1], compressed_cache.shape[0])
    has_entries = has_entries and (topk_indices is None or topk_indices.shape[1] > 0)
    lens = seq_lens.long()
    first = lens - cu_seqlens_q.long().diff() - (window - 1)  # the oldest row that a query of the sequence sees
    most = window - 1 + max_seqlen_q  # such rows
    seen = _window(window_cache, window_table, window_format, kv, lens, cu_seqlens_q, first, most)
    holes = seen.holes
    if has_entries and topk_indices is None:
        per_block = _pages.block_size_of(compressed_cache, kv_format)
        starts = torch.arange(block_table.shape[1], device=q.device) * per_block
        holes = holes | ((starts < (lens // compress_ratio)[:, None]) & (block_table < 0)).any()
    if host_lengths.has_holes(op.name, holes):
        return op.reference(**call)

    if kv is None:
        pages, table = _paged(window_cache, window_format), window_table.clamp(min=0)
    else:
        pages, table = seen.put_together(window_cache, kv)
    ring = table.shape[1] * pages.shape[1]
    # rings that no query looks into are left out of the lengths, unless the entries' mask rests on these
    base = 0 if has_entries else first.clamp(min=0) // ring * ring
    lengths = dict(cu_seqlens_q=cu_seqlens_q.contiguous(), seqused_ori_kv=(lens - base).int())
    inputs = dict(ori_kv=pages)
    modes = dict(
        cmp_ratio=1, ori_mask_mode=BAND, cmp_mask_mode=UNMASKED, ori_win_left=window - 1, ori_win_right=0,
        layout_q="TND", layout_kv="PA_BBND",
    )  # fmt: skip
    longest, topk = ring + most, 0
    sequence, own = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens)
    if has_entries:
        per_block = _pages.block_size_of(compressed_cache, kv_format)
        longest = (block_table.shape[1] * per_block + 1) * compress_ratio
        lengths |= dict(seqused_cmp_kv=(lens // compress_ratio).int(), cmp_residual_kv=(lens % compress_ratio).int())
        inputs |= dict(cmp_kv=_paged(compressed_cache, kv_format), cmp_block_table=block_table.int().contiguous())
        modes |= dict(cmp_ratio=compress_ratio, cmp_mask_mode=CAUSAL)
        if topk_indices is not None:
            newest = (own.clamp(min=-1) + 1) // compress_ratio - 1  # entry that a query sees
            indices = _filled_up(packed(topk_indices, newest, sequence, block_table, per_block))
            inputs["cmp_sparse_indices"], topk = indices[:, None], indices.shape[1]
    over_and_over = torch.arange(-(-longest // pages.shape[1]), device=q.device) % table.shape[1]
    inputs["ori_block_table"] = table.int().index_select(1, over_and_over)

    vendor, quantized = PLAIN, {}
    if window_format != "auto":
        vendor, quantized = QUANTIZED, dict(quant_mode=QUANT_MODES[window_format], rope_head_dim=ROPE_DIM)
    name = vendor.name.partition(".")[2]
    metadata = cann_ops.op(f"{name}_metadata")(
        num_heads, 1, dim, batch_size=seq_lens.shape[0], max_seqlen_q=max_seqlen_q, ori_topk=0, cmp_topk=topk,
        has_ori_kv=True, has_cmp_kv=has_entries, **lengths, **modes, **quantized,
    )  # fmt: skip
    if sinks is None or return_lse:  # with lse they join afterwards: ours has none, theirs is documented in two ways
        in_kernel = q.new_full((num_heads,), NO_SINK, dtype=torch.float32)
    else:
        in_kernel = sinks.float().contiguous()
    out, lse = cann_ops.op(name)(
        q.contiguous(), sinks=in_kernel, metadata=metadata, softmax_scale=softmax_scale, topk_value_mode=1,
        return_softmax_lse=return_lse, **inputs, **lengths, **modes, **quantized,
    )  # fmt: skip
    lse = lse[0] if return_lse else q.new_empty(0, dtype=torch.float32)  # [1, T, H]
    if sinks is not None and return_lse:
        out = _math.apply_sinks(out.float(), lse, sinks).to(q.dtype)
    out, lse = _math.blank(out, lse, own < 0)
    if cos_sin is not None:
        plain = dim - cos_sin.shape[1]
        turned = rotary.turn(out[..., plain:], own, cos_sin, interleaved=True, inverse=True)
        out = torch.cat((out[..., :plain], turned), -1)
    return out, lse


@dataclass(frozen=True)
class Window:
    """The rows that some query of a sequence sees, each at its position's place in a ring of `size` rows.

    exists         [B, size] bool: a query sees the row
    token          [B, size] the row's place in `kv`, where it is of the call
    in_cache       [B, size] bool: it was written before
    block, offset  [B, size] where in the cache; -1 is no block
    """

    exists: Tensor
    token: Tensor
    in_cache: Tensor
    block: Tensor
    offset: Tensor

    @property
    def holes(self) -> Tensor:
        """[] bool: a row that a query sees is in a block of -1."""
        return (self.in_cache & (self.block < 0)).any()

    def put_together(self, window_cache: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Pages [nb, PAGE, 1, D] of the rows, and the blocks [B, size / PAGE] of each sequence's."""
        cached = window_cache[self.block.clamp(min=0), self.offset]
        rows = torch.where(self.in_cache[..., None], cached, kv[self.token.clamp(0, kv.shape[0] - 1)])
        pages = rows.masked_fill(~self.exists[..., None], 0).view(-1, PAGE, 1, kv.shape[1])
        return pages, torch.arange(pages.shape[0], device=kv.device).view(rows.shape[0], -1)


def _window(window_cache, window_table, window_format, kv, lens, cu_seqlens_q, first, most):
    """Where the rows are; with `kv` the ring is of whole pages."""
    size = most if kv is None else -(-most // PAGE) * PAGE
    last, start = lens[:, None] - 1, cu_seqlens_q.long()[:, None]
    position = last - (last - torch.arange(size, device=lens.device)) % size  # the newest that a row can hold
    exists = (position >= 0) & (position >= first[:, None])
    token = position - last + start[1:] - 1
    rows = _pages.block_size_of(window_cache, window_format)
    row = position.clamp(min=0) % (window_table.shape[1] * rows)
    in_cache = exists if kv is None else exists & (token < start[:-1])
    return Window(exists, token, in_cache, window_table.gather(1, row // rows).long(), row % rows)


def _paged(pages, kv_format):
    """Pages as the kernels take them: [nb, bs, 1, D], or fp8 numbers [nb, bs, 1, row_bytes] of records."""
    record = _pages.record_of(kv_format)
    if record is None:
        return pages[:, :, None]
    rows = _pages.block_size_of(pages, kv_format)
    bytes_of_rows = pages[:, : rows * record.row_bytes].view(torch.float8_e4m3fn)
    return bytes_of_rows.unflatten(1, (rows, 1, record.row_bytes))


def _filled_up(indices):
    """A2 and A3 take lists of 512 or 1024 indices, 950 any."""
    given = indices.shape[1]
    if target.current().family in target.A5 or given > 1024:
        return indices
    return torch.nn.functional.pad(indices, (0, (512 if given <= 512 else 1024) - given), value=-1)
