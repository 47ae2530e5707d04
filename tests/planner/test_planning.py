"""What fits: memory, weights, devices, and the bound on a decode step."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvbackend.errors import ArgumentError
from kvbackend.planner import plan
from kvbackend.planner.memory import GIB, Parallel, device_names, find_device, parse_bytes, parse_count

SHAPE = {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("80GB", 80 * 10**9), ("80 g", 80 << 30), ("1.5MiB", 3 << 19), ("2TB", 2 * 10**12),
     ("1048576", 1 << 20), (1 << 30, 1 << 30), ("1e12", 10**12)],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text, "memory") == size


@pytest.mark.parametrize("text", ["80", "-1GiB", "0", "", "many", "80XB", "GiB", 0, -5])
def test_sizes_that_make_no_sense(text: str | int) -> None:
    with pytest.raises(ArgumentError, match="memory is"):
        plan(SHAPE, memory=text)


def test_counts() -> None:
    assert parse_count("8B", "parameters") == 8 * 10**9
    assert parse_count("135M", "parameters") == 135 * 10**6
    with pytest.raises(ArgumentError, match="parameters is"):
        parse_count("8GiB", "parameters")


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_a_memory_and_a_dated_source(name: str) -> None:
    found = find_device(name)
    assert 16 * GIB <= found.memory_bytes <= 512 * GIB
    assert "2026" in found.source
    assert found.kind in ("gpu", "npu", "cpu", "shared")


def test_devices_by_alias_and_in_any_case() -> None:
    assert find_device("910b") == find_device("910b2")
    assert find_device("H200") == find_device("h200")
    with pytest.raises(ArgumentError, match="h200"):
        find_device("h300")


def test_memory_is_what_the_parts_leave() -> None:
    made = plan("llama-3-8b", memory="80GiB")
    (stage,) = made.stages
    assert made.reserved_bytes == 8 * GIB
    assert made.activation_bytes == 4 * GIB
    assert stage.weights_bytes == 2 * 8030261248
    assert stage.available_bytes == 68 * GIB - 2 * 8030261248
    assert made.max_sequences == stage.available_bytes // GIB == 53
    assert made.fits is True


def test_margin_and_activations_are_the_callers_to_choose() -> None:
    made = plan("llama-3-8b", memory="80GiB", margin=0.25, activations="1GiB", weights=0)
    assert made.stages[0].available_bytes == 59 * GIB
    for margin in (-0.1, 1, 7):
        with pytest.raises(ArgumentError, match="margin is"):
            plan("llama-3-8b", margin=margin)


def test_scales_that_a_cache_has_once_take_memory_too() -> None:
    per_head = plan(SHAPE, memory="80GiB", kv_format="fp8_e4m3:head").stages[0].available_bytes
    assert plan(SHAPE, memory="80GiB").stages[0].available_bytes - per_head == 32 * 2 * 8 * 4


def test_a_cpu_host_keeps_8_to_16_gib_for_its_system() -> None:
    kept = [plan(SHAPE, device=f"cpu-{gb}gb").reserved_bytes / GIB for gb in (32, 64, 128, 256)]
    assert kept == [8, 8, 16, 16]


def test_a_host_that_would_swap_is_warned_about() -> None:
    fitting = plan(SHAPE, device="cpu-64gb", sequences=52)
    assert fitting.fits
    assert not any("swap:" in note for note in fitting.notes)
    swapping = plan(SHAPE, device="cpu-64gb", sequences=53)
    assert swapping.fits is False
    assert any("would swap: 0.2 GiB" in note for note in swapping.notes)


def test_weights_by_parameters_dtype_and_experts() -> None:
    flash = plan("deepseek-v4-flash").weights
    assert flash is not None
    experts = 256 * 3 * 4096 * 2048 * 43
    assert flash.experts == experts * 17 // 32
    assert flash.total == flash.experts + 284 * 10**9 - experts
    assert flash.active == flash.total * 13 // 284
    given = plan(SHAPE, memory="80GiB", parameters="8B", weights_dtype="fp8").weights
    assert given is not None
    assert (given.total, given.active) == (8 * 10**9, 8 * 10**9)
    assert plan("llama-3-8b", weights="10GiB").weights.total == 10 * GIB  # type: ignore[union-attr]


def test_unknown_weights_are_said_not_guessed() -> None:
    for made in (plan(SHAPE, memory="80GiB"), plan("deepseek-v4-pro", memory="80GiB")):
        assert made.weights is None
        assert any("weights are not counted" in note for note in made.notes)


def test_a_memory_smaller_than_the_weights_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"h100 is 79\.6 GiB; the weights of llama-3-70b take 131\.4 GiB"):
        plan("llama-3-70b", device="h100")
    assert plan("llama-3-70b", device="h100", tensor_parallel=2).max_sequences == 1


def test_nothing_fits_is_an_answer_with_the_shortfall() -> None:
    made = plan("llama-3-8b", memory="16GiB", context=8192)
    assert (made.fits, made.max_sequences, made.max_context) == (False, 0, 0)
    assert made.shortfall_at(8192) == GIB - made.stages[0].available_bytes
    assert made.vllm is None


def test_the_longest_context_ends_at_the_model() -> None:
    made = plan("llama-3-8b", memory="80GiB")
    assert made.max_context == 8192
    assert made.max_context_by_memory == made.stages[0].available_bytes // (16 * 131072) * 16
    forever = plan(SHAPE, kv_format="bf16,keep=1000", memory="80GiB")
    assert forever.max_context is None


def test_experts_spread_wider_than_attention() -> None:
    made = plan("deepseek-v3", device="h200", expert_parallel=32, context=1 << 17)
    experts, dense = 256 * 3 * 7168 * 2048 * 58, 671 * 10**9 - 256 * 3 * 7168 * 2048 * 58
    assert made.stages[0].weights_bytes == -(-(dense * 32 + experts) // 32)
    assert made.parallel.devices == made.parallel.replicas == 32
    assert made.max_sequences == 32 * (made.stages[0].available_bytes // (70272 << 17))
    with pytest.raises(ArgumentError, match="expert_parallel is 4"):
        plan("llama-3-8b", expert_parallel=4)


def test_pipeline_stages() -> None:
    made = plan("llama-3-8b", memory="80GiB", pipeline_parallel=3)
    assert [len(stage.cache.layers) for stage in made.stages] == [10, 11, 11]
    assert sum(stage.cache.per_token for stage in made.stages) == made.bytes_per_token
    assert made.max_sequences == min(stage.available_bytes // (11 * 4096 * 8192) for stage in made.stages[1:])


def test_v41_is_cut_where_a_source_begins() -> None:
    halves = plan("deepseek-v4.1-flash", pipeline_parallel=2)
    assert [len(stage.cache.layers) for stage in halves.stages] == [20, 20]
    assert [stage.cache.per_token for stage in halves.stages] == [Fraction(3 * 356, 2), 356]
    six = plan("deepseek-v4.1-flash", pipeline_parallel=6)
    assert [stage.cache.layers[0].index for stage in six.stages] == [0, 1, 2, 8, 14, 20]
    with pytest.raises(ArgumentError, match="6 stages at most"):
        plan("deepseek-v4.1-flash", pipeline_parallel=7)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel is 3"),
        ({"tensor_parallel": 64}, "tensor_parallel is 64"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"pipeline_parallel": 0}, "pipeline_parallel is 0"),
        ({"pipeline_parallel": 33}, "32 stages at most"),
        ({"tensor_parallel": 2, "expert_parallel": 3}, "one must divide the other"),
        ({"context": 0}, "context is 0"),
        ({"sequences": -1}, "sequences is -1"),
        ({"bandwidth": "3TB"}, "without a memory"),
        ({"device": "h300"}, "'h300'"),
        ({"weights_dtype": "fp7"}, "'fp7'"),
        ({"parameters": "0"}, "parameters is '0'"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        plan("llama-3-8b", **arguments)  # type: ignore[arg-type]


def test_odd_kv_heads_and_tensor_parallel() -> None:
    config = SHAPE | {"num_key_value_heads": 6, "num_attention_heads": 48}
    assert plan(config, tensor_parallel=12).replicated_bytes_per_token == plan(config).bytes_per_token
    with pytest.raises(ArgumentError, match="6 key heads"):
        plan(config, tensor_parallel=4)


def test_a_second_tier_in_host_memory() -> None:
    made = plan("llama-3-8b", memory="80GiB", host_memory="100GiB", tensor_parallel=2)
    assert made.host_sequences == 100


def test_the_decode_bound_is_bytes_over_bandwidth() -> None:
    made = plan("llama-3-8b", memory="80GiB", bandwidth="1000GB", sequences=4)
    seconds = (2 * 8030261248 + 4 * GIB) / 1e12
    assert made.decode_bound_us == pytest.approx(seconds * 1e6)
    assert plan("llama-3-8b", memory="80GiB").decode_bound_us is None
    mixture = SHAPE | {"num_local_experts": 8}  # how many of its parameters are active is unknown
    assert plan(mixture, memory="80GiB", bandwidth="1000GB", parameters="8B").decode_bound_us is None


def test_vllm_words() -> None:
    words = plan("llama-3-8b", memory="80GiB", context=4096).vllm
    assert words is not None
    assert (words["max_num_seqs"], words["max_model_len"], words["gpu_memory_utilization"]) == (106, 4096, 0.9)


def test_a_context_beyond_the_model_is_noted() -> None:
    assert any("8192 tokens" in note for note in plan("llama-3-8b", context=9000).notes)


def test_devices_count() -> None:
    assert Parallel(2, 3, 8).devices == 2 * 3 * 4
    assert Parallel(8, 1, 2).devices == 8
