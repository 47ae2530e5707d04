// Attention in products of bfloat16 matrices: scores of a tile of keys, and its values weighed.
//
// Rows lie in strips of kSide. A strip's scores are [kMostKeys, kSide], so that a vector holds one key's, and what its
// values add up to are tiles side by side: rows a power of two apart would share a few sets of the L1 cache.
//
// Keys are the rows of A where they lie, if 16 of them follow each other; queries are packed once. Values are packed
// as they are read. For a single strip that is too much work: its values are the rows of B where they lie. B wants two
// keys side by side, where a value has two dims. So A has the weights of 16 keys, beside each a 0: with the 0 second
// the products are even dims, with the 0 first odd ones, and each has its tiles. A value that is not finite makes its
// neighbour's sum NaN, as 0 times it is: who finds such a sum makes all again in another way.
//
// Numbers: scores and sums in float, weights rounded to bfloat16.
#pragma once

#include "amx.h"
#include "cached_rows.h"

namespace kvbackend::KVBACKEND_ISA {

// The keys of a tile, 16 at a time, in one or two parts of their dims.
struct KeyTiles {
  struct Part {
    int64_t dims;
    const bf16* row[kMostKeys];
    int64_t row_bytes[kMostKeys / kSide];  // from each to the next; 0: they lie apart, which vectors alone can read

    const bf16* at(int64_t group) const { return row[group * kSide]; }
  };
  Part part[2];
  int parts = 1;
};

// Queries [width, dim] of a kv head as B tiles, for each strip and each 32 dims: rows of the head are columns.
inline void pack_head(const bf16* queries, int64_t width, int64_t dim, bf16* out) {
  for (int64_t row = 0; row < width; row += kSide) pack_queries(queries + row * dim, dim, out + row * dim);
}

// function(part, d): every kDepth dims of the parts [first, last), d being where they are among those of the queries.
template <class F>
[[gnu::always_inline]] inline void each_depth(const KeyTiles& keys, int first, int last, F&& function) {
  int64_t start = first ? keys.part[0].dims : 0;
  for (int i = first; i < last; start += keys.part[i++].dims) {
    for (int64_t d = 0; d < keys.part[i].dims; d += kDepth) function(keys.part[i], d, start + d);
  }
}

constexpr int kSums = 16;  // that vectors keep in registers

// Scores of K x 16 keys from `group` on for R strips, some keys at a time. Of one strip, which is soon done, the next
// rows are asked for at all of them.
template <int K, int R, class Ahead>
void score_in_vectors(const KeyTiles& keys, int first, int last, int64_t group, const bf16* queries, int64_t dim,
                      float* scores, Ahead& ahead) {
  constexpr int kKeys = kSums / R;
  for (int64_t n = 0; n < K * kSide; n += kKeys) {
    const int64_t side = group + n / kSide, row = n % kSide;
    Vec sums[kKeys][R] = {};
    each_depth(keys, first, last, [&](const KeyTiles::Part& part, int64_t d, int64_t at) {
      if (R == 1 || n == 0) ahead.step();
      const bf16* strips[R];
      for (int r = 0; r < R; ++r) strips[r] = queries + r * kSide * dim + at * kSide;
      const bf16* const* rows = part.row + group * kSide + n;
      if (const int64_t apart = part.row_bytes[side] / static_cast<int64_t>(sizeof(bf16)); apart > 0) {
        multiply(sums, [&, first = rows[0] + d](int m) { return first + m * apart; }, strips);
      } else {
        multiply(sums, [&](int m) { return rows[m] + d; }, strips);
      }
    });
    for (int key = 0; key < kKeys; ++key) {
      for (int r = 0; r < R; ++r) store(scores + (r * kMostKeys + side * kSide + row + key) * kSide, sums[key][r]);
    }
  }
}

// The same, all in registers. Of many strips those of the keys stay in L1, and those of the queries go by.
template <int K, int R, class Ahead>
void score_in_tiles(const KeyTiles& keys, int first, int last, int64_t group, const bf16* queries, int64_t dim,
                    float* scores, Ahead& ahead) {
  each<K * R>([](auto c) { tile_zero<c>(); });
  each_depth(keys, first, last, [&](const KeyTiles::Part& part, int64_t d, int64_t at) {
    ahead.step();
    each<R>([&](auto r) { tile_stream<6 + r>(queries + r * kSide * dim + at * kSide, 64); });
    each<K>([&](auto k) {
      tile_load<4 + k % 2>(part.at(group + k) + d, part.row_bytes[group + k]);
      each<R>([&](auto r) { tile_multiply<k * R + r, 4 + k % 2, 6 + r>(); });
    });
  });
  each<K>([&](auto k) {
    each<R>([&](auto r) { tile_store<k * R + r>(scores + (r * kMostKeys + (group + k) * kSide) * kSide, 64); });
  });
}

// Scores of the parts [first, last) of `count` keys and the rows of a head. Up to 4 groups of keys are read.
template <class Ahead>
void score_head(const KeyTiles& keys, int first, int last, int64_t count, const bf16* queries, int64_t width,
                int64_t dim, float* scores, Ahead& ahead) {
  const int64_t groups = (count + kSide - 1) / kSide;
  const int64_t whole = width / (2 * kSide) * 2 * kSide;  // rows in pairs of strips
  const auto score_two = has_tiles() ? score_in_tiles<2, 2, Ahead> : score_in_vectors<2, 2, Ahead>;
  const auto score_one = has_tiles() ? score_in_tiles<4, 1, Ahead> : score_in_vectors<4, 1, Ahead>;
  for (int64_t group = 0; group < groups; group += 2) {  // two groups of keys stay in L1 for all of them
    for (int64_t row = 0; row < whole; row += 2 * kSide)
      score_two(keys, first, last, group, queries + row * dim, dim, scores + row * kMostKeys, ahead);
  }
  for (int64_t group = 0; whole < width && group < groups; group += 4)
    score_one(keys, first, last, group, queries + whole * dim, dim, scores + whole * kMostKeys, ahead);
}

// C tiles of columns, from dim d on, of rows of values: as B tiles [count / 32, C]. The unpacking leaves the columns of
// each two tiles in an order of its own, which unpack_sums undoes. Rows past count become 0.
template <int C, class Ahead>
void pack_values(const bf16* const* rows, int64_t d, int64_t count, bf16* out, Ahead& ahead) {
  for (int64_t n = 0; n < round_up(count, kDepth); n += 2) {
    if (C == 4 && n % kDepth == 0 && has_tiles()) ahead.step();  // of one strip, which is soon done
    const __mmask32 has_a = n < count ? ~0u : 0, has_b = n + 1 < count ? ~0u : 0;
    const bf16 *a = rows[n] + d, *b = rows[n + 1] + d;
    bf16* tiles = out + n / kDepth * C * kTileNumbers + n % kDepth * kSide;
#pragma GCC unroll 4
    for (int c = 0; c < C; c += 2, tiles += 2 * kTileNumbers) {
      const __m512i x = _mm512_maskz_loadu_epi16(has_a, a + c * kSide);
      const __m512i y = _mm512_maskz_loadu_epi16(has_b, b + c * kSide);
      _mm512_storeu_si512(tiles, _mm512_maskz_unpacklo_epi16(~0u, x, y));
      _mm512_storeu_si512(tiles + kTileNumbers, _mm512_maskz_unpackhi_epi16(~0u, x, y));
    }
  }
}

// A row of sums in the order of its dims, from a strip's tiles that begin with it.
inline void unpack_sums(const float* sums, int64_t dims, float* out) {
  constexpr auto numbers = std::make_integer_sequence<int, 16>{};
  for (int64_t d = 0; d < dims; d += kDepth) {
    const Vec low = load(sums + d * kSide), high = load(sums + (d + kSide) * kSide);
    store(out + d, mix_lanes<0, 4, 1, 5>(low, high, numbers));
    store(out + d + kSide, mix_lanes<2, 6, 3, 7>(low, high, numbers));
  }
}

// 2^x within 2 ulp for x that is not far above 0; 0 where that is not a normal number, which would take long, NaN for
// NaN. x = n + r, 0 <= r < 1.
inline Vec exp2_small(Vec x) {
  const Vec r = (Vec)_mm512_maskz_reduce_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p = r * 1.86713028e-3f + 9.01702978e-3f;
  p = p * r + 5.57999127e-2f;
  p = p * r + 2.40164444e-1f;
  p = p * r + 6.93151295e-1f;
  p = p * r + 1.0f;
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(-126.0f), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);  // by 2^n
}

inline Vec larger(Vec a, Vec b) { return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b); }

// How scores become weights in soften (attention_loops.h): by the highest and the peak before, in powers of two.
struct Softening {
  Softening(Vec highest, Vec before, float scale, float slack) {
    const Vec top = scale * highest;
    peak = top > before + slack ? top : before;
    const Vec base = peak > -kInfinity ? peak : Vec{};  // nothing seen yet: all weights shall be 0, not NaN
    const Vec seen = exp2_small((before - base) * kLog2e);
    decay = before > -kInfinity ? seen : broadcast(1.0f);  // of nothing: that takes no decay
    scale2 = scale * kLog2e;
    base2 = base * kLog2e;
  }

  Vec weight(Vec score) const { return exp2_small(scale2 * score - base2); }

  static constexpr float kLog2e = 1.44269504f;
  Vec peak, decay, base2;
  float scale2;
};

// A row of weights of two times kSide keys, in pairs of both, as a row of A tiles for weigh_beside.
inline void store_beside(Vec pairs, float* out, int64_t rows) {
  const BitVec both = (BitVec)pairs;
  store(out, (Vec)(both & 0xffff));
  store(out + rows * kSide, (Vec)(both << 16));
  store(out + 2 * rows * kSide, (Vec)(both >> 16));
  store(out + 3 * rows * kSide, (Vec)(both & 0xffff0000));
}

// soften for a strip of scores [count, kSide]. Its weights, times the factors of their keys if
// there are any, go as A tiles to `out`, for weigh_beside, or else [count / 32]: rows are rows, keys are columns. Keys
// past count weigh 0.
template <bool kBeside, class Factor>
void soften_strip(float* scores, int64_t count, float scale, float slack, const Factor& factor, float* peak,
                  float* total, float* decay, bf16* out) {
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);  // a0 b0 a1 b1 ..
  const int64_t whole = round_up(count, kDepth);
  std::fill(scores + count * kSide, scores + whole * kSide, -kInfinity);
  constexpr int kChains = 4;  // of comparisons that need not wait for each other
  Vec tops[kChains] = {broadcast(-kInfinity), broadcast(-kInfinity), broadcast(-kInfinity), broadcast(-kInfinity)};
  for (int64_t n = 0; n < whole; n += kChains) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) tops[c] = larger(load(scores + (n + c) * kSide), tops[c]);
  }
  const Softening soft(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])), load(peak), scale, slack);
  Vec sum = load(total) * soft.decay;
  for (int64_t n = 0; n < whole; n += kDepth) {
    Vec keys[kSide];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kSide; ++i) {
      const int64_t key = kBeside ? n + i : n + 2 * i, other = kBeside ? key + kSide : key + 1;
      const Vec a = soft.weight(load(scores + key * kSide));
      const Vec b = soft.weight(load(scores + other * kSide));
      sum += a + b;
      keys[i] = (Vec)_mm512_maskz_permutexvar_epi16(
          ~0u, pairs, (__m512i)_mm512_cvtne2ps_pbh((__m512)factor(b, other), (__m512)factor(a, key)));
    }
    transpose(keys);
    if constexpr (kBeside) {
      float* tiles = reinterpret_cast<float*>(out + 2 * n * kDepth);
      for (int64_t row = 0; row < kSide; ++row) store_beside(keys[row], tiles + row * kSide, kSide);
    } else {
      std::memcpy(static_cast<void*>(out + n * kSide), keys, sizeof keys);
    }
  }
  store(peak, soft.peak);
  store(total, sum);
  store(decay, soft.decay);
}

// A strip's sums, each row times its decay.
inline void decay_sums(float* sums, int64_t dims, const float* decay) {
  bool any = false;
  for (int64_t row = 0; row < kSide; ++row) any |= decay[row] != 1.0f;
  for (int64_t i = 0; any && i < dims; ++i) store(sums + i * kSide, load(sums + i * kSide) * decay[i % kSide]);
}

// sums += weights * values, of R strips x C packed tiles of columns: some rows at a time, while the keys go by.
template <int R, int C, class Ahead>
void weigh_in_vectors(const bf16* weights, const bf16* values, int64_t count, int64_t dims, float* sums, Ahead& ahead) {
  constexpr int kRowsAtOnce = kSums / C;
  for (int64_t row = 0; row < R * kSide; row += kRowsAtOnce) {
    const int64_t strip = row / kSide, first = row % kSide;
    const auto sum = [&](int m, int c) { return sums + strip * kSide * dims + (c * kSide + first + m) * kSide; };
    Vec found[kRowsAtOnce][C];
    for (int m = 0; m < kRowsAtOnce; ++m) {
      for (int c = 0; c < C; ++c) found[m][c] = load(sum(m, c));
    }
    for (int64_t n = 0; n < count; n += kDepth) {
      if (C == 4 || row == 0) ahead.step();
      const bf16* columns[C];
      for (int c = 0; c < C; ++c) columns[c] = values + (n / kDepth * C + c) * kTileNumbers;
      const bf16* rows = weights + (strip * kMostKeys + n) * kSide + first * kDepth;
      multiply(found, [&](int m) { return rows + m * kDepth; }, columns);
    }
    for (int m = 0; m < kRowsAtOnce; ++m) {
      for (int c = 0; c < C; ++c) store(sum(m, c), found[m][c]);
    }
  }
}

// The same, all in registers. The values stay in L1.
template <int R, int C, class Ahead>
void weigh_in_tiles(const bf16* weights, const bf16* values, int64_t count, int64_t dims, float* sums, Ahead& ahead) {
  const auto sum = [&](int64_t r, int64_t c) { return sums + r * kSide * dims + c * kSide * kSide; };
  each<R>([&](auto r) { each<C>([&](auto c) { tile_stream<r * C + c>(sum(r, c), 64); }); });
  for (int64_t n = 0; n < count; n += kDepth) {
    ahead.step();
    each<R>([&](auto r) { tile_stream<4 + r>(weights + (r * kMostKeys + n) * kSide, 64); });
    each<C>([&](auto c) {
      tile_load<6 + c % 2>(values + (n / kDepth * C + c) * kTileNumbers, 64);
      each<R>([&](auto r) { tile_multiply<r * C + c, 4 + r, 6 + c % 2>(); });
    });
  }
  each<R>([&](auto r) { each<C>([&](auto c) { tile_store<r * C + c>(sum(r, c), 64); }); });
}

// sums += weights * values of a strip, values where they lie.
template <class Ahead>
void weigh_beside(const bf16* weights, const KeyTiles::Part& values, int64_t groups, int64_t dims, float* sums,
                  Ahead& ahead) {
  for (int64_t d = 0; d < dims; d += 2 * kDepth) {
    const bool two = d + kDepth < dims;
    const auto sum = [&](int64_t c) { return sums + (d + c * kSide) * kSide; };
    tile_stream<0>(sum(0), 64);
    tile_stream<1>(sum(1), 64);
    if (two) tile_stream<2>(sum(2), 64), tile_stream<3>(sum(3), 64);
    for (int64_t group = 0; group < groups; ++group) {
      ahead.step();
      tile_stream<4>(weights + group * 2 * kTileNumbers, 64);
      tile_stream<5>(weights + (group * 2 + 1) * kTileNumbers, 64);
      tile_load<6>(values.at(group) + d, values.row_bytes[group]);
      tile_multiply<0, 4, 6>();
      tile_multiply<1, 5, 6>();
      if (!two) continue;
      tile_load<7>(values.at(group) + d + kDepth, values.row_bytes[group]);
      tile_multiply<2, 4, 7>();
      tile_multiply<3, 5, 7>();
    }
    tile_store<0>(sum(0), 64);
    tile_store<1>(sum(1), 64);
    if (two) tile_store<2>(sum(2), 64), tile_store<3>(sum(3), 64);
  }
}

// A row of `rows` in the order of its dims, from sums for each 32 of them: even, then odd ones.
inline void unpack_beside(const float* sums, int64_t rows, int64_t dims, float* out) {
  for (int64_t d = 0; d < dims; d += kDepth, sums += 2 * rows * kSide) {
    Vec even = load(sums), odd = load(sums + rows * kSide);
    join_pair(even, odd, std::make_integer_sequence<int, kLanes>{});
    store(out + d, even);
    store(out + d + kSide, odd);
  }
}

constexpr int64_t kPackedValues = 4 * kMostKeys * kSide;  // numbers: what weigh_head packs at once

// All columns of a head: packed weights [strips, kMostKeys / 32], rows of values, sums. A few tiles of columns are
// packed and stay in L1 for all rows.
template <class Ahead>
void weigh_head(const bf16* weights, int64_t width, const bf16* const* rows, int64_t count, int64_t dims, float* sums,
                bf16* packed, Ahead& ahead) {
  const auto weigh_wide = has_tiles() ? weigh_in_tiles<1, 4, Ahead> : weigh_in_vectors<1, 4, Ahead>;
  const auto weigh_two = has_tiles() ? weigh_in_tiles<2, 2, Ahead> : weigh_in_vectors<2, 2, Ahead>;
  const auto weigh_one = has_tiles() ? weigh_in_tiles<1, 2, Ahead> : weigh_in_vectors<1, 2, Ahead>;
  int64_t d = 0;
  for (; width == kSide && d + 2 * kDepth <= dims; d += 2 * kDepth) {
    pack_values<4>(rows, d, count, packed, ahead);
    weigh_wide(weights, packed, count, dims, sums + d * kSide, ahead);
  }
  for (; d < dims; d += kDepth) {
    pack_values<2>(rows, d, count, packed, ahead);
    const auto at = [&](int64_t row) { return sums + row * dims + d * kSide; };
    int64_t row = 0;
    for (; row + 2 * kSide <= width; row += 2 * kSide)
      weigh_two(weights + row * kMostKeys, packed, count, dims, at(row), ahead);
    if (row < width) weigh_one(weights + row * kMostKeys, packed, count, dims, at(row), ahead);
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
