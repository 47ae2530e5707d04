// Products of bfloat16 matrices in AMX tiles, for attention with many rows.
//
// A tile is 16 rows of 64 bytes. C[16, 16] of floats += A[16, 32] * B[32, 16] of bf16, where B's rows lie in pairs: its
// tile row p holds B[2 p, column], B[2 p + 1, column] for each column in turn.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "simd.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t kSide = 16;                     // rows of a tile, and columns of C
constexpr int64_t kDepth = 32;                    // what is summed over
constexpr int64_t kTileNumbers = kSide * kDepth;  // bf16 numbers of a tile

#ifdef KVBACKEND_EMULATED_TILES  // ci/amx_emulated.sh: the same loops over tiles in memory, where the CPU has none
struct TileScope {
  TileScope() {}
  ~TileScope() {}
};
inline thread_local uint8_t tiles_in_memory[8][kSide][64];

template <int kTo>
void tile_zero() {
  std::memset(tiles_in_memory[kTo], 0, sizeof tiles_in_memory[kTo]);
}
template <int kTo>
void tile_load(const void* from, int64_t row_bytes) {
  for (int row = 0; row < kSide; ++row)
    std::memcpy(tiles_in_memory[kTo][row], static_cast<const char*>(from) + row * row_bytes, 64);
}
template <int kFrom>
void tile_store(void* to, int64_t row_bytes) {
  for (int row = 0; row < kSide; ++row)
    std::memcpy(static_cast<char*>(to) + row * row_bytes, tiles_in_memory[kFrom][row], 64);
}
template <int kC, int kA, int kB>
void tile_multiply() {
  auto* c = reinterpret_cast<float (*)[kSide]>(tiles_in_memory[kC]);
  auto* a = reinterpret_cast<const bf16(*)[kDepth]>(tiles_in_memory[kA]);
  auto* b = reinterpret_cast<const bf16(*)[kDepth]>(tiles_in_memory[kB]);
  for (int m = 0; m < kSide; ++m)
    for (int k = 0; k < kDepth; ++k)
      for (int n = 0; n < kSide; ++n) c[m][n] += to_float(a[m][k]) * to_float(b[k / 2][2 * n + k % 2]);
}
#else
// Tiles are configured, for this thread, while one of these lives.
class TileScope {
 public:
  TileScope() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = kSide;
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  ~TileScope() { asm volatile("tilerelease" ::: "memory"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// Instructions with the tile's number as a template argument. The compiler's own name no memory.
template <int kTo>
void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTo));
}
template <int kTo>
void tile_load(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(kTo) : "memory");
}
template <int kFrom>
void tile_store(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(kFrom) : "memory");
}
template <int kC, int kA, int kB>
void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
#endif

// function(std::integral_constant<int, 0>), ..., < kCount: a loop over tile numbers.
template <int kCount, class F>
void each(F&& function) {
  if constexpr (kCount > 0) {
    each<kCount - 1>(function);
    function(std::integral_constant<int, kCount - 1>{});
  }
}

// 128-bit lanes of both vectors: `Order` numbers a's four, then b's four.
template <int... Order, int... Number>
Vec mix_lanes(Vec a, Vec b, std::integer_sequence<int, Number...>) {
  constexpr int order[] = {Order...};
  return __builtin_shufflevector(a, b, (order[Number / 4] * 4 + Number % 4)...);
}

// 16 x 16 numbers of 32 bits, of any kind: rows become columns.
inline void transpose(Vec rows[kSide]) {
  constexpr auto numbers = std::make_integer_sequence<int, 16>{};
  Vec t[kSide];
  for (int i = 0; i < 16; i += 2) {
    t[i] = mix_quads<0, 4, 1, 5>(rows[i], rows[i + 1]);
    t[i + 1] = mix_quads<2, 6, 3, 7>(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = mix_quads<0, 1, 4, 5>(t[i], t[i + 2]);
    rows[i + 1] = mix_quads<2, 3, 6, 7>(t[i], t[i + 2]);
    rows[i + 2] = mix_quads<0, 1, 4, 5>(t[i + 1], t[i + 3]);
    rows[i + 3] = mix_quads<2, 3, 6, 7>(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = mix_lanes<0, 2, 4, 6>(rows[i], rows[i + 4], numbers);
    t[i + 4] = mix_lanes<1, 3, 5, 7>(rows[i], rows[i + 4], numbers);
    t[i + 8] = mix_lanes<0, 2, 4, 6>(rows[i + 8], rows[i + 12], numbers);
    t[i + 12] = mix_lanes<1, 3, 5, 7>(rows[i + 8], rows[i + 12], numbers);
  }
  for (int i = 0; i < 8; ++i) {
    rows[i] = mix_lanes<0, 2, 4, 6>(t[i], t[i + 8], numbers);
    rows[i + 8] = mix_lanes<1, 3, 5, 7>(t[i], t[i + 8], numbers);
  }
}

// 16 queries [16, dim] as B tiles [dim / 32]: queries are columns.
inline void pack_queries(const bf16* queries, int64_t dim, bf16* out) {
  for (int64_t d = 0; d < dim; d += kDepth) {
    Vec rows[kSide];
    for (int64_t i = 0; i < kSide; ++i) std::memcpy(&rows[i], queries + i * dim + d, sizeof(Vec));
    transpose(rows);
    std::memcpy(static_cast<void*>(out + d * kSide), rows, sizeof rows);
  }
}

// Values [count, dims], a row every `row` numbers, as B tiles [kTile / 32, dims / 16]. The unpacking leaves the columns
// of each two tiles in an order of its own, which from_tiles undoes. Rows past count become 0.
template <class Ahead>
void pack_values(const bf16* values, int64_t row, int64_t dims, int64_t count, bf16* out, Ahead& ahead) {
  for (int64_t first = 0; first < count; first += kDepth) {
    for (int64_t d = 0; d < dims; d += kDepth) {
      ahead.step();
      bf16* tiles = out + (first * dims + d * kDepth);
      for (int64_t i = 0; i < kDepth; i += 2) {
        const int64_t n = first + i;
        const __m512i a = _mm512_maskz_loadu_epi16(n < count ? ~0u : 0, values + n * row + d);
        const __m512i b = _mm512_maskz_loadu_epi16(n + 1 < count ? ~0u : 0, values + (n + 1) * row + d);
        _mm512_storeu_si512(tiles + i * kSide, _mm512_maskz_unpacklo_epi16(~0u, a, b));
        _mm512_storeu_si512(tiles + i * kSide + kTileNumbers, _mm512_maskz_unpackhi_epi16(~0u, a, b));
      }
    }
  }
}

inline void from_tiles(const float* row, int64_t size, float* out) {
  constexpr auto numbers = std::make_integer_sequence<int, 16>{};
  for (int64_t d = 0; d < size; d += kDepth) {
    const Vec low = load(row + d), high = load(row + d + kSide);
    store(out + d, mix_lanes<0, 4, 1, 5>(low, high, numbers));
    store(out + d + kSide, mix_lanes<2, 6, 3, 7>(low, high, numbers));
  }
}

// Weights [count, width] as A tiles [width / 16, kTile / 32]: rows are rows, keys are columns. Keys past count weigh 0.
inline void pack_weights(const float* weights, int64_t width, int64_t count, int64_t key_tiles, bf16* out) {
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);  // a0 b0 a1 b1 ..
  for (int64_t row = 0; row < width; row += kSide) {
    for (int64_t n = 0; n < count; n += kDepth) {
      Vec keys[kSide];
      for (int64_t i = 0; i < kSide; ++i) {
        const float* key = weights + (n + 2 * i) * width + row;
        const __m512 a = _mm512_maskz_loadu_ps(n + 2 * i < count ? 0xffff : 0, key);
        const __m512 b = _mm512_maskz_loadu_ps(n + 2 * i + 1 < count ? 0xffff : 0, key + width);
        keys[i] = (Vec)_mm512_maskz_permutexvar_epi16(~0u, pairs, (__m512i)_mm512_cvtne2ps_pbh(b, a));
      }
      transpose(keys);
      std::memcpy(static_cast<void*>(out + (row / kSide * key_tiles + n / kDepth) * kTileNumbers), keys, sizeof keys);
    }
  }
}

// scores[key, row] of K tiles of keys x R tiles of rows, which stay in registers; the queries stay in L1 or L2.
template <int K, int R, class Ahead>
void score_block(const bf16* queries, int64_t dim, int64_t from, int64_t to, const bf16* keys, float* scores,
                 int64_t width, Ahead& ahead) {
  each<K * R>([](auto c) { tile_zero<c>(); });
  for (int64_t d = from; d < to; d += kDepth) {
    ahead.step();
    each<R>([&](auto r) { tile_load<6 + r>(queries + r * kSide * dim + d * kSide, 64); });
    each<K>([&](auto k) {
      tile_load<4 + k % 2>(keys + k * kSide * dim + d, dim * sizeof(bf16));
      each<R>([&](auto r) { tile_multiply<k * R + r, 4 + k % 2, 6 + r>(); });
    });
  }
  each<K>([&](auto k) {
    each<R>([&](auto r) { tile_store<k * R + r>(scores + k * kSide * width + r * kSide, width * sizeof(float)); });
  });
}

// Scores of dims [from, to) of keys [count, dim] and packed queries, for all rows. Keys up to a multiple of 64 are
// read.
template <class Ahead>
void score_tiles(const bf16* queries, int64_t dim, int64_t from, int64_t to, const bf16* keys, int64_t count,
                 float* scores, int64_t width, Ahead& ahead) {
  int64_t row = 0;
  for (; row + 2 * kSide <= width; row += 2 * kSide) {
    for (int64_t n = 0; n < count; n += 2 * kSide)
      score_block<2, 2>(queries + row * dim, dim, from, to, keys + n * dim, scores + n * width + row, width, ahead);
  }
  for (; row < width; row += kSide) {
    for (int64_t n = 0; n < count; n += 4 * kSide)
      score_block<4, 1>(queries + row * dim, dim, from, to, keys + n * dim, scores + n * width + row, width, ahead);
  }
}

// out[row, column] += weights * values, R tiles of rows x C tiles of columns in registers while the keys go by.
template <int R, int C, class Ahead>
void weigh_block(const bf16* weights, int64_t key_tiles, const bf16* values, int64_t count, int64_t dims, float* out,
                 Ahead& ahead) {
  each<R>([&](auto r) {
    each<C>([&](auto c) { tile_load<r * C + c>(out + r * kSide * dims + c * kSide, dims * sizeof(float)); });
  });
  for (int64_t n = 0; n < count; n += kDepth) {
    ahead.step();
    each<R>([&](auto r) { tile_load<4 + r>(weights + (r * key_tiles + n / kDepth) * kTileNumbers, 64); });
    each<C>([&](auto c) {
      tile_load<6 + c % 2>(values + n * dims + c * kTileNumbers, 64);
      each<R>([&](auto r) { tile_multiply<r * C + c, 4 + r, 6 + c % 2>(); });
    });
  }
  each<R>([&](auto r) {
    each<C>([&](auto c) { tile_store<r * C + c>(out + r * kSide * dims + c * kSide, dims * sizeof(float)); });
  });
}

// All rows and columns: packed weights [width / 16, key_tiles], packed values, out [width, dims]. A pair of tiles of
// columns stays in L1 for all rows.
template <class Ahead>
void weigh_tiles(const bf16* weights, int64_t key_tiles, int64_t width, const bf16* values, int64_t count, int64_t dims,
                 float* out, Ahead& ahead) {
  for (int64_t d = 0; d < dims; d += kDepth) {
    const bf16* columns = values + d * kDepth;
    int64_t row = 0;
    for (; row + 2 * kSide <= width; row += 2 * kSide)
      weigh_block<2, 2>(weights + row * kDepth * key_tiles, key_tiles, columns, count, dims, out + row * dims + d,
                        ahead);
    for (; row < width; row += kSide)
      weigh_block<1, 2>(weights + row * kDepth * key_tiles, key_tiles, columns, count, dims, out + row * dims + d,
                        ahead);
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
