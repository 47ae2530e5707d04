"""How fast ops could be at most on an Ascend NPU that nobody here has: a prediction from bytes and operations.

An op takes as long as the slowest of three takes for its part: memory for the bytes, the cube cores for matrix
products, the vector cores for the rest. What the chips can do stands in npus.json, with sources. No torch, no device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..planner.memory import find_device

SEQUENCES, CONTEXT, PREFILL, BLOCK = 32, 8192, 4096, 128
HEADS, KV_HEADS, DIM = 32, 8, 128
MLA_HEADS, RANK, ROPE, NOPE, HIDDEN = 128, 512, 64, 128, 7168
INDEX_HEADS, INDEX_DIM, TOPK = 64, 128, 2048
SHARED_HEADS, SHARED_DIM, WINDOW, ENTRIES = 64, 512, 128, 512
BF16, FP32, INT64 = 2, 4, 8  # bytes
SOFTMAX, CHOICE = 5, 8  # operations a score
LOW_RANK, KEPT, PARTS, PAGE = 64, 1024, 4, 16

ASSUMPTIONS = (
    f"bf16; decode of {SEQUENCES} sequences of {CONTEXT} tokens, or a prefill of {PREFILL} tokens of one; a GQA layer "
    f"of {HEADS} query and {KV_HEADS} kv heads of {DIM}, an MLA layer of {MLA_HEADS} heads with rows of {RANK} + "
    f"{ROPE}, an indexer of {INDEX_HEADS} heads of {INDEX_DIM} that chooses {TOPK}, shared key-values of {SHARED_DIM} "
    f"for {SHARED_HEADS} heads with a window of {WINDOW} and {ENTRIES} chosen entries; {KEPT} tokens that a GQA layer "
    f"chose or kept, pages of {PAGE}; blocks of {BLOCK} tokens",
    "each byte crosses the memory once, and all three units work at their peak, at the same time, spread evenly over "
    "all cores: nothing is faster, unless its bytes lie in L2 already. Launches, tails, and what cube and vector cores "
    "hand each other are not counted",
    "the vector cores compute in float32, at half of their published fp16 rate; a softmax takes "
    f"{SOFTMAX} operations a score, a choice of the best {CHOICE} (four passes over the bits)",
)

KV_ROW = 2 * KV_HEADS * DIM * BF16  # bytes of a token's keys and values
MLA_ROW = (RANK + ROPE) * BF16
LEFT_OUT = {"swap_blocks": "its bound is the link to the host, which is not the chip's"}


@dataclass(frozen=True)
class Npu:
    """What a chip can do: bytes and operations a second, and the bytes of its L2."""

    name: str
    memory: float
    cube: float
    vector: float
    l2_bytes: int


@dataclass(frozen=True)
class Work:
    """What one call has to do."""

    op: str
    case: str
    moved_bytes: int  # read and written, each once
    cube: int = 0  # multiplications and additions in matrix products
    vector: int = 0  # other operations


@dataclass(frozen=True)
class Prediction:
    """The least time of one call, and what bounds it."""

    op: str
    case: str
    moved_bytes: int
    cube: int
    vector: int
    memory_us: float
    cube_us: float
    vector_us: float
    predicted_us: float
    bound: str  # "memory", "cube" or "vector"
    fits_l2: bool  # then its bytes may come faster than from memory

    def to_dict(self) -> dict[str, Any]:
        """As the command prints it with --json."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


@cache
def table() -> dict[str, Any]:
    """npus.json."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("npus.json").read_text("utf-8"))
    return found


def find(name: str) -> Npu:
    """A chip by the name that torch_npu.npu.get_device_name() gives, in any case; ArgumentError lists all."""
    socs = table()["socs"]
    soc = socs.get(name.lower())
    if soc is None:
        raise ArgumentError(
            f"--model is {name!r}; cores and bandwidth are known of {', '.join(socs)}: choose one of these"
        )
    family, cycles = table()["families"][soc["family"]], soc["cube_cores"] * soc["mhz"] * 1e6
    published = find_device(soc["device"]).bandwidth
    assert published is not None
    highest = max(other.get("ddr_rate", 1) for other in socs.values() if other["device"] == soc["device"])
    return Npu(
        name.lower(),
        memory=float(published * soc.get("ddr_rate", 1) / highest),
        cube=cycles * family["cube_flops_per_cycle"],
        vector=2 * cycles * family["vector_flops_per_cycle"] / 2,  # two cores beside each cube core; half: float32
        l2_bytes=soc["l2_mib"] << 20,
    )


def predict(npu: Npu, work: Work) -> Prediction:
    """The roofline: the slowest of memory, cube and vector cores."""
    times = {
        "memory": work.moved_bytes / npu.memory * 1e6,
        "cube": work.cube / npu.cube * 1e6,
        "vector": work.vector / npu.vector * 1e6,
    }
    bound = max(times, key=lambda unit: times[unit])
    return Prediction(
        **asdict(work), memory_us=times["memory"], cube_us=times["cube"], vector_us=times["vector"],
        predicted_us=times[bound], bound=bound, fits_l2=work.moved_bytes <= npu.l2_bytes,
    )  # fmt: skip


def predictions(npu: Npu, names: Iterable[str]) -> list[Prediction]:
    """Of these ops, in the order of `works`."""
    chosen = set(names)
    return [predict(npu, work) for work in works() if work.op in chosen]


def works() -> Iterator[Work]:
    """The calls that are predicted: one of each op, and a prefill where that is another matter."""
    new, tokens = SEQUENCES, PREFILL
    scores = SEQUENCES * HEADS * CONTEXT  # of one decode step of a GQA layer
    pairs = tokens * (tokens + 1) // 2  # that a causal prefill has
    numbers = tokens * KV_HEADS * DIM
    kept = SEQUENCES * CONTEXT  # tokens in the cache

    yield Work("reshape_and_cache", "prefill", tokens * (2 * KV_ROW + INT64))
    yield Work("concat_and_cache_mla", "prefill", tokens * (2 * MLA_ROW + INT64))
    yield Work("store_rows", "prefill", tokens * (2 * SHARED_DIM * BF16 + INT64))
    yield Work("gather_cache", "one sequence's keys", CONTEXT * KV_ROW)  # half of a row, read and written
    yield Work("copy_blocks", "64 blocks of keys", 64 * BLOCK * KV_ROW)
    queries = new * HEADS * DIM * BF16
    yield Work("paged_attention", "decode", kept * KV_ROW + 2 * queries, 4 * scores * DIM, SOFTMAX * scores)
    yield Work(
        "paged_attention", "prefill", tokens * KV_ROW + 2 * tokens * HEADS * DIM * BF16, 4 * HEADS * pairs * DIM,
        SOFTMAX * HEADS * pairs,
    )  # fmt: skip
    for op, seen in (("mla_attention", CONTEXT), ("sparse_mla_attention", TOPK)):
        logits = new * MLA_HEADS * seen
        moved = new * seen * MLA_ROW + new * MLA_HEADS * (2 * RANK + ROPE) * BF16
        yield Work(op, "decode", moved, 2 * logits * (2 * RANK + ROPE), SOFTMAX * logits)
    seen = WINDOW + ENTRIES
    logits = new * SHARED_HEADS * seen
    moved = (new * seen + 2 * new * SHARED_HEADS) * SHARED_DIM * BF16
    yield Work("shared_kv_attention", "decode", moved, 4 * logits * SHARED_DIM, SOFTMAX * logits)
    keys, products = kept * INDEX_DIM * BF16, 2 * INDEX_HEADS * kept * INDEX_DIM
    weighed = 3 * INDEX_HEADS * kept  # relu, times weight, sum
    yield Work("indexer_logits", "decode", keys + kept * FP32, products, weighed)
    yield Work("topk_indices", "decode", kept * FP32 + new * TOPK * 4, 0, CHOICE * kept)
    yield Work("lightning_indexer", "decode", keys + new * TOPK * 4, products, weighed + CHOICE * kept)
    yield Work("candidate_blocks", "decode", keys + new * TOPK * 4, products, weighed + kept + CHOICE * kept // 8)
    pages = SEQUENCES * CONTEXT // PAGE  # with a smallest and a largest key each: two products
    yield Work("page_logits", "decode", pages * (KV_ROW + KV_HEADS * FP32), 4 * pages * HEADS * DIM)
    chosen = SEQUENCES * KEPT
    moved = chosen * KV_HEADS * (DIM * BF16 + FP32)
    yield Work("token_logits", "decode", moved, 2 * chosen * HEADS * DIM)
    moved = chosen * KV_ROW + 2 * queries
    yield Work("sparse_attention", "decode", moved, 4 * chosen * HEADS * DIM, SOFTMAX * chosen * HEADS)
    for op, inputs, outputs in (("absorb_q", NOPE, RANK), ("project_out", RANK, NOPE)):
        moved = MLA_HEADS * (NOPE * RANK + new * (NOPE + RANK)) * BF16
        yield Work(op, "decode", moved, 2 * new * MLA_HEADS * inputs * outputs)
    moved = (HIDDEN * (RANK + ROPE) + new * (HIDDEN + RANK + ROPE)) * BF16
    yield Work("mla_project_kv", "decode", moved, 2 * new * HIDDEN * (RANK + ROPE))
    for op in ("lowrank_project", "lowrank_reconstruct"):
        moved = KV_HEADS * (tokens * (DIM + LOW_RANK) + DIM * LOW_RANK) * BF16
        yield Work(op, "prefill", moved, 2 * numbers * LOW_RANK)
    turned = tokens * HEADS * DIM
    yield Work("apply_rope", "prefill", 2 * turned * BF16, 0, 3 * turned)
    merged = new * HEADS * DIM
    yield Work("merge_attn_states", "4 parts", (PARTS + 1) * merged * BF16, 0, 3 * PARTS * merged)
    yield Work("quantize_kv", "prefill, fp8", numbers * (BF16 + 1), 0, 4 * numbers)  # abs, max, times, convert
    yield Work("dequantize_kv", "prefill, fp8", numbers * (1 + BF16), 0, 2 * numbers)
    yield Work("transcode", "prefill, 656 bytes", 2 * tokens * 656)
    pooled = 2 * tokens * SHARED_DIM  # kv and gate have two halves where groups overlap
    moved = (2 * pooled + tokens // 4 * SHARED_DIM) * BF16
    yield Work("compress_kv", "prefill, ratio 4", moved, 0, SOFTMAX * pooled)
    read = kept * KV_ROW // 2
    summed = 2 * SEQUENCES * KV_HEADS * CONTEXT * FP32
    yield Work("accumulate_scores", "decode", read + summed, 2 * scores * DIM, (SOFTMAX + 1) * scores)
    scored = SEQUENCES * KV_HEADS * CONTEXT
    yield Work("select_tokens", f"{KEPT} of {CONTEXT}", scored * FP32, 0, CHOICE * scored)
    yield Work("compact_cache", f"{KEPT} tokens", 2 * SEQUENCES * KEPT * KV_ROW)
