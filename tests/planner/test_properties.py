"""What must hold for any model, scheme and size."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbackend.planner import Plan, plan
from kvbackend.planner.configs import builtin_names

# An engine's own models with schemes that each kind of attention can have.
SCHEMES = {
    "gqa": ["native", "fp8_e4m3", "int8", "int4", "int4:64,recent=70,sinks=4", "int8/int4", "nvfp4,keep=1000",
            "bf16,keep=30%,recent=16", "mxfp4,ratios=1/2,recent=8", "bf16,0=fp32"],
    "mla": ["native", "v32_fp8_656", "v32_nvfp4_352,recent=64", "fp8_e4m3,keep=500", "mxfp4"],
    "mla+dsa": ["native", "bf16", "v32_nvfp4_352", "native,keep=3000,recent=64"],
    "v4_hybrid": ["native", "bf16", "v4_fp8_640_ascend", "v4_fp8_584+index_fp8_132"],
    "v41_csa2": ["native", "bf16", "v41_fp8_528", "v41_fp4_288_planar", "v4_fp8_584"],
}  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    made = plan(draw(st.sampled_from([name for name in builtin_names() if name != "llama-2-7b"])))
    kind = made.model.attention
    block = draw(st.sampled_from([made.model.block_size * 4, 256, 512]))
    scheme = draw(st.sampled_from(SCHEMES[kind]))
    if "ratios" in scheme and len(made.model.layers) % 2:
        scheme = "bf16"
    return plan(made.model, kv_format=scheme, block_size=block)


tokens = st.integers(0, 1 << 20)


@settings(max_examples=30, deadline=None)
@given(plans(), tokens, st.integers(0, 5000))
def test_more_tokens_never_cost_less(made: Plan, count: int, more: int) -> None:
    assert made.bytes_at(count) <= made.bytes_at(count + more)
    assert made.allocated_bytes_at(count) <= made.allocated_bytes_at(count + more)
    read = made.cache.read_bytes_at(count + more)
    assert made.cache.read_bytes_at(count) <= read + most_saved_by_choice(made)


def most_saved_by_choice(made: Plan) -> int:
    """Of selected rows the smallest are read: where the last tokens are kept in full besides, more tokens to select
    from may leave those out. Nothing else is saved."""
    saved = 0
    for layer in made.cache.layers:
        for parts, limit in layer.read:
            least = min((part.row_bytes for part in parts), default=0)
            if limit is not None:
                saved += sum((part.limit or 0) * (part.row_bytes - least) for part in parts)
    return saved


def test_more_tokens_to_select_from_may_cost_less() -> None:
    """By 64 rows in bfloat16 (1152 bytes) that are read as FP8 (656) in each of the 78 layers, less the index keys."""
    cache = plan("glm-5", kv_format="native,keep=3000,recent=64", block_size=256).cache
    assert cache.read_bytes_at(2048) - cache.read_bytes_at(2112) == 78 * 64 * (1152 - 656 - 132)


@settings(max_examples=30, deadline=None)
@given(plans(), tokens)
def test_pages_hold_the_records_and_waste_less_than_a_page_per_list(made: Plan, count: int) -> None:
    waste = made.allocated_bytes_at(count) - made.bytes_at(count)
    padding = sum(
        (part.page_bytes - part.page_rows * part.row_bytes) * part.pages_at(count)
        for layer in made.cache.layers
        for part in layer.stored
    )
    pages = sum(part.page_bytes for layer in made.cache.layers for part in layer.stored)
    assert 0 <= waste < padding + pages + 1


@settings(max_examples=30, deadline=None)
@given(plans(), st.integers(1 << 14, 1 << 20))
def test_bytes_are_fixed_plus_per_token_once_windows_are_full(made: Plan, count: int) -> None:
    if isinstance(made.scheme.keep, Fraction):
        return  # a share of the tokens is rounded down
    count -= count % 128
    assert made.bytes_at(count) == made.fixed_bytes_per_sequence + made.bytes_per_token * count


@settings(max_examples=30, deadline=None)
@given(plans(), st.integers(1, 1 << 12))
def test_whole_blocks_cost_allocated_bytes_per_token(made: Plan, blocks: int) -> None:
    growing = [part for layer in made.cache.layers for part in layer.stored if part.limit is None]
    if any(part.share != 1 for part in growing):
        return
    assert sum(part.page_bytes for part in growing) == made.allocated_bytes_per_token * made.cache.block_size
    assert made.cache.pool_bytes(blocks) == made.allocated_bytes_per_token * made.cache.block_size * blocks


@settings(max_examples=30, deadline=None)
@given(plans(), st.sampled_from([1, 2, 4, 8]))
def test_layers_sum_to_the_model(made: Plan, stages: int) -> None:
    assert sum(layer.per_token for layer in made.cache.layers) == made.bytes_per_token
    cuts = made.model.stages(min(stages, 4))
    assert [index for stage in cuts for index in stage] == list(range(len(made.model.layers)))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["llama-3-8b", "deepseek-v3", "deepseek-v4-flash"]), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_tensor_parallel_devices_sum_to_the_whole_and_what_is_replicated(model: str, devices: int) -> None:
    made = plan(model, tensor_parallel=devices)
    assert devices * made.device_bytes_per_token == made.bytes_per_token + made.replicated_bytes_per_token
    kv_heads = made.model.layers[0].keeps[0].vectors[0].heads
    copies = max(1, devices // kv_heads)
    assert made.replicated_bytes_per_token == (copies - 1) * made.bytes_per_token


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 8192), st.integers(20, 400))
def test_fitting_agrees_with_adding_up(sequences: int, context: int, memory_gib: int) -> None:
    made = plan("llama-3-8b", memory=f"{memory_gib}GiB", sequences=sequences, context=context)
    (stage,) = made.stages
    each = made.allocated_bytes_at(context)
    assert made.max_sequences is not None
    assert made.max_sequences * each <= max(stage.available_bytes, 0) < (made.max_sequences + 1) * each
    assert made.fits == (sequences * each <= stage.available_bytes)
    assert made.shortfall_at(context) == max(0, sequences * each - stage.available_bytes)
    longest = made.max_context_by_memory
    assert longest is not None
    assert longest == 0 or sequences * made.allocated_bytes_at(longest) <= stage.available_bytes
    assert sequences * made.allocated_bytes_at(longest + 1) > stage.available_bytes


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 4096))
def test_sequences_are_linear(layers: int, heads: int, count: int) -> None:
    config = {"num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": 64, "dtype": "bfloat16"}
    one = plan(config, memory="64GiB", context=count, sequences=1)
    many = plan(config, memory="64GiB", context=count, sequences=7)
    available = one.stages[0].available_bytes
    assert many.shortfall_at(count) == max(0, 7 * one.allocated_bytes_at(count) - available)
