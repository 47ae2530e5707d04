// Attention of few rows in tiles over codes of 4 bits with scales of groups: what attention_narrow.h does with numbers
// of bfloat16.
//
// Codes become bfloat16 32 at a time, by a shift and a lookup. To multiply them with their scales would take longer
// than that, so sums are: a product is one of 16 dims, which share a scale. For scores, A has the queries of each 16
// dims as rows of their own, with a 0 for each dim of their neighbours; so a tile of 32 dims gives two rows for each
// query. For values, A has the weights times the scales, for each 16 dims anew.
//
// 16 bytes of a row are a piece: 32 dims. In tiles its dims are in an order of their own, which the queries have too,
// and which unpack_pieces undoes.
//
// Numbers: scores and sums in float, weights times scales rounded to bfloat16.
#pragma once

#include "attention_narrow.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t kShared = 16;      // dims at least that share a scale
constexpr int64_t kPieceBytes = 16;  // of kDepth codes

// The values of codes as bfloat16, twice: a lookup minds 5 bits, and the fifth is a neighbour's.
struct HalvesOfNibbles {
  alignas(64) uint16_t bits[32] = {};
  constexpr HalvesOfNibbles() {
    constexpr uint16_t magnitudes[] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    for (int code = 0; code < 32; ++code) bits[code] = static_cast<uint16_t>(magnitudes[code % 8] | (code & 8) << 12);
  }
};
inline constexpr HalvesOfNibbles kHalvesOfNibbles;

// What the low nibble of each 16 bits stands for.
inline __m512i halves_of_nibbles(__m512i codes) {
  return _mm512_maskz_permutexvar_epi16(~0u, codes, _mm512_load_si512(kHalvesOfNibbles.bits));
}

// Where the dims of a piece go: each 4 bytes of it hold 8 dims, of which the first 4 lie beside the last 4.
struct OrderOfPiece {
  alignas(64) uint16_t dim[kDepth] = {};
  constexpr OrderOfPiece() {
    for (int pair = 0; pair < kDepth / 2; ++pair) {
      for (int half = 0; half < 2; ++half)
        dim[2 * pair + half] = static_cast<uint16_t>(pair / 4 * 8 + pair % 4 + half * 4);
    }
  }
};

// Queries [width, dim] as A tiles of 2 * width rows, one for each piece: all queries of its first 16 dims, then all of
// its last.
inline void pack_shared_queries(const bf16* queries, int64_t width, int64_t dim, bf16* out) {
  static constexpr OrderOfPiece kOrderOfPiece;
  const __m512i order = _mm512_load_si512(kOrderOfPiece.dim);
  for (int64_t piece = 0; piece < dim; piece += kDepth, out += 2 * width * kDepth) {
    for (int64_t row = 0; row < width; ++row) {
      const __m512i all = _mm512_loadu_si512(queries + row * dim + piece);
      _mm512_storeu_si512(out + row * kDepth, _mm512_maskz_permutexvar_epi16(0x0000ffff, order, all));
      _mm512_storeu_si512(out + (width + row) * kDepth, _mm512_maskz_permutexvar_epi16(0xffff0000, order, all));
    }
  }
}

// Of 16 rows of codes the same piece, 4 bytes of each in a vector.
inline void load_pieces(const char* first, const int64_t* offsets, Vec (&out)[4]) {
  Vec row[4];  // every fourth row
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto piece = [&](int lane) {
      return _mm_loadu_ps(reinterpret_cast<const float*>(first + offsets[4 * lane + i]));
    };
    __m512 lanes = _mm512_maskz_broadcast_f32x4(0xffff, piece(0));
    lanes = _mm512_maskz_insertf32x4(0xffff, lanes, piece(1), 1);
    lanes = _mm512_maskz_insertf32x4(0xffff, lanes, piece(2), 2);
    row[i] = (Vec)_mm512_maskz_insertf32x4(0xffff, lanes, piece(3), 3);
  }
  const Vec a = mix_quads<0, 4, 1, 5>(row[0], row[1]), b = mix_quads<2, 6, 3, 7>(row[0], row[1]);
  const Vec c = mix_quads<0, 4, 1, 5>(row[2], row[3]), d = mix_quads<2, 6, 3, 7>(row[2], row[3]);
  out[0] = mix_quads<0, 1, 4, 5>(a, c), out[1] = mix_quads<2, 3, 6, 7>(a, c);
  out[2] = mix_quads<0, 1, 4, 5>(b, d), out[3] = mix_quads<2, 3, 6, 7>(b, d);
}

// Rows of codes of kNarrowKeys keys as B tiles [2, dims / 32], whose columns are 16 keys.
template <class Ahead>
void key_pieces(const char* first, const int64_t* offsets, int64_t dims, bf16* out, Ahead& ahead) {
  for (int64_t n = 0; n < kNarrowKeys; n += kSide) {
    for (int64_t at = 0; at < dims / 2; at += kPieceBytes) {
      Vec codes[4];
      keep_tiles_awake();
      load_pieces(first + at, offsets + n, codes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
        for (int nibble = 0; nibble < 4; ++nibble, out += kDepth)
          _mm512_storeu_si512(out, halves_of_nibbles(_mm512_maskz_srli_epi16(~0u, (__m512i)codes[i], 4 * nibble)));
      }
      if (n) ahead.step();
    }
  }
}

// The same of values as B tiles [dims / 16], whose columns are the 16 dims that share a scale: each fourth of them side
// by side.
template <class Ahead>
void value_pieces(const char* first, const int64_t* offsets, int64_t dims, bf16* out, Ahead& ahead) {
  constexpr int64_t k4 = 0x0004000400040004, k8 = 2 * k4, k12 = 3 * k4;
  const __m512i shifts = _mm512_setr_epi64(0, 0, k4, k4, k8, k8, k12, k12);
  const auto piece = [&](int64_t n) {
    const __m128 row = _mm_loadu_ps(reinterpret_cast<const float*>(first + offsets[n]));
    return (__m512i)_mm512_maskz_broadcast_f32x4(0xffff, row);
  };
  for (int64_t at = 0; at < dims / 2; at += kPieceBytes, first += kPieceBytes, out += 2 * kTileNumbers) {
    keep_tiles_awake();
    for (int64_t n = 0; n < kNarrowKeys; n += 2) {
      const __m512i a = piece(n), b = piece(n + 1);
      const auto halves = [&](__m512i codes) { return halves_of_nibbles(_mm512_maskz_srlv_epi16(~0u, codes, shifts)); };
      _mm512_storeu_si512(out + n * kSide, halves(_mm512_maskz_unpacklo_epi16(~0u, a, b)));
      _mm512_storeu_si512(out + kTileNumbers + n * kSide, halves(_mm512_maskz_unpackhi_epi16(~0u, a, b)));
    }
    ahead.step();
  }
}

// The reverse of rows_last.
template <int W>
Vec rows_first(Vec rows) {
  return rows_last<kLanes / W>(rows);
}

// Products [2, dims / 32, 2 * width, 16 keys] of what key_pieces made and the queries.
template <class Ahead>
void multiply_pieces(const bf16* keys, int64_t dims, const bf16* queries, int64_t width, float* products,
                     Ahead& ahead) {
  const int64_t pieces = dims / kDepth, rows = 2 * width;
  for (int64_t i = 0; i < pieces; ++i) {
    tile_load<3>(queries + i * rows * kDepth, 64);
    tile_zero<0>();
    tile_load<2>(keys + i * kTileNumbers, 64);
    tile_multiply<0, 3, 2>();
    tile_zero<1>();
    tile_load<7>(keys + (pieces + i) * kTileNumbers, 64);
    tile_multiply<1, 3, 7>();
    tile_store<0>(products + i * rows * kSide, 64);
    tile_store<1>(products + (pieces + i) * rows * kSide, 64);
    ahead.step();
  }
}

// Scores [kNarrowKeys, W]: products times scales [2, dims / 16, 16 keys], added up.
template <int W, class Scale>
void add_products(const float* products, const Scale* scales, int64_t dims, float* scores) {
  for (int64_t half = 0; half < 2; ++half) {
    Vec sums[W] = {};
    for (int64_t d = 0; d < dims; d += kShared, products += W * kSide, scales += kSide) {
      const Vec scale = load(scales);
#pragma GCC unroll 8
      for (int row = 0; row < W; ++row) sums[row] += load(products + row * kSide) * scale;
    }
    __m512i row[W];
    for (int i = 0; i < W; ++i) row[i] = (__m512i)sums[i];
    turn_parts<W>(row);
    for (int i = 0; i < W; ++i, scores += kLanes) store(scores, rows_last<W>((Vec)row[i]));
  }
}

// Weights times scales, as above, of each 16 of `dims`: A tiles of W rows.
template <int W, class Scale>
[[gnu::always_inline]] inline void scale_weights(const NarrowWeights<W>& weights, const Scale* scales, int64_t dims,
                                                 bf16* out) {
  __m512i half[2][W];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 8
    for (int row = 0; row < W; ++row) half[i][row] = (__m512i)rows_first<W>(weights[i * W + row]);
    turn_parts<W>(half[i]);
  }
  const int64_t shared = dims / kShared;
  for (int64_t i = 0; i < shared; ++i, scales += kSide) {
    const Vec first = load(scales), second = load(scales + shared * kSide);
#pragma GCC unroll 8
    for (int row = 0; row < W; ++row, out += kDepth) {
      const Vec a = (Vec)half[0][row] * first, b = (Vec)half[1][row] * second;
      _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
    }
  }
}

// sums [dims / 16, width, 16] = decay * sums + weights * values, as made above.
template <class Ahead>
void weigh_pieces(const bf16* weights, int64_t width, const bf16* values, int64_t dims, const float* decay, float* sums,
                  Ahead& ahead) {
  const int64_t tile = width * kSide;
  for (int64_t row = 0; row < width; ++row) {
    if (decay[row] == 1.0f) continue;
    for (int64_t at = row * kSide; at < dims * width; at += tile) store(sums + at, decay[row] * load(sums + at));
  }
  for (int64_t d = 0; d < dims;
       d += kDepth, sums += 2 * tile, weights += 2 * width * kDepth, values += 2 * kTileNumbers) {
    tile_load<4>(sums, 64);
    tile_load<6>(weights, 64);
    tile_load<2>(values, 64);
    tile_multiply<4, 6, 2>();
    tile_load<5>(sums + tile, 64);
    tile_load<6>(weights + width * kDepth, 64);
    tile_load<7>(values + kTileNumbers, 64);
    tile_multiply<5, 6, 7>();
    tile_store<4>(sums, 64);
    tile_store<5>(sums + tile, 64);
    ahead.step();
  }
}

// A row of `rows` in the order of its dims.
inline void unpack_pieces(const float* sums, int64_t rows, int64_t dims, float* out) {
  for (int64_t d = 0; d < dims; d += kShared, sums += rows * kSide) store(out + d, rows_last<4>(load(sums)));
}

}  // namespace kvbackend::KVBACKEND_ISA
