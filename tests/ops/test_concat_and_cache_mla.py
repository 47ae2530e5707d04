"""Writing MLA rows against a plain loop over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbackend import ArgumentError, explain, use
from kvbackend.ops import concat_and_cache_mla

RANK, ROPE = 6, 2


def fused(num_blocks: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages with a margin that no op may touch, and their latent and rotary slices."""
    pages = torch.full((num_blocks, block_size, 1 + RANK + ROPE + 1), torch.nan)
    return pages, pages[..., 1 : 1 + RANK], pages[..., 1 + RANK : -1]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(data=st.data(), num_blocks=st.integers(1, 5), block_size=st.sampled_from([1, 3, 4]))
def test_equals_a_loop_over_tokens(data, num_blocks, block_size):
    capacity = num_blocks * block_size
    used = data.draw(st.lists(st.integers(0, capacity - 1), unique=True, max_size=capacity))
    slots = list(data.draw(st.permutations(used + [-1] * data.draw(st.integers(0, 3)))))
    index = data.draw(st.sampled_from([torch.int32, torch.int64]))
    num_tokens = len(slots) + data.draw(st.integers(0, 2))  # tokens beyond the slots are graph padding
    ckv = torch.arange(num_tokens * RANK, dtype=torch.float32).reshape(num_tokens, RANK)
    kpe = -torch.arange(num_tokens * ROPE, dtype=torch.float32).reshape(num_tokens, ROPE)

    want, ckv_part, kpe_part = fused(num_blocks, block_size)
    for token, slot in enumerate(slots):
        if slot != -1:
            ckv_part[slot // block_size, slot % block_size] = ckv[token]
            kpe_part[slot // block_size, slot % block_size] = kpe[token]
    got, ckv_part, kpe_part = fused(num_blocks, block_size)
    concat_and_cache_mla.reference(ckv, kpe, ckv_part, kpe_part, torch.tensor(slots, dtype=index))
    assert same_bytes(got, want)


def test_padding_does_not_reach_the_last_slot():
    """As a Python index -1 would be the last row of the last block."""
    pages, ckv_part, kpe_part = fused(2, 16)
    pages.copy_(torch.arange(pages.numel()).reshape(pages.shape))
    before = pages.clone()
    rows = torch.full((3, RANK), 7.0), torch.full((3, ROPE), 7.0)
    concat_and_cache_mla.reference(*rows, ckv_part, kpe_part, torch.tensor([-1, 3, -1]))
    before[0, 3, 1:-1] = 7.0
    assert same_bytes(pages, before)


def test_nan_rows_are_written_and_skipped_ones_are_not():
    pages, ckv_part, kpe_part = fused(2, 2)
    pages.zero_()
    ckv, kpe = torch.zeros(2, RANK), torch.zeros(2, ROPE)
    ckv[0], kpe[1] = torch.nan, torch.inf
    concat_and_cache_mla.reference(ckv, kpe, ckv_part, kpe_part, torch.tensor([2, -1]))
    assert ckv_part[1, 0].isnan().all()
    assert pages.isfinite().sum() == pages.numel() - RANK


def test_blocks_beyond_two_to_the_31_elements():
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)  # only the touched pages of it become real
    cache = storage.as_strided((2, 2, 16), (2**31, 16, 1))
    cache.zero_()
    ckv, kpe = torch.ones(1, 12, dtype=torch.bfloat16), torch.full((1, 4), 2.0, dtype=torch.bfloat16)
    call = dict(ckv=ckv, kpe=kpe, ckv_cache=cache[..., :12], kpe_cache=cache[..., 12:], slot_mapping=torch.tensor([3]))
    for verdict in explain(concat_and_cache_mla, **call).backends:
        if verdict.status != "refused":
            cache.zero_()
            with use(verdict.name):
                concat_and_cache_mla(**call)
            assert storage[2**31 + 16 : 2**31 + 32].tolist() == [1.0] * 12 + [2.0] * 4, verdict.name
            assert cache.sum() == 20, verdict.name


def call(**change: object) -> dict[str, object]:
    _, ckv_cache, kpe_cache = fused(2, 4)
    rows = dict(ckv=torch.zeros(3, RANK), kpe=torch.zeros(3, ROPE))
    return dict(rows, ckv_cache=ckv_cache, kpe_cache=kpe_cache, slot_mapping=torch.tensor([0, -1, 5])) | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kpe=torch.zeros(4, ROPE)), r"kpe .*has T = 4; it must be 3, the T of ckv"),
        (dict(ckv=torch.zeros(3, 5)), "ckv_cache holds rows of 6 numbers in format auto; ckv needs 5"),
        (dict(kpe_cache=torch.zeros(2, 5, ROPE)), "kpe_cache .*has bs = 5; it must be 4"),
        (dict(slot_mapping=torch.zeros(4, dtype=torch.int64)), "slot_mapping .*has T = 4; it must be at most 3"),
        (dict(slot_mapping=torch.zeros(3)), "slot_mapping is torch.float32"),
        (dict(kpe=torch.zeros(3, ROPE, dtype=torch.float16)), "kpe is torch.float16 but ckv is torch.float32"),
        (dict(kv_format="fp16"), "ckv_cache is torch.float32; kv_format 'fp16' reads torch.float16"),
        (dict(kv_format="int3"), "kv_format is 'int3'; it must be one of fp32"),
        (dict(k_scale=torch.ones(1)), "k_scale is given but kv_format 'auto' has no scale"),
        (dict(ckv=torch.zeros(3, RANK, device="meta")), "kpe is on cpu but ckv is on meta"),
    ],
)
def test_refuses_before_any_write(change, message):
    arguments = call(**change)
    with pytest.raises(ArgumentError, match=message):
        concat_and_cache_mla(**arguments)
    assert arguments["ckv_cache"].isnan().all()


@pytest.mark.parametrize("slot", [8, -2])
def test_values(slot, monkeypatch):
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    arguments = call(slot_mapping=torch.tensor([0, slot]))
    message = rf"slot_mapping holds slot {slot} at index 1; it must be in \[-1, 8\)"
    with use("reference"), pytest.raises(ArgumentError, match=message):
        concat_and_cache_mla(**arguments)
    assert arguments["ckv_cache"].isnan().all()
