// Attention of few rows in products of bfloat16: the loops of attention_loops.h with half as many instructions, as
// vdpbf16ps multiplies and adds two numbers a lane. Numbers: scores and sums in float, weights rounded to bfloat16.
#pragma once

#include "amx.h"
#include "attention_loops.h"

namespace kvbackend::KVBACKEND_ISA {

// kPair numbers as bfloat16, in their order. Exact: no code has more than 8 bits of mantissa.
inline BitVec load_halves(const bf16* from) {
  BitVec halves;
  std::memcpy(&halves, from, sizeof halves);
  return halves;
}

inline BitVec load_halves(const e2m1x2* from) {
  alignas(64) static constexpr uint16_t kValues[32] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                       0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  const BitVec code = load_bytes(from);
  const BitVec each = (code | code << 12) & 0x000f000f;
  return (BitVec)_mm512_maskz_permutexvar_epi16(~0u, (__m512i)each, _mm512_load_si512(kValues));
}

template <class Code>
inline BitVec load_halves(const Code* from) {
  return (BitVec)_mm512_cvtne2ps_pbh((__m512)load(from + kLanes), (__m512)load(from));
}

inline Vec add_products(Vec sum, BitVec a, BitVec b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// For score_few: queries in the order of dims, not scaled.
template <class E>
struct InHalves {
  using Query = bf16;
  static constexpr int kParts = 1;

  BitVec numbers(const E* row, int64_t, int64_t d, int) const { return load_halves(row + d / kPerByte<E>); }
  static BitVec query(const bf16* pair, int) { return load_halves(pair); }
  static Vec add(Vec sum, BitVec key, BitVec query) { return add_products(sum, key, query); }
};

constexpr int kManyDims = 128;  // those of most models, for which loops over dims are unrolled

// As score_few_all.
template <class E, class Ahead>
void score_all_pairs(const bf16* queries, int64_t dim, const E* const* keys, int64_t count, float* scores,
                     int64_t width, const Heads& heads, Ahead& ahead) {
  const auto score =
      dim == kManyDims ? score_few_all<kManyDims, InHalves<E>, E, Ahead> : score_few_all<0, InHalves<E>, E, Ahead>;
  score({}, queries, dim, keys, count, scores, width, heads, ahead);
}

// Weights [count, width] as pairs of keys [count / 2, width]. What an odd count lacks is 0 in `weights`, which may be
// read up to a multiple of kPair.
inline void pair_weights(const float* weights, int64_t count, int64_t width, float* out) {
  uint16_t order[kPair];  // those of two keys take turns; the width is a power of two
  for (int64_t i = 0; i < kPair; ++i)
    order[i] = static_cast<uint16_t>((i & ~(2 * width - 1)) + i % 2 * width + (i & (2 * width - 1)) / 2);
  const __m512i turns = _mm512_loadu_si512(order);
  for (int64_t i = 0; i < count * width; i += kPair) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)load(weights + i + kLanes), (__m512)load(weights + i));
    _mm512_storeu_si512(out + i / 2, _mm512_maskz_permutexvar_epi16(~0u, turns, halves));
  }
}

// As weigh: two values at once, R rows x V vectors of sums. The unpacking leaves the sums of each 32 dims in an order
// of its own, which unpair_sums undoes.
template <int R, int V, class E, class Ahead>
[[gnu::always_inline]] inline void weigh_pairs(const float* weights, int64_t width, const E* const* values,
                                               int64_t count, int64_t from, const float* decay, float* out,
                                               int64_t out_row, Ahead& ahead) {
  Vec sum[R][V];
  load_sums(out, out_row, decay, 1.0f, sum);
  const auto pair = [&](const E* first, const E* second, bool both) __attribute__((always_inline)) {
    BitVec numbers[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v += 2) {
      const int64_t d = from + v * kLanes / kPerByte<E>;
      BitVec a = load_halves(first + d), b = both ? load_halves(second + d) : BitVec{};
      keep_in_register(a);
      keep_in_register(b);
      numbers[v] = (BitVec)_mm512_maskz_unpacklo_epi16(~0u, (__m512i)a, (__m512i)b);
      numbers[v + 1] = (BitVec)_mm512_maskz_unpackhi_epi16(~0u, (__m512i)a, (__m512i)b);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const BitVec weight = (BitVec)_mm512_set1_ps(weights[r]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r][v] = add_products(sum[r][v], weight, numbers[v]);
    }
    weights += width;
  };
  int64_t n = 0;
  for (; n + 2 <= count; n += 2) {
    if (n % 4 == 0) ahead.step(std::min<int64_t>(2, (count + 1 - n) / 2));
    pair(values[n], values[n + 1], true);
  }
  if (n < count) {
    if (n % 4 == 0) ahead.step();
    pair(values[n], nullptr, false);
  }
  store_sums(sum, 1.0f, out, out_row);
}

// As each_slice and each_block, in one function: one that is called for each block finds anew where everything is.
template <int R, int kDim, class E, class Ahead>
void weigh_slices_of(const float* weights, int64_t width, int64_t rows, const E* const* values, int64_t count,
                     const float* decay, float* sums, int64_t any_dims, const Heads& heads, Ahead& ahead) {
  constexpr int kVectors = std::max(2, kAccumulators / R);
  const int64_t dims = kDim ? kDim : any_dims;
  for (int64_t n = 0; n < count; n += heads.values) {
    for (int64_t head = 0; head < heads.count; ++head) {
      const auto block = [&](auto vectors, int64_t d) __attribute__((always_inline)) {
        for (int64_t row = 0; row < rows; row += R) {
          weigh_pairs<R, vectors>(weights + head * heads.scores + n / 2 * width + row, width, values + n,
                                  std::min(heads.values, count - n), head * heads.row + d / kPerByte<E>,
                                  n ? nullptr : decay + head * heads.state + row,
                                  sums + (head * width + row) * dims + d, dims, ahead);
        }
      };
      int64_t d = 0;
      for (; d + kVectors * kLanes <= dims; d += kVectors * kLanes) block(std::integral_constant<int, kVectors>{}, d);
      for (; d < dims; d += kPair) block(std::integral_constant<int, 2>{}, d);
    }
  }
}

// As weigh_all.
template <class E, class Ahead>
void weigh_all_pairs(const float* weights, int64_t width, int64_t rows, const E* const* values, int64_t count,
                     const float* decay, float* sums, int64_t dims, const Heads& heads, Ahead& ahead) {
  with_rows_at_once(width, [&](auto r) {
    const auto weigh = dims == kManyDims ? weigh_slices_of<r, kManyDims, E, Ahead> : weigh_slices_of<r, 0, E, Ahead>;
    weigh(weights, width, rows, values, count, decay, sums, dims, heads, ahead);
  });
}

// A row's sums in the order of its dims.
inline void unpair_sums(const float* sums, int64_t dims, float* out) {
  constexpr auto numbers = std::make_integer_sequence<int, 16>{};
  for (int64_t d = 0; d < dims; d += kPair) {
    const Vec low = load(sums + d), high = load(sums + d + kLanes);
    store(out + d, mix_lanes<0, 4, 1, 5>(low, high, numbers));
    store(out + d + kLanes, mix_lanes<2, 6, 3, 7>(low, high, numbers));
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
