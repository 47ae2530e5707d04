// Products of bfloat16 matrices, for attention with many rows: in AMX tiles, or in vectors where the CPU has none.
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

inline bool has_tiles() {
  static const bool found = isa() == Isa::amx;
  return found;
}

// What tiles measure: all 16 rows of 64 bytes, or for products with few rows 0 to 2 `width` columns of 32 bits, 3 and 4
// all, 5 to 7 twice `width` rows. Where dims share a scale (attention_nibbles.h): 0, 1 and 3 twice `width` rows, 4 to 6
// `width`.
struct TileShapes {
  int64_t width = kSide;
  bool shared = false;

  int64_t row_bytes(int tile) const { return tile < 3 && !shared ? 4 * width : 64; }
  int64_t rows(int tile) const {
    if (shared) return tile == 2 || tile == 7 ? kSide : tile < 4 ? 2 * width : width;
    return tile < 5 ? kSide : std::min(kSide, 2 * width);
  }
};

#ifdef KVBACKEND_EMULATED_TILES  // ci/emulated.sh: the same loops over tiles in memory, where the CPU has none
inline thread_local uint8_t tiles_in_memory[8][kSide][64];
inline thread_local TileShapes tile_shapes;

struct TileScope {
  explicit TileScope(const TileShapes& shapes = {}) { tile_shapes = shapes; }
  ~TileScope() { tile_shapes = {}; }
};

template <int kTo>
void tile_zero() {
  std::memset(tiles_in_memory[kTo], 0, sizeof tiles_in_memory[kTo]);
}
template <int kTo>
void tile_load(const void* from, int64_t row_bytes) {
  for (int row = 0; row < tile_shapes.rows(kTo); ++row)
    std::memcpy(tiles_in_memory[kTo][row], static_cast<const char*>(from) + row * row_bytes,
                tile_shapes.row_bytes(kTo));
}
template <int kTo>
void tile_stream(const void* from, int64_t row_bytes) {
  tile_load<kTo>(from, row_bytes);
}
template <int kFrom>
void tile_store(void* to, int64_t row_bytes) {
  for (int row = 0; row < tile_shapes.rows(kFrom); ++row)
    std::memcpy(static_cast<char*>(to) + row * row_bytes, tiles_in_memory[kFrom][row], tile_shapes.row_bytes(kFrom));
}
template <int kC, int kA, int kB>
void tile_multiply() {
  auto* c = reinterpret_cast<float (*)[kSide]>(tiles_in_memory[kC]);
  auto* a = reinterpret_cast<const bf16(*)[kDepth]>(tiles_in_memory[kA]);
  auto* b = reinterpret_cast<const bf16(*)[kDepth]>(tiles_in_memory[kB]);
  for (int m = 0; m < tile_shapes.rows(kC); ++m)
    for (int k = 0; k < kDepth; ++k)
      for (int n = 0; n < tile_shapes.row_bytes(kC) / 4; ++n)
        c[m][n] += to_float(a[m][k]) * to_float(b[k / 2][2 * n + k % 2]);
}
#else
// Tiles, if there are any, are configured for this thread while one of these lives.
class TileScope {
 public:
  explicit TileScope(const TileShapes& shapes = {}) {
    if (!has_tiles()) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = static_cast<uint16_t>(shapes.row_bytes(tile));
      config.rows[tile] = static_cast<uint8_t>(shapes.rows(tile));
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  ~TileScope() {
    if (has_tiles()) asm volatile("tilerelease" ::: "memory");
  }
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
template <int kTo>
void tile_stream(const void* from, int64_t row_bytes) {  // of rows that need not stay in L1
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(kTo) : "memory");
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

// What multiplies tiles falls asleep when it has had nothing to do for 300 ns, and takes as long to wake up (on Emerald
// Rapids, docs/performance.md). So loops over much else give it a product now and then, which nobody reads: of a tile
// that is cleared or loaded before use.
inline void keep_tiles_awake() {
#ifndef KVBACKEND_EMULATED_TILES
  if (has_tiles()) tile_multiply<0, 3, 2>();
#endif
}

// The same in vectors: sums[M][N], each of kSide columns, += M rows of A, a(m), times N tiles of B. A row's place
// serves for some pairs: M of them do not fit in registers.
template <int M, int N, class Rows>
[[gnu::always_inline]] inline void multiply(Vec (&sums)[M][N], const Rows& a, const bf16* const (&b)[N]) {
  constexpr int kPairs = 4 / N;
  for (int64_t pair = 0; pair < kSide; pair += kPairs) {
    __m512bh columns[kPairs][N];
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) columns[p][n] = (__m512bh)_mm512_loadu_si512(b[n] + (pair + p) * kDepth);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const bf16* row = a(m) + 2 * pair;
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        int32_t two;
        std::memcpy(&two, row + 2 * p, sizeof two);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
          sums[m][n] = (Vec)_mm512_dpbf16_ps((__m512)sums[m][n], (__m512bh)_mm512_set1_epi32(two), columns[p][n]);
      }
    }
  }
}

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

}  // namespace kvbackend::KVBACKEND_ISA
