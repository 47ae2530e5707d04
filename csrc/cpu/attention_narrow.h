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

// Weights [count, width] as A tiles, one for each kDepth keys: rows are rows. Keys past count weigh 0.
inline void pack_narrow_weights(const float* weights, int64_t count, int64_t width, bf16* out) {
  alignas(kLine) static constexpr uint16_t kTurns[2 * kDepth] = {
      0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
      44, 46, 48, 50, 52, 54, 56, 58, 60, 62, 1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23,
      25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i evens = _mm512_load_si512(kTurns), odds = _mm512_load_si512(kTurns + kDepth);
  for (int64_t n = 0; n < count; n += kDepth, out += width * kDepth, weights += width * kDepth) {
    const int64_t left = (count - n) * width;
    const auto lanes = [&](int64_t first) {
      const int64_t there = std::clamp<int64_t>(left - first, 0, kLanes);
      return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << there) - 1), weights + first);
    };
    __m512i part[8];
    for (int64_t i = 0; i < width; ++i)
      part[i] = (__m512i)_mm512_cvtne2ps_pbh(lanes((2 * i + 1) * kLanes), lanes(2 * i * kLanes));
    for (int64_t size = width; size > 1; size /= 2) {  // the rows of each part into even ones and odd ones
      for (int64_t first = 0; first < width; first += size) {
        __m512i turned[8];
        for (int64_t i = 0; i < size / 2; ++i) {
          const __m512i a = part[first + 2 * i], b = part[first + 2 * i + 1];
          turned[i] = _mm512_maskz_permutex2var_epi16(~0u, a, evens, b);
          turned[size / 2 + i] = _mm512_maskz_permutex2var_epi16(~0u, a, odds, b);
        }
        std::copy_n(turned, size, part + first);
      }
    }
    for (int64_t i = 0; i < width; ++i) {
      const int64_t row = width == 8 ? i % 2 * 4 + i / 2 % 2 * 2 + i / 4 : width == 4 ? i % 2 * 2 + i / 2 : i;
      _mm512_storeu_si512(out + row * kDepth, part[i]);
    }
  }
}

// Where packed values go: from one tile to the next, and the first one's place. Rows a multiple of 2 KiB apart are read
// from the same few lines of each 2 KiB, all heads one after the other; a store to such a place of its 4 KiB delays the
// reading. So tiles then lie in the other half of each 2 KiB.
struct PackedPlace {
  static constexpr int64_t kApart = 2048, kHalf = kApart / 2;  // bytes
  int64_t tile = kTileNumbers, first = 0;

  PackedPlace() = default;
  PackedPlace(const void* values, int64_t row_bytes, int64_t dims) {
    if (row_bytes % kApart || dims * static_cast<int64_t>(sizeof(bf16)) > kHalf) return;
    tile = kApart / sizeof(bf16);
    first = reinterpret_cast<uintptr_t>(values) % kApart < kHalf ? kHalf / sizeof(bf16) : 0;
  }
};

constexpr int64_t kNarrowValues = kTile;  // floats of packed values for each dim, and how many more
constexpr int64_t kNarrowRoom = (PackedPlace::kHalf + PackedPlace::kApart) / sizeof(float);

// All columns of rows of values as B tiles [count / 32, dims / 16]. The unpacking leaves the columns of each two tiles
// in an order of its own, which unpair_sums undoes. Rows past count become 0.
template <class E, class Ahead>
void pack_narrow_values(const E* const* rows, int64_t count, int64_t dims, const PackedPlace& place, bf16* out,
                        Ahead& ahead) {
  for (int64_t n = 0; n < round_up(count, kDepth); n += 2) {
    ahead.step();
    bf16* tiles = out + place.first + n / kDepth * (dims / kSide) * place.tile + n % kDepth * kSide;
#pragma GCC unroll 4
    for (int64_t d = 0; d < dims; d += kDepth, tiles += 2 * place.tile) {
      const __m512i x = n < count ? (__m512i)load_halves(rows[n] + d / kPerByte<E>) : __m512i{};
      const __m512i y = n + 1 < count ? (__m512i)load_halves(rows[n + 1] + d / kPerByte<E>) : __m512i{};
      _mm512_storeu_si512(tiles, _mm512_maskz_unpacklo_epi16(~0u, x, y));
      _mm512_storeu_si512(tiles + place.tile, _mm512_maskz_unpackhi_epi16(~0u, x, y));
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
void weigh_narrow_head(const bf16* weights, int64_t width, const bf16* values, const PackedPlace& place, int64_t count,
                       int64_t dims, const float* decay, float* sums, Ahead& ahead) {
  for (int64_t row = 0; row < width; ++row) {
    float* own = sums + row * kSide;
    for (int64_t d = 0; decay[row] != 1.0f && d < dims; d += kSide)
      store(own + d * width, decay[row] * load(own + d * width));
  }
  for (int64_t d = 0; d < dims; d += kDepth) {
    float *low = sums + d * width, *high = low + kSide * width;
    tile_load<6>(low, 64);
    tile_load<7>(high, 64);
    for (int64_t n = 0; n < count; n += kDepth) {
      ahead.step();
      const bf16* packed = values + place.first + (n / kDepth * dims + d) / kSide * place.tile;
      tile_load<5>(weights + n * width, 64);
      tile_load<3>(packed, 64);
      tile_multiply<6, 5, 3>();
      tile_load<4>(packed + place.tile, 64);
      tile_multiply<7, 5, 4>();
    }
    tile_store<6>(low, 64);
    tile_store<7>(high, 64);
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
