// Attention of few rows in tiles: what attention_pairs.h does in vectors. A product takes the time of 16 keys, however
// few rows meet them: for four rows an eighth of what vectors take.
//
// Keys and values are multiplied where they lie, if 16 of them follow each other. Scores [count, width] are tiles of
// `width` columns, whose A is the keys. Sums are tiles of 2 `width` rows for each 32 dims, whose B is the values, as in
// weigh_beside. Numbers: scores and sums in float, weights rounded to bfloat16.
#pragma once

#include "attention_pairs.h"
#include "attention_tiles.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t kNarrowKeys = 2 * kSide;  // attended to at once

// Rows of their keys, or values, kSide at a time.
struct NarrowRows {
  const bf16* at[2];
  int64_t row_bytes[2];
};

// Whose dims copy_halves leaves in the order in which to_halves has them.
template <class E>
constexpr bool kTurned = std::is_same_v<E, e4m3> || std::is_same_v<E, int8_t>;

template <class Ahead>
void score_narrow(const NarrowRows& keys, int64_t dims, const bf16* queries, int64_t width, float* scores,
                  Ahead& ahead) {
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(float));
  tile_zero<0>();
  tile_zero<1>();
  for (int64_t d = 0; d < dims; d += kDepth) {
    tile_load<2>(queries + d * width, row_bytes);
    tile_load<3>(keys.at[0] + d, keys.row_bytes[0]);
    tile_multiply<0, 3, 2>();
    tile_load<4>(keys.at[1] + d, keys.row_bytes[1]);
    tile_multiply<1, 4, 2>();
    ahead.step();
  }
  tile_store<0>(scores, row_bytes);
  tile_store<1>(scores + kSide * width, row_bytes);
}

// The rows of a kv head that come next: of its keys and values the first half and the second side by side, a line of
// each at a time, as evenly as the work on others goes. A core reads four streams faster than one.
class NextRows {
 public:
  NextRows() = default;
  NextRows(const char* keys, const Places& key, const char* values, const Places& value, int64_t row_bytes,
           int64_t steps)
      : keys_(keys), values_(values), key_(&key), value_(&value), row_bytes_(row_bytes), rows_(kSide), steps_(steps) {}

  void finish() {
    for (int64_t n = 0; n < steps_; ++n) step();
  }

  void step() {
    for (due_ += kSide; due_ >= steps_ && row_ < rows_; due_ -= steps_, ++row_) {
      const auto key = [&](int64_t row) { return keys_ + key_->row[row]; };
      const auto value = [&](int64_t row) { return values_ + value_->row[row]; };
      const char* first[] = {key(row_), value(row_), key(kSide + row_), value(kSide + row_)};
      for (int64_t at = 0; at < row_bytes_; at += kLine) {
        for (const char* row : first) __builtin_prefetch(row + at, 0, 2);
      }
    }
  }

 private:
  const char *keys_ = nullptr, *values_ = nullptr;
  const Places *key_ = nullptr, *value_ = nullptr;
  int64_t row_bytes_ = 0, rows_ = 0, row_ = 0;
  int64_t steps_ = 1, due_ = 0;
};

// Where the numbers of two times 16 / W keys and W rows go, so that rows are rows, and keys pairs of both: bytes of a
// vector.
template <int W>
struct RowsOfPairs {
  uint8_t order[2 * kDepth] = {};
  constexpr RowsOfPairs() {
    for (int row = 0, to = 0; row < W; ++row) {
      for (int key = 0; key < kLanes / W; ++key) {
        for (int half = 0; half < 2; ++half) {
          for (int byte = 0; byte < 2; ++byte)
            order[to++] = static_cast<uint8_t>(2 * (half * kLanes + key * W + row) + byte);
        }
      }
    }
  }
};

// W vectors of W parts: the first part of each, then the second of each ..
template <int W>
[[gnu::always_inline]] inline void turn_parts(__m512i (&part)[W]) {
  const auto lanes = [](__m512i& a, __m512i& b, auto low, auto high) {
    const __m512i first = _mm512_maskz_shuffle_i32x4(~0, a, b, low);
    b = _mm512_maskz_shuffle_i32x4(~0, a, b, high), a = first;
  };
  constexpr std::integral_constant<int, 0x44> first_half;
  constexpr std::integral_constant<int, 0xee> second_half;
  constexpr std::integral_constant<int, 0x88> evens;
  constexpr std::integral_constant<int, 0xdd> odds;
  if constexpr (W == 2) {
    lanes(part[0], part[1], first_half, second_half);
  } else if constexpr (W == 4) {
    lanes(part[0], part[1], first_half, second_half);
    lanes(part[2], part[3], first_half, second_half);
    lanes(part[0], part[2], evens, odds);
    lanes(part[1], part[3], evens, odds);
    std::swap(part[1], part[2]);
  } else {  // two parts to a lane: as pairs of them first
    __m512i pairs[2][W / 2];
    for (int i = 0; i < W / 2; ++i) {
      pairs[0][i] = _mm512_maskz_unpacklo_epi64(~0, part[2 * i], part[2 * i + 1]);
      pairs[1][i] = _mm512_maskz_unpackhi_epi64(~0, part[2 * i], part[2 * i + 1]);
    }
    turn_parts(pairs[0]);
    turn_parts(pairs[1]);
    for (int i = 0; i < W; ++i) part[i] = pairs[i % 2][i / 2];
  }
}

// function(width) for a width below kSide.
template <class F>
void with_narrow(int64_t width, F&& function) {
  if (width == 8) return function(std::integral_constant<int, 8>{});
  if (width == 4) return function(std::integral_constant<int, 4>{});
  function(std::integral_constant<int, 2>{});
}

// A number for each key to all its W lanes.
template <int W>
Vec repeat(const float* numbers) {
  BitVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i / W;
  return (Vec)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)lane, (__m512)load(numbers));
}

// kLanes numbers [W, kLanes / W] in the order [kLanes / W, W].
template <int W>
Vec rows_last(Vec rows) {
  BitVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i % W * (kLanes / W) + i / W;
  return (Vec)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)lane, (__m512)rows);
}

// Queries [W, dim] as B tiles, one for each kDepth dims.
template <int W>
void pack_narrow_queries(const bf16* queries, int64_t dim, bool turned, bf16* out) {
  for (int64_t d = 0; d < dim; d += kDepth) {
    __m512i pairs[W];
    for (int row = 0; row < W; ++row) {
      const bf16* from = queries + row * dim + d;
      const auto both = [&](const bf16* first, auto order) {
        return _mm512_maskz_shuffle_i32x4(~0, _mm512_loadu_si512(first), _mm512_loadu_si512(first + kDepth), order);
      };
      if (turned && d % kCodesAtOnce) {
        pairs[row] = both(from - kDepth, std::integral_constant<int, 0xdd>{});
      } else if (turned && d + kCodesAtOnce <= dim) {
        pairs[row] = both(from, std::integral_constant<int, 0x88>{});
      } else {
        pairs[row] = _mm512_loadu_si512(from);
      }
    }
    turn_parts<W>(pairs);
    for (int i = 0; i < W; ++i, out += kPair) _mm512_storeu_si512(out, (__m512i)rows_last<W>((Vec)pairs[i]));
  }
}

// A row of sums that is turned, in the order of its dims.
inline void turn_back(float* row, int64_t dims) {
  constexpr int64_t kPlaces = kCodesAtOnce / kTogether;
  for (; dims >= kCodesAtOnce; dims -= kCodesAtOnce, row += kCodesAtOnce) {
    float turned[kPlaces][kTogether];
    std::memcpy(turned, row, sizeof turned);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kPlaces; ++i)
      std::memcpy(row + i * kTogether, turned[i % 2 * kPlaces / 2 + i / 2], sizeof *turned);
  }
}

// Scores of kNarrowKeys keys, each times its key's factor.
template <int W>
void multiply_narrow(float* scores, const float* factors) {
  for (int64_t n = 0; n < kNarrowKeys; n += kLanes / W, scores += kLanes)
    store(scores, load(scores) * repeat<W>(factors + n));
}

// Weights of kNarrowKeys keys and W rows, one key after the other.
template <int W>
using NarrowWeights = Vec[kNarrowKeys * W / kLanes];

// soften (attention_loops.h) for up to kNarrowKeys keys, whose scores, one after the other, stay in registers. Weights
// are those times factor(weights, vector); keys past count weigh 0.
template <int W, class Factor>
[[gnu::always_inline]] inline void soften_narrow(const float* scores, int64_t count, float scale, float slack,
                                                 const Factor& factor, float* peak, float* total, float* decay,
                                                 NarrowWeights<W>& x) {
  constexpr int kVectors = std::extent_v<NarrowWeights<W>>;
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    const int64_t there = count * W - i * kLanes;
    const auto lanes = static_cast<__mmask16>(there >= kLanes ? ~0 : there <= 0 ? 0 : (1 << there) - 1);
    x[i] = (Vec)_mm512_mask_loadu_ps((__m512)broadcast(-kInfinity), lanes, scores + i * kLanes);
  }
  constexpr int kChains = std::min(4, kVectors);  // of comparisons that need not wait for each other
  Vec tops[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) tops[i % kChains] = i < kChains ? x[i] : larger(x[i], tops[i % kChains]);
  for (int c = 1; c < kChains; ++c) tops[0] = larger(tops[c], tops[0]);
  Vec top = tops[0];
  top = larger((Vec)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)top, (__m512)top, 0x4e), top);
  if (W <= 4) top = larger((Vec)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)top, (__m512)top, 0xb1), top);
  if (W <= 2) top = larger((Vec)_mm512_maskz_permute_ps(0xffff, (__m512)top, 0x4e), top);
  const Softening soft(top, load(peak), scale, slack);
  Vec sum = load(total) * soft.decay;
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    x[i] = soft.weight(x[i]);
    sum += x[i];
    x[i] = factor(x[i], i);
  }
  store(peak, soft.peak);
  store(total, sum);
  store(decay, soft.decay);
}

// Weights as A tiles: of kSide keys each, for even dims W rows and for odd ones W.
template <int W>
[[gnu::always_inline]] inline void place_beside(const NarrowWeights<W>& weights, float* out) {
  alignas(kLine) static constexpr RowsOfPairs<W> kRowsOfPairs;
  const __m512i order = _mm512_load_si512(kRowsOfPairs.order);
  __m512i row[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[W + i], (__m512)weights[i]);
    row[i] = _mm512_maskz_permutexvar_epi8(~0ull, order, halves);
  }
  turn_parts<W>(row);
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) store_beside((Vec)row[i], out + i * kSide, W);
}

// Rows at these offsets as bfloat16, one after the other, turned if kTurned.
template <class E, class Ahead>
void copy_halves(const char* first, const int64_t* offsets, int64_t count, int64_t dims, bf16* out, Ahead& ahead) {
  const int64_t at_once = kTurned<E> ? dims / kCodesAtOnce * kCodesAtOnce : 0;
  std::conditional_t<kTurned<E>, FindBytes<E>, int> find_bytes{};
  for (int64_t n = 0; n < count; ++n) {
    const E* row = reinterpret_cast<const E*>(first + offsets[n]);
    if constexpr (kTurned<E>) {
      for (int64_t d = 0; d < at_once; d += kCodesAtOnce, out += kCodesAtOnce) {
        __m512i low, high;
        to_halves(row + d, find_bytes, low, high);
        _mm512_storeu_si512(out, low);
        _mm512_storeu_si512(out + kPair, high);
      }
    }
    for (int64_t d = at_once; d < dims; d += kPair, out += kPair)
      _mm512_storeu_si512(out, (__m512i)load_halves(row + d / kPerByte<E>));
    if (!std::is_same_v<E, bf16>) ahead.step();  // of rows that could have been read in place no steps are counted
  }
}

// sums [dims / 32, 2 width, 16] = decay * sums + weights * values, of which there are `groups`.
template <class Ahead>
void weigh_narrow(const float* weights, int64_t width, const NarrowRows& values, int64_t groups, int64_t dims,
                  const float* decay, float* sums, Ahead& ahead) {
  const int64_t tile = 2 * width * kSide;
  for (int64_t row = 0; row < width; ++row) {
    if (decay[row] == 1.0f) continue;
    for (float* even = sums + row * kSide; even < sums + dims * width; even += tile) {
      float* odd = even + width * kSide;
      store(even, decay[row] * load(even));
      store(odd, decay[row] * load(odd));
    }
  }
  for (int64_t d = 0; d < dims; d += 2 * kDepth, sums += 2 * tile) {
    const bool two = d + kDepth < dims;
    tile_load<6>(sums, 64);
    if (two) tile_load<7>(sums + tile, 64);
    for (int64_t group = 0; group < groups; ++group) {
      tile_load<5>(weights + group * tile, 64);
      tile_load<3>(values.at[group] + d, values.row_bytes[group]);
      tile_multiply<6, 5, 3>();
      if (two) {
        tile_load<4>(values.at[group] + d + kDepth, values.row_bytes[group]);
        tile_multiply<7, 5, 4>();
      }
      ahead.step();
    }
    tile_store<6>(sums, 64);
    if (two) tile_store<7>(sums + tile, 64);
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
