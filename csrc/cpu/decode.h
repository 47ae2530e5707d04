// Rows of codes as numbers: code * scale, then + minimum or * global scale, each rounded once to float.
#pragma once

#include "kv_format.h"

namespace kvbackend::KVBACKEND_ISA {

// In plain C++, and the same for a vector. A code below 16 times a float16 is exact, so that fusing the addition
// changes nothing.
template <class Code, class Number>
inline Number decoded(Number code, Number scale, Number low, Number global) {
  Number value = code * scale;
  if constexpr (kHasMinimum<Code>) value = value + low;
  if constexpr (kMayHaveGlobal<Code>) value = value * global;
  return value;
}

// Code i of a row.
template <class Code>
inline float code_at(const Code* codes, int64_t i) {
  if constexpr (kPerByte<Code> == 1) {
    return to_float(codes[i]);
  } else {
    return i % 2 ? odd(codes[i / 2]) : even(codes[i / 2]);
  }
}

// Neighbours that share a scale.
template <class Code, class Size, class Out>
inline void decode_span(const Code* codes, Size size, float scale, float low, float global, Out* out) {
  const Vec scales = broadcast(scale), lows = broadcast(low), globals = broadcast(global);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(out + i, decoded<Code>(load(codes + i / kPerByte<Code>), scales, lows, globals));
  if constexpr (kMayHaveRest<Size>) {
    for (; i < size; ++i) out[i] = from_float<Out>(decoded<Code>(code_at(codes, i), scale, low, global));
  }
}

// A scale for each number.
template <class Code, class Out>
inline void decode_each(const Code* codes, int64_t size, const float* scales, const float* lows, float global,
                        Out* out) {
  const Vec globals = broadcast(global);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec low = kHasMinimum<Code> ? load(lows + i) : Vec{};
    store(out + i, decoded<Code>(load(codes + i / kPerByte<Code>), load(scales + i), low, globals));
  }
  for (; i < size; ++i) {
    const float low = kHasMinimum<Code> ? lows[i] : 0.0f;
    out[i] = from_float<Out>(decoded<Code>(code_at(codes, i), scales[i], low, global));
  }
}

// A row [span * count] with a scale, and a minimum where the code has one, for each span.
template <class Code, class Out>
inline void decode_row(const Code* codes, int64_t span, int64_t count, const float* scales, const float* lows,
                       float global, Out* out) {
  if (span == 1) return decode_each(codes, count, scales, lows, global, out);
  with_span(span, [&](auto constant) {
    for (int64_t i = 0; i < count; ++i) {
      const float low = kHasMinimum<Code> ? lows[i] : 0.0f;
      decode_span(codes + i * constant / kPerByte<Code>, constant, scales[i], low, global, out + i * constant);
    }
  });
}

}  // namespace kvbackend::KVBACKEND_ISA
