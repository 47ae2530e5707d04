"""Triton kernels, one source for CUDA, Ascend and the CPU interpreter. Backends launch them; no device is known here.

What keeps a kernel portable:

- It imports triton and triton.language only, and uses what triton 3.2 has. What differs by device is a constexpr that
  the launcher sets, such as DOT, the dtype of a dot's operands: the interpreter multiplies bfloat16 as integers, so
  it gets float32, in which those products are exact.
- Sizes of tiles are powers of two; 576 is 512 + 64.
- Cached numbers of 8 and 4 bits are uint8, decoded with integer arithmetic: not every target has fp8.
- bfloat16 becomes float32 straight after a load, and again by `cast`, which rounds alike everywhere.
- Ids of tokens, blocks and slots are int64 before a stride multiplies them.
- Running maxima start at -1e30, not -inf, whose difference from itself is NaN. No argmax; no fp64.

This package is imported by the functions that launch, never by `import kvbackend`: triton may not be there.
"""
