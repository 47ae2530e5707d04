"""How a token's bytes read: the one table of KV formats and of record layouts. Standard library only.

A *format* says how the numbers of a split cache `[num_blocks, block_size, kv_heads, head_dim]` are stored: codes, and
scales at some granularity, kept in tensors of their own. A *record* packs one row's codes, scales and rotary dims
together into `uint8` pages `[num_blocks, page_bytes]`.

Sources: OCP Microscaling Formats (MX) 1.0; KIVI (arXiv 2402.02750); NVIDIA NVFP4; DeepSeek-V4.1 (arXiv 2609.19969);
the cache layouts of FlashMLA, vLLM 0.33, SGLang 0.5.23 and vllm-ascend.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from .errors import ArgumentError

# Bytes of one element of the torch dtypes that caches use, by name. 4-bit codes travel in uint8, two in a byte.
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True)
class KVFormat:
    """How the numbers of one split cache are stored.

    bits          bits of one code
    storage       torch dtype of the code pages, by name; "uint8" holds two 4-bit codes, even channel in the low nibble
    granularity   what one scale covers: "none", "tensor", "head", "channel" (of one head), "token_head" (one token
                  of one head), "group" (`group` neighbouring channels of one token and head) or "kivi" (keys:
                  `group` tokens of one channel; values: `group` channels of one token)
    group         members of a group, else None
    rule          how the scale comes from the largest magnitude (amax) it covers
    scale_dtype   torch dtype of a scale, by name, else None
    scale_parts   numbers per scale: 2 where a zero point comes with it
    global_scale  one float32 for the whole tensor besides the scales
    choices       granularities and group sizes that `get` takes after a colon; the first is the default
    """

    name: str
    bits: int
    storage: str
    granularity: str = "none"
    group: int | None = None
    rule: str = "none"
    scale_dtype: str | None = None
    scale_parts: int = 1
    global_scale: bool = False
    choices: tuple[str, ...] = ()
    note: str = ""

    @property
    def quantized(self) -> bool:
        """True if codes need a scale to be read."""
        return self.scale_dtype is not None

    def __str__(self) -> str:
        """The string that `get` turns back into this format."""
        choice = str(self.group) if self.group else self.granularity
        return self.name if not self.choices or choice == self.choices[0] else f"{self.name}:{choice}"

    def code_bytes_per_token(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one token's codes in one of the two caches (K or V), one layer."""
        _need_sizes(kv_heads, head_dim)
        if head_dim * self.bits % 8:
            raise ArgumentError(
                f"head_dim is {head_dim}; {self} packs {8 // self.bits} codes into a byte, so head_dim "
                f"must be a multiple of that: pad head_dim or choose a format of 8 bits or more"
            )
        return kv_heads * head_dim * self.bits // 8

    def scale_bytes_per_token(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of the scales that come with every token; KIVI's key scales, which span tokens, at a token's share."""
        _need_sizes(kv_heads, head_dim)
        if self.granularity == "token_head":
            return kv_heads * self._bytes_per_scale
        if self.group is None:
            return 0
        if head_dim % self.group:
            raise ArgumentError(
                f"head_dim is {head_dim}; {self} needs a multiple of its group of {self.group} channels: "
                f"choose {self._alternatives(head_dim)}"
            )
        return kv_heads * head_dim // self.group * self._bytes_per_scale

    def bytes_per_token(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one token in one of the two caches (K or V) of one layer: codes and scales."""
        return self.code_bytes_per_token(kv_heads, head_dim) + self.scale_bytes_per_token(kv_heads, head_dim)

    def fixed_scale_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of the scales that one layer's cache has once, however many tokens it holds."""
        _need_sizes(kv_heads, head_dim)
        covered = {"tensor": 1, "head": kv_heads, "channel": kv_heads * head_dim}.get(self.granularity, 0)
        return covered * self._bytes_per_scale + 4 * self.global_scale

    @property
    def _bytes_per_scale(self) -> int:
        return DTYPE_BYTES[self.scale_dtype] * self.scale_parts if self.scale_dtype else 0

    def _alternatives(self, head_dim: int) -> str:
        fitting = [
            f"{self.name}:{choice}" for choice in self.choices if not choice.isdigit() or head_dim % int(choice) == 0
        ]
        return _listed(fitting or ["bf16", "int8", "fp8_e4m3"])


_FP8_CHOICES = ("tensor", "head", "token_head", "channel", "16", "32", "64", "128")
_FP4_CHOICES = ("16", "32", "64", "128", "channel", "tensor")

# fmt: off
_FORMATS = {
    entry.name: entry
    for entry in (
        KVFormat("fp32", 32, "float32"),
        KVFormat("fp16", 16, "float16"),
        KVFormat("bf16", 16, "bfloat16"),
        KVFormat("fp8_e4m3", 8, "float8_e4m3fn", "tensor", None, "amax", "float32", choices=_FP8_CHOICES),
        KVFormat("fp8_e5m2", 8, "float8_e5m2", "tensor", None, "amax", "float32", choices=_FP8_CHOICES),
        KVFormat("int8", 8, "int8", "token_head", None, "amax", "float32", choices=("token_head",)),
        KVFormat(
            "int4", 4, "uint8", "kivi", 32, "min_max", "float16", scale_parts=2, choices=("32", "64", "128"),
            note="KIVI: a key's open group of tokens stays in full precision; block_size is a multiple of the group",
        ),
        KVFormat("mxfp8", 8, "float8_e4m3fn", "group", 32, "ocp_floor", "float8_e8m0fnu", choices=("32",)),
        KVFormat("mxfp4", 4, "uint8", "group", 32, "ocp_floor", "float8_e8m0fnu", choices=("32",)),
        KVFormat(
            "nvfp4", 4, "uint8", "group", 16, "e4m3", "float8_e4m3fn", global_scale=True, choices=("16",),
            note="the global scale comes from calibration",
        ),
        KVFormat(
            "fp4_e2m1", 4, "uint8", "group", 16, "e4m3", "float8_e4m3fn", choices=_FP4_CHOICES,
            note="group 16 with an E4M3 scale is fixed by training in DeepSeek-V4.1; generic elsewhere",
        ),
    )
}
# fmt: on


def names() -> tuple[str, ...]:
    """Names of the formats that `get` knows, without granularities."""
    return tuple(_FORMATS)


def get(name: str) -> KVFormat:
    """The format called `name`, which may end in a granularity or a group: "fp8_e4m3:token_head", "int4:64".

    "auto" is no format: it means the cache's own dtype, which `of_dtype` translates.
    Raises ArgumentError, listing what is allowed, for a name or granularity that does not exist.
    """
    base, colon, choice = name.partition(":")
    if base in _RECORDS:
        raise ArgumentError(
            f"kv_format is {name!r}, a record of {_RECORDS[base].row_bytes} bytes; a split cache's format "
            f"is one of {_listed(_FORMATS)}: use formats.record({base!r})"
        )
    found = _lookup(_FORMATS, base, "kv_format")
    if not colon:
        return found
    if choice not in found.choices:
        allowed = f"takes {_listed(found.choices)} after the colon" if found.choices else "takes nothing after its name"
        raise ArgumentError(f"kv_format is {name!r}; {base} {allowed}: write {base!r} for its default")
    if choice.isdigit():
        group = int(choice)
        if base in ("fp8_e4m3", "fp8_e5m2") or (base == "fp4_e2m1" and group != found.group):
            # DeepSeek's block scales: powers of two, rounded up, so that nothing clips
            return replace(found, granularity="group", group=group, rule="pow2_ceil", scale_dtype="float8_e8m0fnu")
        return replace(found, group=group)
    return replace(found, granularity=choice, group=None, rule="amax", scale_dtype="float32")


def pair(name: str) -> tuple[str, str]:
    """The formats of keys and of values that a kv_format names: "int8/fp8_e4m3" -> int8 and fp8_e4m3; one for both.

    Raises ArgumentError for what `get` does not know; "auto" stays "auto".
    """
    key, slash, value = name.partition("/")
    sides = (key, value if slash else key)
    for side in sides:
        if side != "auto":
            get(side)
    return sides


def of_dtype(dtype_name: str) -> KVFormat:
    """The format that stores values as they are in a torch dtype, given by name: "bfloat16" -> bf16."""
    by_dtype = {entry.storage: entry for entry in _FORMATS.values() if not entry.quantized}
    return _lookup(by_dtype, dtype_name.removeprefix("torch."), "dtype")


@dataclass(frozen=True)
class Field:
    """One run of equal numbers inside a row: its name, torch dtype by name, and how many."""

    name: str
    dtype: str
    count: int

    @property
    def bytes(self) -> int:
        """Bytes of the run."""
        return DTYPE_BYTES[self.dtype] * self.count


@dataclass(frozen=True)
class Record:
    """One row of a cache packed into bytes, and how rows make a page.

    holds        "mla" (latent and rotary key), "shared_kv" (one row that is key and value) or "index_key"
    dims         widths of the vectors that the row holds
    planes       fields in byte order. One plane: rows follow each other. Two planes: a page's data rows come first,
                 then all its scale rows
    page_align   a page is padded to a multiple of this
    index        record of the index keys that engines keep beside this one, if any
    source       who reads and writes it
    """

    name: str
    holds: str
    dims: tuple[int, ...]
    planes: tuple[tuple[Field, ...], ...]
    page_align: int = 1
    index: str | None = None
    source: str = ""

    @property
    def page_rule(self) -> str:
        """Either "rows" or "segregated"."""
        return "rows" if len(self.planes) == 1 else "segregated"

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of one row in each plane."""
        return tuple(sum(field.bytes for field in plane) for plane in self.planes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, its own padding included."""
        return sum(self.plane_bytes)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one row's scales."""
        return sum(field.bytes for plane in self.planes for field in plane if field.name == "scales")

    @property
    def data_bytes(self) -> int:
        """Bytes of one row's codes and unquantized numbers."""
        return sum(field.bytes for plane in self.planes for field in plane if field.name not in ("scales", "pad"))

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a page of `block_size` rows, its padding included."""
        if block_size < 1:
            raise ArgumentError(f"block_size is {block_size}; a page holds 1 row or more: pass the rows of one page")
        return -(-block_size * self.row_bytes // self.page_align) * self.page_align


def _fields(*fields: tuple[str, str, int]) -> tuple[Field, ...]:
    return tuple(Field(*field) for field in fields)


def _pad(count: int) -> tuple[str, str, int]:
    return "pad", "uint8", count


# Runs that records are made of.
_ROPE = ("rope", "bfloat16", 64)
_V32_CODES, _V32_SCALES = ("codes", "float8_e4m3fn", 512), ("scales", "float32", 4)
_V32_FP4 = (("codes", "uint8", 256), ("rope", "float8_e4m3fn", 64), ("scales", "float8_e4m3fn", 32))
_V4_CODES, _V4_SCALES = ("codes", "float8_e4m3fn", 448), ("scales", "float8_e8m0fnu", 7)
_V4_BF16_SCALES = ("scales", "bfloat16", 7)
_V41_FP8 = (("codes", "float8_e4m3fn", 512), ("scales", "float8_e8m0fnu", 16))
_V41_FP4 = (("codes", "uint8", 256), ("scales", "float8_e4m3fn", 32))
_INDEX_FP8 = (_fields(("codes", "float8_e4m3fn", 128)), _fields(("scales", "float32", 1)))
_INDEX_FP4 = (_fields(("codes", "uint8", 64)), _fields(("scales", "float8_e8m0fnu", 4)))
_INDEX_INT8 = (_fields(("codes", "int8", 128)), _fields(("scales", "float16", 1)))

# fmt: off
_RECORDS = {
    entry.name: entry
    for entry in (
        # name, holds, dims, planes, page_align, index, source
        Record("v32_fp8_656", "mla", (512, 64), (_fields(_V32_CODES, _V32_SCALES, _ROPE),), 1, "index_fp8_132",
               "FlashMLA and vLLM fp8_ds_mla, DeepSeek-V3.2"),
        Record("v32_fp8_656_ascend", "mla", (512, 64), (_fields(_V32_CODES, _ROPE, _V32_SCALES),), 1,
               "index_fp8_132", "Ascend KvQuantSparseFlashAttention: scales last"),
        Record("v32_nvfp4_352", "mla", (512, 64), (_fields(*_V32_FP4),), 1, "index_fp8_132",
               "vLLM nvfp4_ds_mla (SM100): the scale of 16-block s is at byte 8 * (s & 3) + (s >> 2)"),
        Record("v4_fp8_584", "shared_kv", (512,), (_fields(_V4_CODES, _ROPE), _fields(_V4_SCALES, _pad(1))), 576,
               "index_fp8_132", "FlashMLA MODEL1 and vLLM, DeepSeek-V4"),
        Record("v4_fp8_584_ascend", "shared_kv", (512,), (_fields(_V4_CODES, _ROPE, _V4_SCALES, _pad(1)),), 1,
               "index_fp8_132", "Ascend mixed_quant_sparse_flash_mla, mode 2"),
        Record("v4_fp8_608_ascend", "shared_kv", (512,), (_fields(_ROPE, _V4_CODES, _V4_BF16_SCALES, _pad(18)),), 1,
               "index_fp8_132", "Ascend mixed_quant_sparse_flash_mla, mode 1"),
        Record("v4_fp8_640_ascend", "shared_kv", (512,), (_fields(_ROPE, _V4_CODES, _V4_SCALES, _pad(57)),), 1,
               "index_fp8_132", "Ascend 950 kv_compress_epilog, vllm-ascend"),
        Record("v41_fp8_528", "shared_kv", (512,), (_fields(*_V41_FP8),), 1, "index_fp8_132",
               "vLLM (SM100) and FlashMLA of 2026-09-30; also the window rows of DeepSeek-V4.1"),
        Record("v41_fp8_528_planar", "shared_kv", (512,), tuple(_fields(field) for field in _V41_FP8), 512,
               "index_fp8_132", "SGLang V41"),
        Record("v41_fp4_288", "shared_kv", (512,), (_fields(*_V41_FP4),), 1, "index_mxfp4_68",
               "vLLM nvfp4_ds_mla and FlashMLA of 2026-09-30; DeepSeek-V4.1's compressed rows, fixed by training"),
        Record("v41_fp4_288_planar", "shared_kv", (512,), tuple(_fields(field) for field in _V41_FP4), 256,
               "index_mxfp4_68", "SGLang V41_FP4"),
        Record("index_fp8_132", "index_key", (128,), _INDEX_FP8, 1, None, "DeepGEMM and vLLM; power-of-two scale"),
        Record("v41_index_fp8_132", "index_key", (128,), _INDEX_FP8, 512, None, "DeepSeek-V4.1's pages on CUDA"),
        Record("index_mxfp4_68", "index_key", (128,), _INDEX_FP4, 1, None, "DeepGEMM and vLLM"),
        Record("v41_index_mxfp4_68", "index_key", (128,), _INDEX_FP4, 512, None, "DeepSeek-V4.1's pages on CUDA"),
        Record("index_int8_130", "index_key", (128,), _INDEX_INT8, 1, None, "vllm-ascend on A2 and A3"),
    )
}
# fmt: on


def record_names() -> tuple[str, ...]:
    """Names of the records that `record` knows."""
    return tuple(_RECORDS)


def record(name: str) -> Record:
    """The record called `name`. Raises ArgumentError, listing what is allowed, if there is none."""
    return _lookup(_RECORDS, name, "record")


_Entry = TypeVar("_Entry")


def _lookup(table: dict[str, _Entry], name: str, argument: str) -> _Entry:
    if name not in table:
        raise ArgumentError(f"{argument} is {name!r}; it must be one of {_listed(table)}: choose one of these")
    return table[name]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _need_sizes(kv_heads: int, head_dim: int) -> None:
    if kv_heads < 1 or head_dim < 1:
        raise ArgumentError(
            f"kv_heads is {kv_heads} and head_dim is {head_dim}; both must be 1 or more: pass the cache's sizes"
        )
