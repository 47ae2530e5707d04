// AVX-512 for a CPU that has none: what the kernels use of it, lane by lane, so that the tests of their AVX-512
// variants run anywhere. For tests only: setup.py includes it before the files of such a variant (ci/emulated.sh).
//
// The functions hide the compiler's of the same names, whose meaning Intel documents.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <type_traits>

// After immintrin.h, which would take them for the compiler's.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if defined(KVBACKEND_EMULATED_BF16)
#define __AVX512BF16__ 1
#define __AVX512VBMI__ 1
#endif
#undef _mm512_setr_ps  // there it is a macro
#undef _mm512_setr_epi32
#undef _mm512_setr_epi64

namespace kvbackend::KVBACKEND_ISA {

// ------------------------------------------------------------------------------------------------------------- lanes

template <class T, class V>
T lane(const V& vector, int64_t i) {
  T value;
  std::memcpy(&value, reinterpret_cast<const char*>(&vector) + i * static_cast<int64_t>(sizeof value), sizeof value);
  return value;
}

// The vector whose lane i is f(i).
template <class V, class T, class F>
[[gnu::noinline]] V vector_of(F&& f) {  // else the compiler takes minutes for a file
  T lanes[sizeof(V) / sizeof(T)];
  for (size_t i = 0; i < std::size(lanes); ++i) lanes[i] = static_cast<T>(f(static_cast<int64_t>(i)));
  V vector;
  std::memcpy(&vector, lanes, sizeof vector);
  return vector;
}

inline bool has(uint64_t mask, int64_t i) { return mask >> i & 1; }

// f(i) where the mask has lane i, else 0.
template <class V, class T, class F>
V some_of(uint64_t mask, F&& f) {
  return vector_of<V, T>([&](int64_t i) { return has(mask, i) ? static_cast<T>(f(i)) : T{}; });
}

// The lanes of those in `among` where f(i) holds.
template <class Mask, class F>
[[gnu::noinline]] Mask mask_of(int64_t lanes, F&& f, uint64_t among = ~0ull) {
  uint64_t mask = 0;
  for (int64_t i = 0; i < lanes; ++i) mask |= static_cast<uint64_t>(has(among, i) && f(i)) << i;
  return static_cast<Mask>(mask);
}

// Those that the mask has, one after the other; the rest is 0.
template <class V, class T>
[[gnu::noinline]] V compressed(uint64_t mask, const V& from) {
  T lanes[sizeof(V) / sizeof(T)] = {};
  int64_t n = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(std::size(lanes)); ++i) {
    if (has(mask, i)) lanes[n++] = lane<T>(from, i);
  }
  V vector;
  std::memcpy(&vector, lanes, sizeof vector);
  return vector;
}

// ---------------------------------------------------------------------------------------------------- load and store

template <class V>
V read_as(const void* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// As the instruction, which faults elsewhere.
inline void expect_line(const void* place) {
  if (reinterpret_cast<uintptr_t>(place) % 64) __builtin_trap();
}

inline __m512i _mm512_load_si512(const void* from) {
  expect_line(from);
  return read_as<__m512i>(from);
}

inline __m512i _mm512_loadu_si512(const void* from) { return read_as<__m512i>(from); }
inline __m512 _mm512_loadu_ps(const void* from) { return read_as<__m512>(from); }

// Lanes without their bit are not read.
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* from) {
  return some_of<__m512, float>(mask, [&](int64_t i) { return static_cast<const float*>(from)[i]; });
}

inline __m512 _mm512_mask_loadu_ps(__m512 other, __mmask16 mask, const void* from) {
  return vector_of<__m512, float>(
      [&](int64_t i) { return has(mask, i) ? static_cast<const float*>(from)[i] : lane<float>(other, i); });
}

inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
  return some_of<__m512i, int16_t>(mask, [&](int64_t i) { return static_cast<const int16_t*>(from)[i]; });
}

inline void _mm512_storeu_si512(void* to, __m512i from) { std::memcpy(to, &from, sizeof from); }
inline void _mm512_storeu_ps(void* to, __m512 from) { std::memcpy(to, &from, sizeof from); }

inline void _mm512_stream_si512(__m512i* to, __m512i from) {
  expect_line(to);
  *to = from;
}

inline void _mm512_mask_storeu_ps(void* to, __mmask16 mask, __m512 from) {
  for (int64_t i = 0; i < 16; ++i) {
    if (has(mask, i)) static_cast<float*>(to)[i] = lane<float>(from, i);
  }
}

// ------------------------------------------------------------------------------------------------------ new vectors

inline __m512 _mm512_setzero_ps() { return __m512{}; }

inline __m512 _mm512_set1_ps(float value) {
  return vector_of<__m512, float>([&](int64_t) { return value; });
}

inline __m512i _mm512_set1_epi8(int8_t value) {
  return vector_of<__m512i, int8_t>([&](int64_t) { return value; });
}

inline __m512i _mm512_set1_epi16(int16_t value) {
  return vector_of<__m512i, int16_t>([&](int64_t) { return value; });
}

inline __m512i _mm512_set1_epi32(int32_t value) {
  return vector_of<__m512i, int32_t>([&](int64_t) { return value; });
}

inline __m512i _mm512_set1_epi64(int64_t value) {
  return vector_of<__m512i, int64_t>([&](int64_t) { return value; });
}

inline __m512i _mm512_mask_set1_epi32(__m512i other, __mmask16 mask, int32_t value) {
  return vector_of<__m512i, int32_t>([&](int64_t i) { return has(mask, i) ? value : lane<int32_t>(other, i); });
}

inline __m512i _mm512_maskz_set1_epi16(__mmask32 mask, int16_t value) {
  return some_of<__m512i, int16_t>(mask, [&](int64_t) { return value; });
}

inline __m512 _mm512_mask_broadcastss_ps(__m512 other, __mmask16 mask, __m128 from) {
  return vector_of<__m512, float>([&](int64_t i) { return has(mask, i) ? from[0] : lane<float>(other, i); });
}

template <class... Number>
__m512 _mm512_setr_ps(Number... number) {
  const float lanes[16] = {static_cast<float>(number)...};
  return read_as<__m512>(lanes);
}

template <class... Number>
__m512i _mm512_setr_epi32(Number... number) {
  const int32_t lanes[16] = {static_cast<int32_t>(number)...};
  return read_as<__m512i>(lanes);
}

template <class... Number>
__m512i _mm512_setr_epi64(Number... number) {
  const int64_t lanes[8] = {static_cast<int64_t>(number)...};
  return read_as<__m512i>(lanes);
}

template <class... Number>
__m512i _mm512_set_epi16(Number... number) {  // the last lane first
  int16_t lanes[32] = {static_cast<int16_t>(number)...};
  std::reverse(std::begin(lanes), std::end(lanes));
  return read_as<__m512i>(lanes);
}

template <class Part>
__m512i beside_anything(Part low) {
  __m512i vector;
  std::memset(&vector, 0x5a, sizeof vector);
  std::memcpy(&vector, &low, sizeof low);
  return vector;
}

inline __m512i _mm512_castsi256_si512(__m256i low) { return beside_anything(low); }
inline __m512i _mm512_castsi128_si512(__m128i low) { return beside_anything(low); }

// ---------------------------------------------------------------------------------------------------------- integers

template <class T, class F>
__m512i each_pair(uint64_t mask, __m512i a, __m512i b, F&& f) {
  return some_of<__m512i, T>(mask, [&](int64_t i) { return f(lane<T>(a, i), lane<T>(b, i)); });
}

inline __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  return each_pair<uint16_t>(~0ull, a, b, [](uint16_t x, uint16_t y) { return x + y; });
}

inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return each_pair<uint32_t>(~0ull, a, b, [](uint32_t x, uint32_t y) { return x + y; });
}

inline __m512i _mm512_maskz_subs_epu16(__mmask32 mask, __m512i a, __m512i b) {
  return each_pair<uint16_t>(mask, a, b, [](uint16_t x, uint16_t y) { return x > y ? x - y : 0; });
}

inline __m512i _mm512_maskz_min_epu16(__mmask32 mask, __m512i a, __m512i b) {
  return each_pair<uint16_t>(mask, a, b, [](uint16_t x, uint16_t y) { return std::min(x, y); });
}

inline __m512i _mm512_maskz_min_epi16(__mmask32 mask, __m512i a, __m512i b) {
  return each_pair<int16_t>(mask, a, b, [](int16_t x, int16_t y) { return std::min(x, y); });
}

inline __m512i _mm512_maskz_max_epi16(__mmask32 mask, __m512i a, __m512i b) {
  return each_pair<int16_t>(mask, a, b, [](int16_t x, int16_t y) { return std::max(x, y); });
}

inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }

inline __m512i _mm512_slli_epi16(__m512i a, unsigned count) {
  return vector_of<__m512i, uint16_t>([&](int64_t i) { return count < 16 ? lane<uint16_t>(a, i) << count : 0; });
}

inline __m512i _mm512_maskz_srli_epi16(__mmask32 mask, __m512i a, unsigned count) {
  return some_of<__m512i, uint16_t>(mask, [&](int64_t i) { return count < 16 ? lane<uint16_t>(a, i) >> count : 0; });
}

inline __m512i _mm512_maskz_srlv_epi16(__mmask32 mask, __m512i a, __m512i count) {
  return some_of<__m512i, uint16_t>(mask, [&](int64_t i) {
    const uint16_t bits = lane<uint16_t>(count, i);
    return bits < 16 ? lane<uint16_t>(a, i) >> bits : 0;
  });
}

// Bit 4 * a + 2 * b + c of the table for each bit of the three.
inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i found = {};
  for (int row = 0; row < 8; ++row) {
    if (table >> row & 1) found |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  }
  return found;
}

// ------------------------------------------------------------------------------------------------------ comparisons

template <class Mask, class T, class F>
Mask comparison(__m512i a, __m512i b, F&& f, uint64_t among = ~0ull) {
  constexpr int64_t kCount = sizeof a / sizeof(T);
  return mask_of<Mask>(kCount, [&](int64_t i) { return f(lane<T>(a, i), lane<T>(b, i)); }, among);
}

inline __mmask8 _mm512_cmpgt_epi64_mask(__m512i a, __m512i b) {
  return comparison<__mmask8, int64_t>(a, b, std::greater<>());
}

inline __mmask8 _mm512_cmple_epi64_mask(__m512i a, __m512i b) {
  return comparison<__mmask8, int64_t>(a, b, std::less_equal<>());
}

inline __mmask16 _mm512_cmpgt_epu32_mask(__m512i a, __m512i b) {
  return comparison<__mmask16, uint32_t>(a, b, std::greater<>());
}

inline __mmask32 _mm512_cmplt_epi16_mask(__m512i a, __m512i b) {
  return comparison<__mmask32, int16_t>(a, b, std::less<>());
}

inline __mmask32 _mm512_cmplt_epu16_mask(__m512i a, __m512i b) {
  return comparison<__mmask32, uint16_t>(a, b, std::less<>());
}

inline __mmask16 _mm512_mask_cmpeq_epi32_mask(__mmask16 among, __m512i a, __m512i b) {
  return comparison<__mmask16, int32_t>(a, b, std::equal_to<>(), among);
}

inline __mmask16 _mm512_mask_cmpge_epu32_mask(__mmask16 among, __m512i a, __m512i b) {
  return comparison<__mmask16, uint32_t>(a, b, std::greater_equal<>(), among);
}

inline __mmask16 _mm512_mask_cmpgt_epu32_mask(__mmask16 among, __m512i a, __m512i b) {
  return comparison<__mmask16, uint32_t>(a, b, std::greater<>(), among);
}

inline __mmask16 _mm512_mask_cmple_epu32_mask(__mmask16 among, __m512i a, __m512i b) {
  return comparison<__mmask16, uint32_t>(a, b, std::less_equal<>(), among);
}

inline __mmask32 _mm512_test_epi16_mask(__m512i a, __m512i b) {
  return comparison<__mmask32, int16_t>(a, b, [](int16_t x, int16_t y) { return (x & y) != 0; });
}

inline __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
  return comparison<__mmask16, int32_t>(a, b, [](int32_t x, int32_t y) { return (x & y) != 0; });
}

inline __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 among, __m512 a, __m512 b, int predicate) {
  const auto holds = [&](int64_t i) {
    const float x = lane<float>(a, i), y = lane<float>(b, i);
    switch (predicate) {
      case _CMP_GT_OQ:
        return x > y;
      case _CMP_NLT_UQ:
        return !(x < y);
      default:
        __builtin_trap();  // no kernel uses another
    }
  };
  return mask_of<__mmask16>(16, holds, among);
}

inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  return _mm512_mask_cmp_ps_mask(0xffff, a, b, predicate);
}

// ------------------------------------------------------------------------------------------------------ order of lanes

template <class V, class T>
V permuted(uint64_t mask, __m512i order, const V& from) {
  using Index = std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
  constexpr int64_t kCount = sizeof(V) / sizeof(T), kIndices = sizeof(T) / sizeof(Index);  // the lower half of 64 bits
  return some_of<V, T>(mask, [&](int64_t i) { return lane<T>(from, lane<Index>(order, i * kIndices) % kCount); });
}

inline __m512 _mm512_maskz_permutexvar_ps(__mmask16 mask, __m512i order, __m512 from) {
  return permuted<__m512, float>(mask, order, from);
}

inline __m512i _mm512_maskz_permutexvar_epi8(__mmask64 mask, __m512i order, __m512i from) {
  return permuted<__m512i, uint8_t>(mask, order, from);
}

inline __m512i _mm512_maskz_abs_epi8(__mmask64 mask, __m512i from) {
  return some_of<__m512i, uint8_t>(mask, [&](int64_t i) { return std::abs(lane<int8_t>(from, i)); });
}

// Bit i of a byte: the sum of the bits that byte 7 - i of the matrix beside it names, and of bit i of `added`.
inline __m512i _mm512_gf2p8affine_epi64_epi8(__m512i from, __m512i matrix, int added) {
  return vector_of<__m512i, uint8_t>([&](int64_t i) {
    int bits = added;
    for (int64_t bit = 0; bit < 8; ++bit) {
      const int named = lane<uint8_t>(from, i) & lane<uint8_t>(matrix, i / 8 * 8 + 7 - bit);
      bits ^= __builtin_parity(static_cast<unsigned>(named)) << bit;
    }
    return static_cast<uint8_t>(bits);
  });
}

inline __m512i _mm512_maskz_permutexvar_epi16(__mmask32 mask, __m512i order, __m512i from) {
  return permuted<__m512i, uint16_t>(mask, order, from);
}

inline __m512i _mm512_mask_permutexvar_epi16(__m512i other, __mmask32 mask, __m512i order, __m512i from) {
  const __m512i found = permuted<__m512i, uint16_t>(~0ull, order, from);
  return vector_of<__m512i, uint16_t>(
      [&](int64_t i) { return has(mask, i) ? lane<uint16_t>(found, i) : lane<uint16_t>(other, i); });
}

// A lane of a or b, as its index says: b's come after a's.
template <class T>
T from_either(__m512i a, T index, __m512i b) {
  constexpr int64_t kCount = sizeof a / sizeof(T);
  return lane<T>(index / kCount % 2 ? b : a, index % kCount);
}

inline __m512i _mm512_maskz_permutex2var_epi16(__mmask32 mask, __m512i a, __m512i order, __m512i b) {
  return some_of<__m512i, uint16_t>(mask, [&](int64_t i) { return from_either(a, lane<uint16_t>(order, i), b); });
}

inline __m512i _mm512_permutex2var_epi8(__m512i a, __m512i order, __m512i b) {
  return vector_of<__m512i, uint8_t>([&](int64_t i) { return from_either(a, lane<uint8_t>(order, i), b); });
}

inline __m512i _mm512_mask2_permutex2var_epi8(__m512i a, __m512i order, __mmask64 mask, __m512i b) {
  return vector_of<__m512i, uint8_t>([&](int64_t i) {
    const uint8_t index = lane<uint8_t>(order, i);
    return has(mask, i) ? from_either(a, index, b) : index;
  });
}

// Within each 128 bits, lanes of both by turns: of the lower or the upper half.
template <class T>
__m512i by_turns(uint64_t mask, __m512i a, __m512i b, bool upper) {
  constexpr int64_t kCount = 16 / sizeof(T);  // of 128 bits
  return some_of<__m512i, T>(mask, [&](int64_t i) {
    return lane<T>(i % 2 ? b : a, i / kCount * kCount + upper * kCount / 2 + i % kCount / 2);
  });
}

inline __m512i _mm512_maskz_unpacklo_epi8(__mmask64 mask, __m512i a, __m512i b) {
  return by_turns<uint8_t>(mask, a, b, false);
}
inline __m512i _mm512_maskz_unpackhi_epi8(__mmask64 mask, __m512i a, __m512i b) {
  return by_turns<uint8_t>(mask, a, b, true);
}
inline __m512i _mm512_maskz_unpacklo_epi16(__mmask32 mask, __m512i a, __m512i b) {
  return by_turns<uint16_t>(mask, a, b, false);
}
inline __m512i _mm512_maskz_unpackhi_epi16(__mmask32 mask, __m512i a, __m512i b) {
  return by_turns<uint16_t>(mask, a, b, true);
}
inline __m512i _mm512_maskz_unpacklo_epi64(__mmask8 mask, __m512i a, __m512i b) {
  return by_turns<uint64_t>(mask, a, b, false);
}
inline __m512i _mm512_maskz_unpackhi_epi64(__mmask8 mask, __m512i a, __m512i b) {
  return by_turns<uint64_t>(mask, a, b, true);
}

// 128 bits at a time: two of a's, then two of b's.
inline __m512 _mm512_maskz_shuffle_f32x4(__mmask16 mask, __m512 a, __m512 b, int order) {
  return some_of<__m512, float>(
      mask, [&](int64_t i) { return lane<float>(i < 8 ? a : b, (order >> i / 4 * 2 & 3) * 4 + i % 4); });
}

inline __m512i _mm512_maskz_shuffle_i32x4(__mmask16 mask, __m512i a, __m512i b, int order) {
  return (__m512i)_mm512_maskz_shuffle_f32x4(mask, (__m512)a, (__m512)b, order);
}

inline __m512 _mm512_maskz_broadcast_f32x4(__mmask16 mask, __m128 from) {
  return some_of<__m512, float>(mask, [&](int64_t i) { return lane<float>(from, i % 4); });
}

inline __m512 _mm512_maskz_insertf32x4(__mmask16 mask, __m512 a, __m128 b, int at) {
  return some_of<__m512, float>(mask,
                                [&](int64_t i) { return i / 4 == at ? lane<float>(b, i % 4) : lane<float>(a, i); });
}

// Within each 128 bits, four lanes in any order.
inline __m512 _mm512_maskz_permute_ps(__mmask16 mask, __m512 from, int order) {
  return some_of<__m512, float>(mask,
                                [&](int64_t i) { return lane<float>(from, i / 4 * 4 + (order >> i % 4 * 2 & 3)); });
}

inline __m512 _mm512_maskz_compress_ps(__mmask16 mask, __m512 from) { return compressed<__m512, float>(mask, from); }

inline __m512i _mm512_maskz_compress_epi32(__mmask16 mask, __m512i from) {
  return compressed<__m512i, int32_t>(mask, from);
}

// ------------------------------------------------------------------------------------------------------- conversions

template <class V, class To, class From, class W>
V converted(uint64_t mask, const W& from) {
  return some_of<V, To>(mask, [&](int64_t i) { return lane<From>(from, i); });
}

inline __m512i _mm512_maskz_cvtepi8_epi16(__mmask32 mask, __m256i from) {
  return converted<__m512i, int16_t, int8_t>(mask, from);
}

inline __m512i _mm512_maskz_cvtepu8_epi16(__mmask32 mask, __m256i from) {
  return converted<__m512i, uint16_t, uint8_t>(mask, from);
}

inline __m512i _mm512_maskz_cvtepi8_epi32(__mmask16 mask, __m128i from) {
  return converted<__m512i, int32_t, int8_t>(mask, from);
}

inline __m512i _mm512_maskz_cvtepu8_epi32(__mmask16 mask, __m128i from) {
  return converted<__m512i, uint32_t, uint8_t>(mask, from);
}

inline __m512i _mm512_maskz_cvtepu8_epi64(__mmask8 mask, __m128i from) {
  return converted<__m512i, uint64_t, uint8_t>(mask, from);
}

inline __m512i _mm512_maskz_cvtepu16_epi32(__mmask16 mask, __m256i from) {
  return converted<__m512i, uint32_t, uint16_t>(mask, from);
}

inline __m256i _mm512_maskz_cvtepi16_epi8(__mmask32 mask, __m512i from) {
  return converted<__m256i, uint8_t, uint16_t>(mask, from);
}

inline __m128i _mm512_maskz_cvtepi32_epi8(__mmask16 mask, __m512i from) {
  return converted<__m128i, uint8_t, uint32_t>(mask, from);
}

inline __m256i _mm512_maskz_cvtepi32_epi16(__mmask16 mask, __m512i from) {
  return converted<__m256i, uint16_t, uint32_t>(mask, from);
}

inline __m128i _mm512_maskz_cvtepi64_epi8(__mmask8 mask, __m512i from) {  // what is left is 0
  return vector_of<__m128i, uint8_t>(
      [&](int64_t i) { return i < 8 && has(mask, i) ? static_cast<uint8_t>(lane<uint64_t>(from, i)) : uint8_t{0}; });
}

inline __m512 _mm512_maskz_cvtepi32_ps(__mmask16 mask, __m512i from) {
  return converted<__m512, float, int32_t>(mask, from);
}

inline __m512 _mm512_maskz_cvtph_ps(__mmask16 mask, __m256i from) {
  return some_of<__m512, float>(
      mask, [&](int64_t i) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(lane<uint16_t>(from, i)))); });
}

inline __m256i _mm512_maskz_cvtps_ph(__mmask16 mask, __m512 from, int /*nearest*/) {
  return some_of<__m256i, uint16_t>(mask, [&](int64_t i) {
    return _mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(lane<float>(from, i)), _MM_FROUND_TO_NEAREST_INT));
  });
}

// ----------------------------------------------------------------------------------------------------------- floats

inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }

inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return vector_of<__m512, float>(
      [&](int64_t i) { return std::fma(lane<float>(a, i), lane<float>(b, i), lane<float>(c, i)); });
}

inline __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(-a, b, c); }

inline __m512 _mm512_maskz_min_ps(__mmask16 mask, __m512 a, __m512 b) {  // b where either is NaN
  return some_of<__m512, float>(
      mask, [&](int64_t i) { return lane<float>(a, i) < lane<float>(b, i) ? lane<float>(a, i) : lane<float>(b, i); });
}

inline __m512 _mm512_maskz_max_ps(__mmask16 mask, __m512 a, __m512 b) {  // b where either is NaN
  return some_of<__m512, float>(
      mask, [&](int64_t i) { return lane<float>(a, i) > lane<float>(b, i) ? lane<float>(a, i) : lane<float>(b, i); });
}

inline __m512 _mm512_maskz_roundscale_ps(__mmask16 mask, __m512 a, int /*to whole numbers, nearest*/) {
  return some_of<__m512, float>(mask, [&](int64_t i) { return std::nearbyint(lane<float>(a, i)); });
}

inline __m512 _mm512_maskz_reduce_ps(__mmask16 mask, __m512 a, int /*by whole numbers, below*/) {
  return some_of<__m512, float>(mask, [&](int64_t i) {
    const float x = lane<float>(a, i);
    return std::isinf(x) ? 0.0f : x - std::floor(x);
  });
}

// a * 2^floor(b)
inline __m512 _mm512_mask_scalef_ps(__m512 other, __mmask16 mask, __m512 a, __m512 b) {
  return vector_of<__m512, float>([&](int64_t i) {
    const float power = std::floor(lane<float>(b, i));
    if (!has(mask, i)) return lane<float>(other, i);
    if (std::isnan(power)) return power;
    return std::ldexp(lane<float>(a, i), static_cast<int>(std::clamp(power, -999.0f, 999.0f)));
  });
}

inline __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
  return _mm512_mask_scalef_ps(__m512{}, mask, a, b);
}

// ------------------------------------------------------------------------------------------------------------ bfloat16

// Subnormal numbers count as 0.
inline float flushed(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

template <class V>
float bf16_lane(const V& from, int64_t i) {
  const uint32_t bits = static_cast<uint32_t>(lane<uint16_t>(from, i)) << 16;
  return flushed(lane<float>(bits, 0));
}

// Two numbers a lane, the odd ones first.
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  return vector_of<__m512, float>([&](int64_t i) {
    const float odd = flushed(std::fma(bf16_lane(a, 2 * i + 1), bf16_lane(b, 2 * i + 1), flushed(lane<float>(sum, i))));
    return flushed(std::fma(bf16_lane(a, 2 * i), bf16_lane(b, 2 * i), odd));
  });
}

// The second vector's numbers, then the first one's.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 second, __m512 first) {
  return vector_of<__m512bh, uint16_t>([&](int64_t i) {
    const float value = flushed(lane<float>(i < 16 ? first : second, i % 16));
    const uint32_t bits = lane<uint32_t>(value, 0);
    return std::isnan(value) ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  });
}

}  // namespace kvbackend::KVBACKEND_ISA
