"""KIVI's int4 in pages: keys share scales across a group of tokens, so they are coded when all of a group is there.

Until then a group lies in a block that is kept in full precision (`kept`); a block is coded when it leaves the recent
window, and rows of a long prompt that lie before that window are coded when they are written. Values have scales of
their own per token; they are written as they come.
Source: KIVI (arXiv 2402.02750), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import formats, ops
from ..errors import ArgumentError
from ..ops import _checks, _math

if TYPE_CHECKING:
    from .layers import GqaPages


def is_kivi(name: str) -> bool:
    """Whether a format of one side, keys or values, has KIVI's groups."""
    return name != "auto" and formats.get(name).granularity == "kivi"


def write(pages: GqaPages, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    """Write rows [T, kv_heads, dim] whose keys are KIVI's: whole groups of keys, and all values.

    A group of keys is written where the call has all of it, in order; those in blocks kept in full precision are left
    out. On the CPU, keys that are in neither, and slots outside the cache, raise ArgumentError before any write.
    """
    _need_rows(pages, slot_mapping, key, value)
    key, value = key[: len(slot_mapping)], value[: len(slot_mapping)]
    key_format, _ = formats.pair(pages.kv_format)
    group = formats.get(key_format).group
    assert group is not None
    assert pages.full is not None
    assert pages.k_scale_cache is not None
    slots = slot_mapping.long()
    in_full = pages.full.slots(slots) >= 0
    begins, first = _whole_groups(slots, in_full, group)
    if slots.device.type == "cpu":
        _need_all_written(slots, in_full, begins, group)
    for target, rows in pages.coded(1, value):
        _math.write_rows(target, slots, rows)
    if not len(first):
        return
    in_call = first < len(slots)
    rows = torch.where(in_call, first, 0)[:, None] + torch.arange(group, device=slots.device)  # [groups, group]
    codes, scales = ops.quantize_kv(key[rows.flatten()], key_format, role="key")
    _math.write_rows(pages.key_cache, torch.where(in_call[:, None], slots[rows], -1).flatten(), codes)
    group_slots = torch.where(in_call, slots[rows[:, 0]] // group, -1)  # of pages [num_blocks, block_size / group, ...]
    _math.write_rows(pages.k_scale_cache, group_slots, scales)


def code_blocks(pages: GqaPages, full_blocks: Tensor, blocks: Tensor) -> None:
    """Code the keys of blocks [n] that leave full precision, from their rows there."""
    assert pages.full is not None
    assert pages.k_scale_cache is not None
    keys = pages.full.pages.caches[0][full_blocks]  # [n, block_size, kv_heads, head_dim]
    codes, scales = ops.quantize_kv(keys.flatten(0, 1), formats.pair(pages.kv_format)[0], role="key")
    pages.key_cache[blocks] = codes.unflatten(0, keys.shape[:2])
    pages.k_scale_cache[blocks] = scales.unflatten(0, (len(blocks), -1))


def read_blocks(cache: Tensor, scale_cache: Tensor, kv_format: str, role: str, blocks: Tensor, dtype: str) -> Tensor:
    """The rows [n * block_size, kv_heads, dim] of blocks [n], dequantized; `dtype` is a name of `formats`."""
    codes, scales = cache[blocks].flatten(0, 1), scale_cache[blocks].flatten(0, 1)
    return ops.dequantize_kv(codes, scales, kv_format, role=role, out_dtype=dtype)


def _whole_groups(slots: Tensor, in_full: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Which rows [T] begin a group of which all rows follow, and their numbers [T // group], T where there is none."""
    count = len(slots)
    wanted = count // group
    begins = (slots % group == 0) & (slots >= 0) & ~in_full
    if not wanted:
        return begins & False, slots[:0]
    follows = slots[1:] == slots[:-1] + 1
    breaks = torch.cat((slots.new_zeros(1), (~follows).cumsum(0)))  # rows of one unbroken run have one number
    last = torch.arange(count, device=slots.device) + group - 1
    begins &= (last < count) & (breaks[last.clamp(max=count - 1)] == breaks)
    first = torch.where(begins, torch.arange(count, device=slots.device), count).sort().values[:wanted]
    return begins, first


def _need_rows(pages: GqaPages, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    """What reshape_and_cache checks, of rows that have codes in one place and themselves in another."""
    assert pages.full is not None
    op = ops.get("reshape_and_cache")
    op.validate(op.bind((key, value), {"slot_mapping": slot_mapping, **pages.full.pages.arguments}))
    if slot_mapping.device.type == "cpu":
        _checks.slots_within("slot_mapping", slot_mapping, pages.key_cache)


def _need_all_written(slots: Tensor, in_full: Tensor, begins: Tensor, group: int) -> None:
    begun = begins.cumsum(0)
    covered = begun.clone()  # groups that began in the last `group` rows: 0 or 1
    covered[group:] -= begun[:-group]
    lost = (slots >= 0) & ~in_full & (covered == 0)
    if bool(lost.any()):
        raise ArgumentError(
            f"write holds {int(lost.sum())} keys of groups of {group} tokens that it does not hold whole, and they are "
            f"outside the recent window; int4 codes whole groups: write all rows of an append in one call"
        )
