// Attention of few rows in vectors over codes of 4 bits with scales of groups: what attention_pairs.h does with numbers
// that have none, in products of bfloat16 too.
//
// Codes become bfloat16 32 at a time, by a shift and a lookup, and are not multiplied with their scales. For scores
// the products of 128 dims lie in lanes so that a lane has eight dims of one group; their sums are multiplied with its
// scale. For values the weights are, for each group anew. Queries and sums lie in the order that follows from it.
//
// Numbers: scores and sums in float, weights times scales rounded to bfloat16.
#pragma once

#include "attention_nibbles.h"
#include "attention_pairs.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t kNibbleDims = 64;  // dims come in multiples of it
constexpr int64_t kNibbles = 128;    // codes in a vector of keys, of which each lane has 8: all of one group

// The dim that each lane begins with, from which follows which of the scales of all of them it wants.
struct DimsOfLanes {
  alignas(kLine) uint32_t dim[kLanes] = {};
  __m512i scales(int shift) const { return (__m512i)((BitVec)_mm512_load_si512(dim) >> shift); }
};

struct DimsOfKeys : DimsOfLanes {
  constexpr DimsOfKeys() {
    for (uint32_t lane = 0; lane < kLanes; ++lane) dim[lane] = 8 * lane;
  }
};
inline constexpr DimsOfKeys kDimsOfKeys;

// Four floats, one for each lane that asks for it.
inline Vec pick_of_four(const float* four, __m512i lanes) {
  return (Vec)_mm512_maskz_permutexvar_ps(0xffff, lanes, _mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(four)));
}

// The numbers of a query `row` as products want them: of each kNibbles dims the first of every four, then the second
// ones, and so on; zeros where the last of them are fewer.
inline int64_t ordered_dims(int64_t dim) { return round_up(dim, kNibbles); }

inline void order_query(const bf16* query, int64_t dim, int64_t row, bf16* queries) {
  uint16_t order[2][kPair];
  for (int i = 0; i < kPair; ++i) order[0][i] = static_cast<uint16_t>(2 * i), order[1][i] = order[0][i] + 1;
  const __m512i evens = _mm512_loadu_si512(order[0]), odds = _mm512_loadu_si512(order[1]);
  const auto pick = [](__m512i first, __m512i which, __m512i second) {
    return _mm512_maskz_permutex2var_epi16(~0u, first, which, second);
  };
  bf16* out = queries + row * ordered_dims(dim);
  for (int64_t d = 0; d < dim; d += kNibbles, out += kNibbles) {
    __m512i part[4] = {};
    std::memcpy(part, query + d, std::min(kNibbles, dim - d) * sizeof(bf16));
    const __m512i even[2] = {pick(part[0], evens, part[1]), pick(part[2], evens, part[3])};
    const __m512i odd[2] = {pick(part[0], odds, part[1]), pick(part[2], odds, part[3])};
    _mm512_storeu_si512(out, pick(even[0], evens, even[1]));
    _mm512_storeu_si512(out + kPair, pick(odd[0], evens, odd[1]));
    _mm512_storeu_si512(out + 2 * kPair, pick(even[0], odds, even[1]));
    _mm512_storeu_si512(out + 3 * kPair, pick(odd[0], odds, odd[1]));
  }
}

// As score_few. Queries have ordered_dims.
template <int R, int kDim, class Ahead>
void score_nibbles(const Groups& groups, const bf16* queries, int64_t any_dim, const e2m1x2* const* keys, int64_t count,
                   float* scores, int64_t width, const Heads& heads, Ahead& ahead) {
  constexpr int kSums = kSumsOf<e2m1x2>, kKeys = kSums / R;
  const int64_t dim = kDim ? kDim : any_dim, row_dim = ordered_dims(dim);
  const __m512i lanes = kDimsOfKeys.scales(groups.shift);
  const auto some_rows = [&](const bf16* own, int64_t n, int64_t head, float* score) __attribute__((always_inline)) {
    Vec sum[kSums] = {};
    ahead.step(dim / kPair);
    for (int64_t d = 0; d < dim; d += kNibbles) {
      const __mmask16 here = kDim || d + kNibbles <= dim ? 0xffff : 0xff;
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const __m512i codes = _mm512_maskz_loadu_epi32(here, keys[n + k] + head * heads.row + d / 2);
        BitVec numbers[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          numbers[i] = (BitVec)halves_of_nibbles(i ? _mm512_maskz_srli_epi16(~0u, codes, 4 * i) : codes);
        const __m256 scales = _mm256_loadu_ps(groups.of(n + k, head) + (d >> groups.shift));
        const Vec scale = (Vec)_mm512_maskz_permutexvar_ps(here, lanes, _mm512_castps256_ps512(scales));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          Vec products = {};
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i)
            products = add_products(products, numbers[i], load_halves(own + r * row_dim + d + i * kPair));
          sum[k * R + r] += scale * products;
        }
      }
    }
    const Vec all = sum_lanes(sum);
    if (width == R) return store(score, all);
    Quad quads[kSums / 4];
    std::memcpy(quads, &all, sizeof all);
#pragma GCC unroll 4
    for (int i = 0; i < kSums; i += 4) std::memcpy(score + i / R * width + i % R, &quads[i / 4], sizeof(Quad));
  };
  for (int64_t n = 0; n < count; n += kKeys) {
    for (int64_t head = 0; head < heads.count; ++head) {
      for (int64_t row = 0; row < width; row += R)
        some_rows(queries + head * heads.queries + row * row_dim, n, head,
                  scores + head * heads.scores + n * width + row);
    }
  }
}

// As score_few_all.
template <class Ahead>
void score_all_nibbles(const Groups& groups, const bf16* queries, int64_t dim, const e2m1x2* const* keys, int64_t count,
                       float* scores, int64_t width, const Heads& heads, Ahead& ahead) {
  with_rows_at_once(width, [&](auto r) {
    const auto score = dim == kManyDims ? score_nibbles<r, kManyDims, Ahead> : score_nibbles<r, 0, Ahead>;
    score(groups, queries, dim, keys, count, scores, width, heads, ahead);
  });
}

// What scale_pairs wants of the lanes of 32 dims after the other, of each R rows x 2 groups of 16.
template <int R>
struct LanesOfPairs : DimsOfLanes {
  static constexpr int kOfPiece = 2 * R;
  alignas(kLine) uint32_t row[kLanes] = {};
  alignas(kLine) uint16_t turns[kPair] = {};  // the first key's halves, then the second's: by turns
  constexpr LanesOfPairs() {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      dim[lane] = lane / kOfPiece * kPair + lane % 2 * kShared;
      row[lane] = lane % kOfPiece / 2;
      turns[2 * lane] = static_cast<uint16_t>(lane);
      turns[2 * lane + 1] = static_cast<uint16_t>(kLanes + lane);
    }
  }
};
template <int R>
inline constexpr LanesOfPairs<R> kLanesOfPairs;

// Weights times scales of R rows and `count` keys as pairs of keys, for each of `pieces` of 32 dims [R rows, 2 groups
// of 16]: those of a pair are `stride` floats from those of the next.
template <int R>
[[gnu::always_inline]] inline void scale_pairs(const Groups& groups, const float* weights, int64_t width, int64_t n,
                                               int64_t count, int64_t head, int64_t pieces, int64_t stride,
                                               float* out) {
  constexpr const LanesOfPairs<R>& kOrder = kLanesOfPairs<R>;
  const __m512i rows = _mm512_load_si512(kOrder.row), turns = _mm512_load_si512(kOrder.turns);
  const __m512i lanes = kOrder.scales(groups.shift);
  const auto scaled = [&](int64_t k, int64_t piece) {
    const float* scales = groups.of(n + k, head) + (piece * kPair >> groups.shift);
    const __m512 of_lanes = _mm512_maskz_permutexvar_ps(0xffff, lanes, _mm512_loadu_ps(scales));
    return (__m512)(pick_of_four(weights + k * width, rows) * (Vec)of_lanes);
  };
  for (int64_t k = 0; k < count; k += 2, out += stride) {
    for (int64_t piece = 0; piece < pieces; piece += kLanes / kOrder.kOfPiece) {
      const __m512 second = k + 1 < count ? scaled(k + 1, piece) : _mm512_setzero_ps();
      const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(second, scaled(k, piece));
      _mm512_storeu_si512(out + piece * kOrder.kOfPiece, _mm512_maskz_permutexvar_epi16(~0u, turns, halves));
    }
  }
}

// The bytes of two rows that a vector of pairs is looked up with: lanes take turns between the groups of 16 dims.
struct OrderOfNibblePairs {
  alignas(kLine) uint8_t at[64] = {};
  constexpr OrderOfNibblePairs() {
    for (int lane = 0; lane < 16; ++lane) {
      for (int i = 0; i < 4; ++i) at[4 * lane + i] = static_cast<uint8_t>(lane % 2 * 8 + lane / 2 + i / 2 * 64);
    }
  }
};
inline constexpr OrderOfNibblePairs kOrderOfNibblePairs;

// As weigh_pairs: R rows x V vectors, two of them a piece of 32 dims. `weights` as scale_pairs makes them.
template <int R, int V, class Ahead>
[[gnu::always_inline]] inline void weigh_nibbles(const float* weights, int64_t stride, const e2m1x2* const* values,
                                                 int64_t count, int64_t from, const float* decay, float* out,
                                                 int64_t out_row, Ahead& ahead) {
  const __m512i order = _mm512_load_si512(kOrderOfNibblePairs.at);
  const auto piece = [&](const e2m1x2* row) {
    return _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
  };
  Vec sum[R][V];
  load_sums(out, out_row, decay, 1.0f, sum);
  ahead.step((count + 1) / 2);
  for (int64_t n = 0; n < count; n += 2, weights += stride) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v += 2) {
      const __m512i a = piece(values[n] + from + v * 8), b = piece(values[n + 1] + from + v * 8);
      const __m512i codes = _mm512_permutex2var_epi8(a, order, b);
      const BitVec low = (BitVec)halves_of_nibbles(codes);
      const BitVec high = (BitVec)halves_of_nibbles(_mm512_maskz_srli_epi16(~0u, codes, 4));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int64_t two;
        std::memcpy(&two, weights + (v / 2 * R + r) * 2, sizeof two);
        const BitVec weight = (BitVec)_mm512_set1_epi64(two);
        sum[r][v] = add_products(sum[r][v], weight, low);
        sum[r][v + 1] = add_products(sum[r][v + 1], weight, high);
      }
    }
  }
  store_sums(sum, 1.0f, out, out_row);
}

// Floats that weigh_all_nibbles wants for weights times scales.
constexpr int64_t scaled_pairs(int64_t dims) { return kTile / 2 * (kFewRows * dims / kShared + 2 * kLanes); }

// As weigh_all; heads.values is at most kTile. `scaled` has room for scaled_pairs.
template <class Ahead>
void weigh_all_nibbles(const Groups& groups, const float* weights, int64_t width, int64_t rows,
                       const e2m1x2* const* values, int64_t count, const float* decay, float* sums, int64_t dims,
                       float* scaled, const Heads& heads, Ahead& ahead) {
  const int64_t pieces = dims / kPair;
  const auto block = [&](auto r, auto v, auto /*odd*/, int64_t head, int64_t row, int64_t d, int64_t first,
                         int64_t some) __attribute__((always_inline)) {
    const int64_t stride = round_up(pieces * 2 * r, kLanes);
    float* own = scaled + row / r * stride * (kTile / 2);
    if (d == 0) {
      const float* from = weights + head * heads.scores + first * width + row;
      scale_pairs<r>(groups, from, width, first, some, head, pieces, stride, own);
    }
    weigh_nibbles<r, v>(own + d / kPair * 2 * r, stride, values + first, some, head * heads.row + d / 2,
                        first ? nullptr : decay + head * heads.state + row, sums + (head * width + row) * dims + d,
                        dims, ahead);
  };
  each_slice<e2m1x2>(heads, width, rows, count, dims, block);
}

// A row's sums in the order of its dims.
inline void unpair_nibble_sums(const float* sums, int64_t dims, float* out) {
  for (int64_t d = 0; d < dims; d += kPair) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      float* to = out + d + lane % 2 * kShared + lane / 2 * 2;
      to[0] = sums[d + lane];
      to[1] = sums[d + kLanes + lane];
    }
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
