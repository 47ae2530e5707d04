// Codes of kPair numbers of 16 bits at a time: the last steps take 16 bits a number too, and so half the instructions.
#pragma once

#include "codes.h"

// What is to be a part of its caller, however often it is called: else constants and vectors go through memory.
#define KVBACKEND_INLINE [[gnu::always_inline]] inline

namespace kvbackend::KVBACKEND_ISA {

typedef uint16_t HalfPair __attribute__((vector_size(sizeof(Vec))));  // kPair integers
typedef int16_t SignedHalfPair __attribute__((vector_size(sizeof(Vec))));
typedef int32_t IntVec __attribute__((vector_size(sizeof(Vec))));

// -------------------------------------------------------------------------------- two vectors: even numbers, then odd

// Finite numbers, whose bits are given, as floats.
KVBACKEND_INLINE void split(HalfPair bits, bf16, Vec& even, Vec& odd) {
  even = (Vec)((BitVec)bits << 16);
  odd = (Vec)((BitVec)bits & 0xffff0000);
}

KVBACKEND_INLINE void split(HalfPair bits, fp16, Vec& even, Vec& odd) {  // as to_float
  const BitVec upper = (BitVec)bits << 16;  // the sign is spread over what lies above the exponent, and cut to one bit
  even = (Vec)((BitVec)((IntVec)upper >> 3) & 0x8fffe000) * bits_to_float(0x77800000);
  odd = (Vec)((BitVec)((IntVec)bits >> 3) & 0x8fffe000) * bits_to_float(0x77800000);
}

// Those of a row of kPair floats.
template <int... Lane>
inline void split(const float* row, float* out, std::integer_sequence<int, Lane...>) {
  const Vec first = load(row), second = load(row + kLanes);
  store(out, __builtin_shufflevector(first, second, (2 * Lane)...));
  store(out + kLanes, __builtin_shufflevector(first, second, (2 * Lane + 1)...));
}

// Two numbers, for each half of a vector one.
KVBACKEND_INLINE Vec halves(const float* two) {
#if defined(__AVX512F__)
  return (Vec)_mm512_mask_broadcastss_ps(_mm512_set1_ps(two[0]), 0xff00, _mm_load_ss(two + 1));
#else
  Vec out = broadcast(two[0]);
  for (int i = kLanes / 2; i < kLanes; ++i) out[i] = two[1];
  return out;
#endif
}

// The lower halves of `low`, the upper ones of `high`.
KVBACKEND_INLINE HalfPair merge(BitVec low, BitVec high) {
#if defined(__AVX512F__)
  return (HalfPair)_mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), (__m512i)low, (__m512i)high, 0xca);
#elif defined(__AVX2__)
  return (HalfPair)_mm256_blend_epi16((__m256i)low, (__m256i)high, 0xaa);
#else
  return (HalfPair)((low & 0xffff) | (high & 0xffff0000));
#endif
}

// Whether a comparison holds somewhere.
inline bool any(IntVec holds) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)holds, (__m256i)holds);
#else
  int found = 0;
  for (int i = 0; i < kLanes; ++i) found |= holds[i];
  return found != 0;
#endif
}

inline HalfPair lower_halves(BitVec even, BitVec odd) { return merge(even, odd << 16); }
inline HalfPair upper_halves(BitVec even, BitVec odd) { return merge(even >> 16, odd); }

inline HalfPair least(HalfPair a, HalfPair b) {
#if defined(__AVX512F__)
  return (HalfPair)_mm512_maskz_min_epu16(~0u, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (HalfPair)_mm256_min_epu16((__m256i)a, (__m256i)b);
#else
  return a < b ? a : b;
#endif
}

inline SignedHalfPair least(SignedHalfPair a, SignedHalfPair b) {
#if defined(__AVX512F__)
  return (SignedHalfPair)_mm512_maskz_min_epi16(~0u, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (SignedHalfPair)_mm256_min_epi16((__m256i)a, (__m256i)b);
#else
  return a < b ? a : b;
#endif
}

inline void store_bytes(void* to, HalfPair values) {  // the lower ones
#if defined(__AVX512F__)
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_maskz_cvtepi16_epi8(~0u, (__m512i)values));
#elif defined(__AVX2__)
  const __m256i low = (__m256i)(values & 0xff);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storeu_si128(static_cast<__m128i*>(to), bytes);
#else
  for (int i = 0; i < kPair; ++i) static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(values[i]);
#endif
}

inline void store_nibbles(void* to, HalfPair codes) {  // bits above a code's four are 0
  const BitVec pairs = (BitVec)codes;
  store_bytes(to, pairs | pairs >> 12);
}

inline SignedHalfPair greatest(SignedHalfPair a, SignedHalfPair b) {
#if defined(__AVX512F__)
  return (SignedHalfPair)_mm512_maskz_max_epi16(~0u, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (SignedHalfPair)_mm256_max_epi16((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}

// --------------------------------------------------------------------------------------------- extremes of many groups

// Of two vectors, in which `left` lanes each belong to a group, one with half as many, by turns of the first and of the
// second. Half of the lanes stay where they are, since moving costs more than choosing.
template <int left, class F, int... Lane>
KVBACKEND_INLINE SignedHalfPair fold(SignedHalfPair a, SignedHalfPair b, F&& pick,
                                     std::integer_sequence<int, Lane...>) {
  constexpr int half = left / 2;
  const SignedHalfPair kept = __builtin_shufflevector(a, b, (Lane / half % 2 ? Lane + kPair : Lane)...);
  const SignedHalfPair moved = __builtin_shufflevector(a, b, (Lane / half % 2 ? Lane + kPair - half : Lane + half)...);
  return pick(kept, moved);
}

// Vector i of those where `left` lanes are what is left of a group's. at(i): vector i of the numbers.
template <int group, int left, class At, class F>
KVBACKEND_INLINE SignedHalfPair folded(At&& at, F&& pick, int i) {
  if constexpr (left < std::min<int>(group, kPair)) {
    const SignedHalfPair a = folded<group, 2 * left>(at, pick, 2 * i), b = folded<group, 2 * left>(at, pick, 2 * i + 1);
    return fold<2 * left>(a, b, pick, std::make_integer_sequence<int, kPair>{});
  } else {
    constexpr int vectors = std::max<int>(group / kPair, 1);
    SignedHalfPair most = at(vectors * i);
    for (int j = 1; j < vectors; ++j) most = pick(most, at(vectors * i + j));
    return most;
  }
}

constexpr int reversed_bits(int lane, int lanes) {
  return lanes == 1 ? 0 : lane % 2 * (lanes / 2) + reversed_bits(lane / 2, lanes / 2);
}

template <int... Lane>
inline IntVec in_bit_order(IntVec folded, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(folded, folded, reversed_bits(Lane, kLanes)...);
}

// What pick(a, b) prefers to all others in each of kLanes groups that follow each other.
template <int group, class At, class F>
KVBACKEND_INLINE IntVec group_picks(At&& at, F&& pick) {
  const SignedHalfPair two = folded<group, 2>(at, pick, 0);  // lanes of each
  const IntVec picked = (IntVec)pick(two, (SignedHalfPair)((BitVec)two << 16)) >> 16;
  return in_bit_order(picked, std::make_integer_sequence<int, kLanes>{});  // which folding has reversed
}

template <int group, class At>
KVBACKEND_INLINE IntVec group_maxima(At&& at) {
  return group_picks<group>(at, [](SignedHalfPair a, SignedHalfPair b) { return greatest(a, b); });
}

template <int group, class At>
KVBACKEND_INLINE IntVec group_minima(At&& at) {
  return group_picks<group>(at, [](SignedHalfPair a, SignedHalfPair b) { return least(a, b); });
}

// ---------------------------------------------------------------------------------------------------------- rounding

// x / divisor. A product with the reciprocal, put right by what it leaves, is the quotient to the bit wherever the
// reciprocal is rounded to the nearest and one of the two has few bits: a sweep over all significands found no
// exception for x in bfloat16 or float16 over any divisor, nor for any x over a divisor in float16.
KVBACKEND_INLINE Vec quotient(Vec x, Vec divisor, Vec inverse) {
#if defined(__AVX512F__)
  const __m512 product = _mm512_mul_ps((__m512)x, (__m512)inverse);
  const __m512 left = _mm512_fnmadd_ps(product, (__m512)divisor, (__m512)x);
  return (Vec)_mm512_fmadd_ps(left, (__m512)inverse, product);
#elif defined(__AVX2__)
  const __m256 product = _mm256_mul_ps((__m256)x, (__m256)inverse);
  const __m256 left = _mm256_fnmadd_ps(product, (__m256)divisor, (__m256)x);
  return (Vec)_mm256_fmadd_ps(left, (__m256)inverse, product);
#else
  static_cast<void>(inverse);
  return x / divisor;
#endif
}

constexpr float kMostEncoded = 0x1p100f;  // numbers that are encoded by store_pair are less, and not negative

// As magnitude_code. The adder rounds: to each number a power of two is added whose last place is the spacing of the
// grid there. The last places of the sum are then the mantissa, with its leading one.
template <int mantissa, int least_exponent>
KVBACKEND_INLINE HalfPair magnitude_codes(Vec even, Vec odd, uint16_t largest) {
  constexpr float kPlaces = 1 << (23 - mantissa);
  const Vec smallest = broadcast(bits_to_float(static_cast<uint32_t>(127 + least_exponent) << 23));
  const Vec even_power = greatest((Vec)((BitVec)even & 0x7f800000), smallest);
  const Vec odd_power = greatest((Vec)((BitVec)odd & 0x7f800000), smallest);
  const HalfPair mantissas = lower_halves((BitVec)(even_power * kPlaces + even), (BitVec)(odd_power * kPlaces + odd));
  const HalfPair exponents = upper_halves((BitVec)even_power, (BitVec)odd_power) >> (7 - mantissa);
  const HalfPair codes = mantissas + exponents - static_cast<uint16_t>((127 + least_exponent) << mantissa);
  return least(codes, HalfPair{} + largest);
}

// The same for one vector of positive numbers: what they are rounded to, and their codes.
inline Vec rounded_to_e4m3(Vec value, BitVec& codes) {
  constexpr float kPlaces = 1 << 20;
  const Vec power = greatest((Vec)((BitVec)value & 0x7f800000), broadcast(0x1p-6f));
  const Vec sum = power * kPlaces + value;
  codes = ((BitVec)sum & 0x1f) + ((BitVec)power >> 20) - (121 << 3);
  codes = codes < 0x7e ? codes : BitVec{} + 0x7e;
  return least(sum - power * kPlaces, broadcast(e4m3::kLargest));
}

// The codes of magnitudes and of their signs, the uppermost bits of `signs`.
KVBACKEND_INLINE void store_pair(e4m3* to, Vec even, Vec odd, HalfPair signs) {
  store_bytes(to, magnitude_codes<3, -6>(even, odd, 0x7e) | (signs >> 8 & 0x80));
}

KVBACKEND_INLINE void store_pair(e5m2* to, Vec even, Vec odd, HalfPair signs) {
  store_bytes(to, magnitude_codes<2, -14>(even, odd, 0x7b) | (signs >> 8 & 0x80));
}

KVBACKEND_INLINE void store_pair(e2m1x2* to, Vec even, Vec odd, HalfPair signs) {
  store_nibbles(to, magnitude_codes<1, 0>(even, odd, 7) | (signs >> 12 & 8));
}

// No more than 127 and what rounds to it: where a scale is made from the numbers, none is beyond. See store.
KVBACKEND_INLINE void store_pair(int8_t* to, Vec even, Vec odd, HalfPair signs) {
  const auto whole = [](Vec value) {
    return (BitVec) __builtin_convertvector(value + bits_to_float(0x3effffff), IntVec);
  };
  const SignedHalfPair sign = (SignedHalfPair)signs >> 15;
  store_bytes(to, (HalfPair)(((SignedHalfPair)lower_halves(whole(even), whole(odd)) ^ sign) - sign));
}

// Numbers of 16 bits as integers: below 0 is 0, above 15 is 15.
KVBACKEND_INLINE void store_pair(uint4x2* to, Vec even, Vec odd, HalfPair /*signs*/) {
  const SignedHalfPair whole =
      (SignedHalfPair)lower_halves((BitVec)(even + 12582912.0f), (BitVec)(odd + 12582912.0f));  // the adder rounds
  store_nibbles(to, (HalfPair)least(greatest(whole, SignedHalfPair{}), SignedHalfPair{} + 15));
}

}  // namespace kvbackend::KVBACKEND_ISA
