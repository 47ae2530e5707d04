// Attention of few rows in tiles: what attention_pairs.h does in vectors. A product takes the time of 16 keys, however
// few rows meet them: for four rows an eighth of what vectors take.
//
// Scores [count, width] are tiles of `width` columns, whose A is the keys where they lie, if 16 of them follow each
// other. Sums [width, dims] are tiles of `width` rows, whose B is values packed as they are read. Numbers: scores and
// sums in float, weights rounded to bfloat16.
#pragma once

#include "attention_pairs.h"
#include "attention_tiles.h"

namespace kvbackend::KVBACKEND_ISA {

// Queries [width, dim] as B tiles, one for each kDepth dims.
inline void pack_narrow_queries(const bf16* queries, int64_t width, int64_t dim, bf16* out) {
  for (int64_t pair = 0; pair < dim; pair += 2) {
    for (int64_t row = 0; row < width; ++row, out += 2) std::copy_n(queries + row * dim + pair, 2, out);
  }
}

// Scores of `count` keys, of which groups of 16 are read, two at a time.
template <class Ahead>
void score_narrow(const KeyTiles::Part& keys, int64_t count, const bf16* queries, int64_t width, float* scores,
                  Ahead& ahead) {
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(float));
  for (int64_t group = 0; group * kSide < count; group += 2) {
    tile_zero<0>();
    tile_zero<1>();
    for (int64_t d = 0; d < keys.dims; d += kDepth) {
      ahead.step();
      tile_load<2>(queries + d * width, row_bytes);
      tile_load<3>(keys.at[group] + d, keys.row_bytes[group]);
      tile_multiply<0, 3, 2>();
      tile_load<4>(keys.at[group + 1] + d, keys.row_bytes[group + 1]);
      tile_multiply<1, 4, 2>();
    }
    tile_store<0>(scores + group * kSide * width, row_bytes);
    tile_store<1>(scores + (group + 1) * kSide * width, row_bytes);
  }
}

// The rows of a kv head that come next: of its keys and values the first half and the second side by side, a line of
// each at a time, as evenly as the work on others goes. A core reads four streams faster than one.
class NextRows {
 public:
  NextRows() = default;
  NextRows(const char* keys, const char* values, const Keys& tile, int64_t row_bytes, int64_t steps)
      : keys_(keys),
        values_(values),
        tile_(&tile),
        row_bytes_(row_bytes),
        rows_(tile.count ? kSide : 0),
        steps_(steps) {}

  void step() {
    for (due_ += kSide; due_ >= steps_ && row_ < rows_; due_ -= steps_, ++row_) {
      const char* first[] = {keys_ + tile_->key[row_], values_ + tile_->value[row_], keys_ + tile_->key[kSide + row_],
                             values_ + tile_->value[kSide + row_]};
      for (int64_t at = 0; at < row_bytes_; at += kLine) {
        for (const char* row : first) __builtin_prefetch(row + at, 0, 2);
      }
    }
  }

 private:
  const char *keys_ = nullptr, *values_ = nullptr;
  const Keys* tile_ = nullptr;
  int64_t row_bytes_ = 0, rows_ = 0, row_ = 0;
  int64_t steps_ = 1, due_ = 0;
};

constexpr int64_t kNarrowKeys = kDepth;  // attended to at once

// Where the numbers of 32 / W keys and W rows go, so that rows are rows: bytes of a vector.
template <int W>
struct RowsOfKeys {
  uint8_t order[2 * kDepth] = {};
  constexpr RowsOfKeys() {
    for (int row = 0, to = 0; row < W; ++row) {
      for (int key = 0; key < kDepth / W; ++key) {
        for (int byte = 0; byte < 2; ++byte) order[to++] = static_cast<uint8_t>(2 * (key * W + row) + byte);
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

// soften (attention_loops.h) for up to kDepth keys, whose scores, one after the other, stay in registers. Weights,
// times factor(weights, vector), go to `out` as an A tile: rows are rows. Keys past count weigh 0.
template <int W, class Factor>
void soften_narrow(const float* scores, int64_t count, float scale, float slack, const Factor& factor, float* peak,
                   float* total, float* decay, bf16* out) {
  constexpr int kVectors = kDepth * W / kLanes;
  Vec x[kVectors];
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
  alignas(kLine) static constexpr RowsOfKeys<W> kRowsOfKeys;
  const __m512i order = _mm512_load_si512(kRowsOfKeys.order);
  __m512i part[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)x[2 * i + 1], (__m512)x[2 * i]);
    part[i] = _mm512_maskz_permutexvar_epi8(~0ull, order, halves);
  }
  turn_parts<W>(part);
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) _mm512_storeu_si512(out + i * kDepth, part[i]);
}

// A row as bfloat16.
template <class E>
void copy_halves(const E* row, int64_t dims, bf16* out) {
  int64_t d = 0;
#if defined(__AVX512VBMI__)
  if constexpr (std::is_same_v<E, e4m3>) {
    for (; d + 2 * kPair <= dims; d += 2 * kPair) {
      __m512i first, second;
      to_halves(load_codes(row + d), first, second);
      _mm512_storeu_si512(out + d, first);
      _mm512_storeu_si512(out + d + kPair, second);
    }
  }
#endif
  for (; d < dims; d += kPair) _mm512_storeu_si512(out + d, (__m512i)load_halves(row + d / kPerByte<E>));
}

// Two rows of values as a row each of B tiles [dims / 16]. The unpacking leaves the columns of each two tiles in an
// order of its own, which unpair_sums undoes. The second row may be left out: then it is 0.
template <class E>
void pack_two(const E* a, const E* b, int64_t dims, bf16* tiles) {
  int64_t d = 0;
#if defined(__AVX512VBMI__)
  if constexpr (std::is_same_v<E, e4m3>) {
    for (; d + 2 * kPair <= dims; d += 2 * kPair, tiles += 4 * kTileNumbers) {
      const __m512i x = load_codes(a + d), y = b ? load_codes(b + d) : __m512i{};
      __m512i pairs[4];
      to_halves(_mm512_maskz_unpacklo_epi8(~0ull, x, y), pairs[0], pairs[1]);
      to_halves(_mm512_maskz_unpackhi_epi8(~0ull, x, y), pairs[2], pairs[3]);
      for (int i = 0; i < 4; ++i) _mm512_storeu_si512(tiles + i * kTileNumbers, pairs[i]);
    }
  }
#endif
#pragma GCC unroll 4
  for (; d < dims; d += kPair, tiles += 2 * kTileNumbers) {
    const __m512i x = (__m512i)load_halves(a + d / kPerByte<E>);
    const __m512i y = b ? (__m512i)load_halves(b + d / kPerByte<E>) : __m512i{};
    _mm512_storeu_si512(tiles, _mm512_maskz_unpacklo_epi16(~0u, x, y));
    _mm512_storeu_si512(tiles + kTileNumbers, _mm512_maskz_unpackhi_epi16(~0u, x, y));
  }
}

// Rows of values, kNarrowKeys of them, as B tiles [dims / 16]. Those past count become 0.
template <class E, class Ahead>
void pack_narrow_values(const E* const* rows, int64_t count, int64_t dims, bf16* out, Ahead& ahead) {
  for (int64_t n = 0; n < kNarrowKeys; n += 2, out += kDepth) {
    ahead.step();
    if (n < count) {
      pack_two(rows[n], n + 1 < count ? rows[n + 1] : nullptr, dims, out);
    } else {
      for (int64_t d = 0; d < dims; d += kSide) _mm512_storeu_si512(out + d * kDepth, __m512i{});
    }
  }
}

// A row of sums [width, dims], which lie as tiles side by side, in the order of its dims.
inline void unpack_narrow_sums(const float* sums, int64_t row, int64_t width, int64_t dims, float* out) {
  for (int64_t d = 0; d < dims; d += kSide) store(out + d, load(sums + d * width + row * kSide));
  unpair_sums(out, dims, out);
}

// sums [width, dims] = decay * sums + packed weights * packed values.
template <class Ahead>
void weigh_narrow(const bf16* weights, int64_t width, const bf16* values, int64_t dims, const float* decay, float* sums,
                  Ahead& ahead) {
  for (int64_t row = 0; row < width; ++row) {
    float* own = sums + row * kSide;
    for (int64_t d = 0; decay[row] != 1.0f && d < dims; d += kSide)
      store(own + d * width, decay[row] * load(own + d * width));
  }
  for (int64_t d = 0; d < dims; d += kDepth) {
    ahead.step();
    float *low = sums + d * width, *high = low + kSide * width;
    tile_load<6>(low, 64);
    tile_load<7>(high, 64);
    tile_load<5>(weights, 64);
    tile_load<3>(values + d * kDepth, 64);
    tile_multiply<6, 5, 3>();
    tile_load<4>(values + (d + kSide) * kDepth, 64);
    tile_multiply<7, 5, 4>();
    tile_store<6>(low, 64);
    tile_store<7>(high, 64);
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
