// Vectors of floats, as wide as the instruction set of this build has them.
//
// Written with the compiler's vector extensions: one source for every variant, and operators instead of intrinsics.
#pragma once

#include <type_traits>
#include <utility>

#include "kernel.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvbackend::KVBACKEND_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kAccumulators = 16;  // sums that a loop keeps in registers: half of them
constexpr int kManySums = 16;      // the same where the rest needs few registers
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kAccumulators = 8;
constexpr int kManySums = 12;  // eight just cover the latency of an FMA
#else
constexpr int kLanes = 4;
constexpr int kAccumulators = 8;
constexpr int kManySums = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t BitVec __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * sizeof(uint16_t))));
typedef float Quad __attribute__((vector_size(16)));

inline Vec broadcast(float value) { return value - Vec{}; }

// ---------------------------------------------------------------------------------------------------- load and store

inline Vec load(const float* from) {
  Vec value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof value); }

inline Vec from_halves(HalfVec half) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)half);
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps((__m128i)half);
#else  // as to_float(fp16), lane by lane
  const BitVec bits = __builtin_convertvector(half, BitVec);
  const BitVec magnitude = (bits & 0x7fff) << 13;
  const BitVec scaled = (BitVec)((Vec)magnitude * bits_to_float(0x77800000));
  const BitVec special = (BitVec)(magnitude >= 0x0f800000) & 0x7f800000;
  return (Vec)(scaled | special | (bits & 0x8000) << 16);
#endif
}

inline Vec load(const fp16* from) {
  HalfVec half;
  std::memcpy(&half, from, sizeof half);
  return from_halves(half);
}

inline Vec load(const bf16* from) {
#if defined(__AVX512F__)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vec)((BitVec)_mm512_maskz_cvtepu16_epi32(0xffff, half) << 16);
#else
  HalfVec half;
  std::memcpy(&half, from, sizeof half);
  return (Vec)(__builtin_convertvector(half, BitVec) << 16);
#endif
}

inline void store(fp16* to, Vec value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, (__m512)value, 0));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)value, 0));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = from_float<fp16>(value[i]);
#endif
}

inline void store(bf16* to, Vec value) {  // as from_float<bf16>, lane by lane
  const BitVec bits = (BitVec)value;
  const BitVec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
  const BitVec wide = (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
#if defined(__AVX512F__)
  const HalfVec half = (HalfVec)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)wide);
#else
  const HalfVec half = __builtin_convertvector(wide, HalfVec);
#endif
  std::memcpy(to, &half, sizeof half);
}

// A row of numbers, `stride` elements apart, to consecutive ones of the same type.
inline void load_row(const bf16* row, int64_t stride, int64_t size, bf16* out) {
  if (stride == 1) {
    std::copy_n(row, size, out);
  } else {
    for (int64_t i = 0; i < size; ++i) out[i] = row[i * stride];
  }
}

// Keeps the compiler from reading a value again for each of its uses.
inline void keep_in_register(Vec& value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("" : "+x"(value));
#endif
}

inline void keep_in_register([[maybe_unused]] BitVec& value) {
#if defined(__AVX512BF16__) && !defined(KVBACKEND_EMULATED_AVX512)
  asm("" : "+v"(value));
#endif
}

// kPair numbers as two vectors. Their order within the pair is the type's own.
constexpr int64_t kPair = 2 * kLanes;

template <class T>
inline void load_pair(const T* from, Vec& first, Vec& second) {
  first = load(from);
  second = load(from + kLanes);
}

// Even elements, then odd ones: a shift and a mask instead of two widening shuffles.
template <class T>
constexpr bool kEvensFirst = std::is_same_v<T, bf16>;

inline void load_pair(const bf16* from, Vec& first, Vec& second) {
  BitVec bits;
  std::memcpy(&bits, from, sizeof bits);
  first = (Vec)(bits << 16);
  second = (Vec)(bits & 0xffff0000);
}

// What the numbers that load_pair and load_half deliver are to be multiplied with.
template <class T>
constexpr float kUnit = 1.0f;

// The even numbers of two vectors, then the odd ones; and back.
template <int... Lane>
inline void part_pair(Vec& first, Vec& second, std::integer_sequence<int, Lane...>) {
  const Vec evens = __builtin_shufflevector(first, second, (2 * Lane)...);
  second = __builtin_shufflevector(first, second, (2 * Lane + 1)...);
  first = evens;
}

template <int... Lane>
inline void join_pair(Vec& first, Vec& second, std::integer_sequence<int, Lane...>) {
  const Vec low = __builtin_shufflevector(first, second, (Lane / 2 + Lane % 2 * kLanes)...);
  second = __builtin_shufflevector(first, second, ((Lane + kLanes) / 2 + Lane % 2 * kLanes)...);
  first = low;
}

// A row of numbers into the order in which load_pair delivers a row of T, and back. Sizes are multiples of kPair.
template <class T>
void to_pairs(const float* row, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kPair) {
    Vec first = load(row + i), second = load(row + i + kLanes);
    if (kEvensFirst<T>) part_pair(first, second, std::make_integer_sequence<int, kLanes>{});
    store(out + i, first);
    store(out + i + kLanes, second);
  }
}

template <class T>
void from_pairs(const float* row, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kPair) {
    Vec first = load(row + i), second = load(row + i + kLanes);
    if (kEvensFirst<T>) join_pair(first, second, std::make_integer_sequence<int, kLanes>{});
    store(out + i, first);
    store(out + i + kLanes, second);
  }
}

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// ---------------------------------------------------------------------------------------------------------- algebra

inline Vec maximum(Vec a, Vec b) {  // b where either is NaN
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// Lanes of both vectors in an order that repeats every 128 bits: `Order` numbers a's four, then b's four.
template <int... Order, int... Lane>
inline Vec mix_quads(Vec a, Vec b, std::integer_sequence<int, Lane...>) {
  constexpr int order[] = {Order...};
  return __builtin_shufflevector(a, b, (Lane / 4 * 4 + order[Lane % 4] % 4 + (order[Lane % 4] / 4) * kLanes)...);
}

template <int... Order>
inline Vec mix_quads(Vec a, Vec b) {
  return mix_quads<Order...>(a, b, std::make_integer_sequence<int, kLanes>{});
}

// Of four vectors: each 4 lanes of the result have a part of their four sums, that of the same lanes.
inline Vec sum_quads(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = mix_quads<0, 4, 1, 5>(a, b) + mix_quads<2, 6, 3, 7>(a, b);
  const Vec cd = mix_quads<0, 4, 1, 5>(c, d) + mix_quads<2, 6, 3, 7>(c, d);
  return mix_quads<0, 1, 4, 5>(ab, cd) + mix_quads<2, 3, 6, 7>(ab, cd);
}

// The sums over the lanes of each of four vectors.
inline Quad sum_lanes(Vec a, Vec b, Vec c, Vec d) {
  const Vec quads = sum_quads(a, b, c, d);
  Quad parts[kLanes / 4];
  std::memcpy(parts, &quads, sizeof quads);
  for (int half = kLanes / 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  }
  return parts[0];
}

#if defined(__AVX512F__)
// The same of 16 vectors.
inline Vec sum_lanes(const Vec (&v)[16]) {
  __m512 quads[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) quads[i] = (__m512)sum_quads(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  const auto halves = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xffff, a, b, 0x44),
                         _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0xee));
  };
  const __m512 low = halves(quads[0], quads[1]), high = halves(quads[2], quads[3]);
  return (Vec)_mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xffff, low, high, 0x88),
                            _mm512_maskz_shuffle_f32x4(0xffff, low, high, 0xdd));
}
#endif

// -------------------------------------------------------------------------------------------------------- functions

// e^x for x <= 8, within 2 ulp, or within 4e-6 of it where kRough: enough for weights of numbers of 16 bits. 0 below
// -87.7, where that is no normal number, and NaN for NaN. x is (n + r) ln 2 with |r| <= 1/2, and 2^r a polynomial of
// the least relative error.
template <bool kRough = false>
inline Vec exp_small(Vec x) {
  constexpr float kRound = 12582912.0f + 127;  // 1.5 * 2^23: adding it rounds to an integer; 127 is the exponent of 1
  x = maximum(broadcast(-88.0f), x);           // x where that is NaN
  const Vec shifted = x * 1.44269502f + kRound;
  const Vec n = shifted - kRound;
  Vec r = x * 1.44269502f - n, p;
  if constexpr (kRough) {
    p = r * 9.58285294e-3f + 5.59064248e-2f;
    p = p * r + 2.40240986e-1f;
    p = p * r + 6.93124193e-1f;
  } else {
    r += x * 1.92596303e-8f;  // what the factor lacks
    p = r * 1.53533619e-4f + 1.33988744e-3f;
    p = p * r + 9.61843736e-3f;
    p = p * r + 5.55033247e-2f;
    p = p * r + 2.40226479e-1f;
    p = p * r + 6.93147203e-1f;
  }
  p = p * r + 1.0f;
  return p * (Vec)((BitVec)shifted << 23);  // 2^n: the low bits of `shifted` are its exponent
}

// tanh(x): its series near 0, where the quotient would cancel.
inline Vec tanh(Vec x) {
  const Vec square = x * x;
  Vec series = square * (62.0f / 2835.0f) - 17.0f / 315.0f;
  series = series * square + 2.0f / 15.0f;
  series = series * square - 1.0f / 3.0f;
  series = x + x * square * series;
  const Vec magnitude = x < 0.0f ? -x : x;
  const Vec decay = exp_small(-2.0f * magnitude);
  const Vec quotient = (1.0f - decay) / (1.0f + decay);
  return magnitude < 0.25f ? series : x < 0.0f ? -quotient : quotient;
}

}  // namespace kvbackend::KVBACKEND_ISA
