"""The tables that the C++ kernels are compiled with: what `formats` says of formats and of records, as C++."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING

from . import formats

if TYPE_CHECKING:
    from .spec import Op

_SCALAR_TYPES = {
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
    "float8_e8m0fnu": "Byte",  # libtorch's stable ABI cannot say it: kernels are given a view as bytes
    "int8": "Char",
    "uint8": "Byte",
}


def formats_table() -> str:
    """One initializer of KVFormat a line: every name that `formats.get` takes."""
    lines = []
    for base in formats.names():
        for name in (base, *(f"{base}:{choice}" for choice in formats.get(base).choices)):
            fmt = formats.get(name)
            fields = (
                f'"{name}"',
                f"ScalarType::{_SCALAR_TYPES[fmt.storage]}",
                f"Per::{fmt.granularity}",
                str(fmt.group or 0),
                f"Rule::{fmt.rule}",
                f"ScalarType::{_SCALAR_TYPES[fmt.scale_dtype or 'float32']}",
                str(fmt.global_scale).lower(),
            )
            lines.append(f"{{{', '.join(fields)}}},\n")
    return "".join(lines)


def records_table() -> str:
    """One initializer of Record a line: page_align, bytes of a row in each plane, and the fields but for padding."""
    lines = []
    for name in formats.record_names():
        record = formats.record(name)
        fields = []
        for index, plane in enumerate(record.planes):
            offset = 0
            for field in plane:
                if field.name != "pad":
                    fields.append(f'{{"{field.name}", "{field.dtype}", {index}, {offset}, {field.bytes}}}')
                offset += field.bytes
        planes = ", ".join(map(str, record.plane_bytes))
        lines.append(f'{{"{name}", {record.page_align}, {{{planes}}}, {{{", ".join(fields)}}}}},\n')
    return "".join(lines)


def stamp(op: Op) -> str:
    """What a kernel of the op was built for: the schema and, where it names formats or records, the tables."""
    if not {"kv_format", "from_layout"} & set(op.parameters):
        return op.schema
    return f"{op.schema} # formats {_digest()}"


@cache
def _digest() -> str:
    return hashlib.sha256((formats_table() + records_table()).encode()).hexdigest()[:16]
