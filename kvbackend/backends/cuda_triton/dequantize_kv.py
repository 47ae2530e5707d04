"""Rows are read as from a cache of one block, where token t has slot t."""

import torch

from ...codecs import split
from ...formats import get
from . import cached, rows

OUT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def unsupported(**_):
    return ()


def run(codes, scales, kv_format, global_scale, role, out_dtype):
    fmt, dtype = get(kv_format), OUT[out_dtype]
    num_tokens, heads, width = codes.shape
    if not fmt.quantized or codes.numel() == 0:
        return split.decode(codes, scales, fmt, role, global_scale, dtype)
    out = codes.new_empty(num_tokens, heads, width * split.per_byte(fmt), dtype=dtype)
    pages = scales if fmt.granularity in split.STATIC else scales[None]
    number = scales if global_scale is None else global_scale
    tokens = fmt.group or 1 if split.across_tokens(fmt, role) else 1
    operand = cached.quantized(codes[None], pages, number, fmt, role, tokens)
    rows.read(operand, None, out, heads, out.shape[2], num_tokens, True)
    return out
