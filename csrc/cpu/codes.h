// Numbers of 8 and 4 bits: what the codes of quantized caches stand for, and the codes of numbers.
//
// Each grid is a type of its own, so that rows of codes are read like rows of numbers: to_float and from_float for one,
// load, load_pair and store for a vector. Rounding, saturation and the treatment of NaN are those of
// kvbackend/codecs/grids.py, to the bit. Numbers that are encoded are not NaN.
#pragma once

#include <array>

#include "simd.h"

namespace kvbackend::KVBACKEND_ISA {

struct e4m3 {  // sign, 4 bits of exponent (bias 7), 3 of mantissa; 448 is the largest, 0x7f and 0xff are NaN
  uint8_t bits;
  static constexpr float kLargest = 448.0f;
};
struct e5m2 {  // the upper half of a float16
  uint8_t bits;
  static constexpr float kLargest = 57344.0f;
};
struct e8m0 {  // 2^(bits - 127), 255 is NaN: scales only
  uint8_t bits;
};
// Two codes in a byte, the even channel in the low nibble.
struct e2m1x2 {  // 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign
  uint8_t bits;
  static constexpr float kLargest = 6.0f;
};
struct uint4x2 {  // 0 .. 15
  uint8_t bits;
};
constexpr float kLargestInt8 = 127.0f;  // int8_t is its own type

// Whether there is a type for codes that are no NaN, which are read faster.
template <class Code>
constexpr bool kHasFinite = false;

// Codes in an element of storage.
template <class Code>
constexpr int64_t kPerByte = 1;
template <>
inline constexpr int64_t kPerByte<e2m1x2> = 2;
template <>
inline constexpr int64_t kPerByte<uint4x2> = 2;

#if defined(__AVX512F__)
template <>
inline constexpr bool kEvensFirst<e4m3> = true;
#endif
template <>
inline constexpr bool kEvensFirst<e2m1x2> = true;
template <>
inline constexpr bool kEvensFirst<uint4x2> = true;

// ------------------------------------------------------------------------------------------------------- one number

inline float to_float(int8_t code) { return code; }

inline float to_float(e4m3 code) {
  const uint32_t magnitude = code.bits & 0x7f, sign = static_cast<uint32_t>(code.bits & 0x80) << 24;
  if (magnitude == 0x7f) return bits_to_float(0x7fc00000 | sign);
  const float value = magnitude < 8 ? magnitude * 0x1p-9f : bits_to_float((magnitude << 20) + (120u << 23));
  return bits_to_float(float_to_bits(value) | sign);
}

inline float to_float(e5m2 code) { return to_float(fp16{static_cast<uint16_t>(code.bits << 8)}); }

inline float to_float(e8m0 code) {
  const uint32_t subnormal = 1 << 22, nan = 0x7fc00000;  // 2^-127 has no leading one
  return bits_to_float(code.bits == 0 ? subnormal : code.bits == 255 ? nan : static_cast<uint32_t>(code.bits) << 23);
}

inline float e2m1_to_float(uint32_t code) {
  const uint32_t low = code & 7, sign = (code & 8) << 28;
  const float value = low < 2 ? low * 0.5f : bits_to_float((low << 22) + (126u << 23));
  return bits_to_float(float_to_bits(value) | sign);
}

inline float even(e2m1x2 pair) { return e2m1_to_float(pair.bits & 15); }
inline float odd(e2m1x2 pair) { return e2m1_to_float(pair.bits >> 4); }
inline float even(uint4x2 pair) { return static_cast<float>(pair.bits & 15); }
inline float odd(uint4x2 pair) { return static_cast<float>(pair.bits >> 4); }

// |value| in a grid with `mantissa` bits of mantissa whose smallest normal number is 2^least and has code 1 <<
// mantissa: nearest, ties to even, at most `largest`. Below 2^least the float adder rounds, at the spacing of the
// subnormals.
template <int mantissa, int least>
inline uint32_t magnitude_code(float value, float largest) {
  constexpr int dropped = 23 - mantissa;
  constexpr uint32_t spacing = static_cast<uint32_t>(127 + least + dropped) << 23;  // a float whose last place it is
  const float magnitude = std::min(std::fabs(value), largest);
  const uint32_t bits = float_to_bits(magnitude);
  if (magnitude < bits_to_float(static_cast<uint32_t>(127 + least) << 23))
    return float_to_bits(magnitude + bits_to_float(spacing)) - spacing;
  const uint32_t half = (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
  return ((bits + half) >> dropped) - (static_cast<uint32_t>(126 + least) << mantissa);
}

inline uint32_t sign_bit(float value) { return float_to_bits(value) >> 31; }

template <>
inline e4m3 from_float<e4m3>(float value) {
  return {static_cast<uint8_t>(magnitude_code<3, -6>(value, e4m3::kLargest) | sign_bit(value) << 7)};
}

template <>
inline e5m2 from_float<e5m2>(float value) {
  return {static_cast<uint8_t>(magnitude_code<2, -14>(value, e5m2::kLargest) | sign_bit(value) << 7)};
}

template <>
inline int8_t from_float<int8_t>(float value) {  // ties away from zero; value + 0.5 would round for itself
  const float limited = std::min(std::max(value, -128.0f), 127.0f), whole = std::trunc(limited);
  return static_cast<int8_t>(whole + std::trunc((limited - whole) * 2.0f));
}

inline uint32_t e2m1_from_float(float value) {
  return magnitude_code<1, 0>(value, e2m1x2::kLargest) | sign_bit(value) << 3;
}

inline e2m1x2 pair_of(float even, float odd, e2m1x2) {
  return {static_cast<uint8_t>(e2m1_from_float(even) | e2m1_from_float(odd) << 4)};
}

inline uint4x2 pair_of(float even, float odd, uint4x2) {  // ties to even
  const auto code = [](float value) {
    return static_cast<uint32_t>(std::nearbyint(std::min(std::max(value, 0.0f), 15.0f)));
  };
  return {static_cast<uint8_t>(code(even) | code(odd) << 4)};
}

// --------------------------------------------------------------------------------------------------------- a vector

// Conversions between widths, by intrinsics: what the compiler makes of __builtin_convertvector here goes lane by lane.
// In AVX-512 the masked ones, since GCC 12 warns of the others' unused operand.

typedef uint64_t PairVec __attribute__((vector_size(kLanes * sizeof(uint32_t))));

// kLanes bytes as integers.
inline BitVec load_bytes(const void* from) {
#if defined(__AVX512F__)
  return (BitVec)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(static_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (BitVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
#else
  BitVec out;
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<const uint8_t*>(from)[i];
  return out;
#endif
}

inline HalfVec load_half_bytes(const void* from) {
#if defined(__AVX512F__)
  return (HalfVec)_mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (HalfVec)_mm_cvtepu8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
#else
  HalfVec out;
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<const uint8_t*>(from)[i];
  return out;
#endif
}

// The low bytes of integers.
inline void store_bytes(void* to, BitVec values) {
#if defined(__AVX512F__)
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)values));
#elif defined(__AVX2__)
  const __m256i lowest = _mm256_set1_epi32(0x0c080400), bytes = _mm256_shuffle_epi8((__m256i)values, lowest);
  const __m128i all = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(static_cast<__m128i*>(to), all);
#else
  for (int i = 0; i < kLanes; ++i) static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(values[i]);
#endif
}

// kLanes codes from half as many bytes, the low nibble first. Bits above a code's four are its neighbour's.
inline BitVec load_nibbles(const void* from) {
#if defined(__AVX512F__)
  const PairVec pairs = (PairVec)_mm512_maskz_cvtepu8_epi64(0xff, _mm_loadl_epi64(static_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  int bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const PairVec pairs = (PairVec)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
#else
  PairVec pairs;
  for (int i = 0; i < kLanes / 2; ++i) pairs[i] = static_cast<const uint8_t*>(from)[i];
#endif
  return (BitVec)(pairs | pairs << 28);
}

// The reverse; bits above a code's four are 0.
inline void store_nibbles(void* to, BitVec codes) {
  const PairVec pairs = (PairVec)codes | (PairVec)codes >> 28;
#if defined(__AVX512F__)
  _mm_storel_epi64(static_cast<__m128i*>(to), _mm512_maskz_cvtepi64_epi8(0xff, (__m512i)pairs));
#elif defined(__AVX2__)
  const __m256i lowest = _mm256_set1_epi32(0x80800800), bytes = _mm256_shuffle_epi8((__m256i)pairs, lowest);
  const __m128i all = _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  const int word = _mm_cvtsi128_si32(all);
  std::memcpy(to, &word, sizeof word);
#else
  for (int i = 0; i < kLanes / 2; ++i) static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(pairs[i]);
#endif
}

inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vec)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, codes));
#elif defined(__AVX2__)
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
#else
  Vec out;
  for (int i = 0; i < kLanes; ++i) out[i] = to_float(from[i]);
  return out;
#endif
}

// As the upper half of a float16, which it is 2^-8 of: the conversion copes with subnormals.
inline Vec load(const e4m3* from) {
  const HalfVec code = load_half_bytes(from), magnitude = code & 0x7f;
  const HalfVec nan = (HalfVec)(magnitude == 0x7f) & 0x4000;
  return from_halves((code & 0x80) << 8 | magnitude << 7 | nan) * 256.0f;
}

#if defined(__AVX512F__)
#if defined(__AVX512VBMI__)
// The two bytes of each magnitude as bfloat16.
struct HalvesOfMagnitudes {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
  constexpr void set(int magnitude, int bits) {
    low[magnitude] = static_cast<uint8_t>(bits);
    high[magnitude] = static_cast<uint8_t>(bits >> 8);
  }
};

constexpr HalvesOfMagnitudes halves_of_e4m3() {
  HalvesOfMagnitudes halves;
  for (int magnitude = 1; magnitude < 127; ++magnitude) {
    int bits = (120 << 7) + (magnitude << 4);
    for (int lead = 0; lead < 3; ++lead) {  // below 8 they are subnormal: multiples of 2^-9
      if (magnitude >> lead == 1) bits = ((118 + lead) << 7) + ((magnitude << (7 - lead)) & 0x7f);
    }
    halves.set(magnitude, bits);
  }
  halves.set(127, 0x7fc0);
  return halves;
}

constexpr HalvesOfMagnitudes halves_of_int8() {
  HalvesOfMagnitudes halves;
  for (int magnitude = 1; magnitude < 128; ++magnitude) {
    int exponent = 0;
    while (magnitude >> (exponent + 1)) ++exponent;
    halves.set(magnitude, ((127 + exponent) << 7) + ((magnitude << (7 - exponent)) & 0x7f));
  }
  return halves;
}

template <class Code>
inline constexpr HalvesOfMagnitudes kHalves;  // of codes that to_halves knows
template <>
inline constexpr HalvesOfMagnitudes kHalves<e4m3> = halves_of_e4m3();
template <>
inline constexpr HalvesOfMagnitudes kHalves<int8_t> = halves_of_int8();

typedef uint8_t Bytes __attribute__((vector_size(64)));

// A constant of loops that stays in a register: the compiler would make it anew for each row.
inline Bytes kept(Bytes value) {
#ifndef KVBACKEND_EMULATED_AVX512
  asm("" : "+v"(value));
#endif
  return value;
}
inline Bytes kept(const uint8_t* bytes) { return kept((Bytes)_mm512_load_si512(bytes)); }
inline Bytes kept(uint8_t byte) { return kept(Bytes{} + byte); }

// Finds both bytes of 64 codes as bfloat16.
template <class Code>
class FindBytes;

// By their magnitudes.
template <>
class FindBytes<int8_t> {
 public:
  void operator()(Bytes codes, Bytes& low, Bytes& high) const {
    const Bytes magnitude = (Bytes)_mm512_maskz_abs_epi8(~0ull, (__m512i)codes);
    const auto find = [&](const Bytes(&table)[2]) {
      return (Bytes)_mm512_permutex2var_epi8((__m512i)table[0], (__m512i)magnitude, (__m512i)table[1]);
    };
    low = find(low_);
    high = find(high_) | (codes & sign_);
    high = magnitude == sign_ ? lowest_ : high;  // -128 has no magnitude below 128
  }

 private:
  static constexpr const HalvesOfMagnitudes& kTable = kHalves<int8_t>;
  const Bytes low_[2] = {kept(kTable.low), kept(kTable.low + 64)};
  const Bytes high_[2] = {kept(kTable.high), kept(kTable.high + 64)};
  const Bytes sign_ = kept(uint8_t{0x80}), lowest_ = kept(uint8_t{0xc3});
};

// A matrix over bits, for gf2p8affine: which bits of a byte bit i of the result is the sum of.
constexpr int64_t bit_matrix(std::array<uint8_t, 8> bits) {
  uint64_t matrix = 0;
  for (const uint8_t row : bits) matrix = matrix << 8 | row;
  return static_cast<int64_t>(matrix);
}

// The rare codes of e4m3, by their lower 6 bits: magnitudes 0 to 7, which are no normal numbers, and 127.
struct RareBytes {
  alignas(64) uint8_t low[64] = {}, high[64] = {};
  constexpr RareBytes() {
    for (const int magnitude : {0, 1, 2, 3, 4, 5, 6, 7, 127}) {
      low[magnitude % 64] = kHalves<e4m3>.low[magnitude];
      high[magnitude % 64] = kHalves<e4m3>.high[magnitude];
    }
  }
};

// Of a normal number's bits, s eeee mmm, the lower byte has e0 mmm and four zeros, and the higher one
// e3 !e3 !e3 !e3 !e3 e2 e1, 120 more than its exponent, below the sign.
template <>
class FindBytes<e4m3> {
 public:
  void operator()(Bytes codes, Bytes& low, Bytes& high) const {
    const auto rare = ((codes + one_) & magnitude_) < rare_;
    const auto find = [&](Bytes table) {
      return (Bytes)_mm512_maskz_permutexvar_epi8(~0ull, (__m512i)codes, (__m512i)table);
    };
    low = (Bytes)_mm512_gf2p8affine_epi64_epi8((__m512i)codes, (__m512i)low_, 0);
    high = (Bytes)_mm512_gf2p8affine_epi64_epi8((__m512i)codes, (__m512i)high_, 0x3c);
    low = rare ? find(rare_low_) : low;
    high = (rare ? find(rare_high_) : high) | (codes & ~magnitude_);
  }

 private:
  static constexpr RareBytes kRare{};
  static Bytes matrix(std::array<uint8_t, 8> bits) { return kept((Bytes)_mm512_set1_epi64(bit_matrix(bits))); }
  const Bytes low_ = matrix({0, 0, 0, 0, 1, 2, 4, 8});
  const Bytes high_ = matrix({0x10, 0x20, 0x40, 0x40, 0x40, 0x40, 0x40, 0});
  const Bytes rare_low_ = kept(kRare.low), rare_high_ = kept(kRare.high);
  const Bytes one_ = kept(uint8_t{1}), magnitude_ = kept(uint8_t{0x7f}), rare_ = kept(uint8_t{9});
};

constexpr int64_t kCodesAtOnce = 64, kTogether = 8;  // of the first, so many stay together in to_halves

// 64 codes as bfloat16: of each 16 the first 8 go to `first`.
template <class Code>
void to_halves(const void* codes, const FindBytes<Code>& find_bytes, __m512i& first, __m512i& second) {
  Bytes low, high;
  find_bytes((Bytes)_mm512_loadu_si512(codes), low, high);
  first = _mm512_maskz_unpacklo_epi8(~0ull, (__m512i)low, (__m512i)high);
  second = _mm512_maskz_unpackhi_epi8(~0ull, (__m512i)low, (__m512i)high);
}

// kPair codes as bfloat16: both bytes of each are looked up by its magnitude.
inline BitVec load_halves(const e4m3* from) {
  alignas(64) static constexpr uint8_t kTwice[64] = {0,  0,  1,  1,  2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                                     8,  8,  9,  9,  10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15,
                                                     16, 16, 17, 17, 18, 18, 19, 19, 20, 20, 21, 21, 22, 22, 23, 23,
                                                     24, 24, 25, 25, 26, 26, 27, 27, 28, 28, 29, 29, 30, 30, 31, 31};
  constexpr __mmask64 kLow = 0x5555555555555555, kHigh = ~kLow;
  const auto table = [](const uint8_t* bytes) { return _mm512_load_si512(bytes); };
  const __m512i bytes = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512i code = _mm512_maskz_permutexvar_epi8(~0ull, table(kTwice), bytes);
  const __m512i high =
      _mm512_mask2_permutex2var_epi8(table(kHalves<e4m3>.high), code, kHigh, table(kHalves<e4m3>.high + 64));
  const __m512i both =
      _mm512_mask2_permutex2var_epi8(table(kHalves<e4m3>.low), high, kLow, table(kHalves<e4m3>.low + 64));
  return (BitVec)_mm512_ternarylogic_epi32(both, code, _mm512_set1_epi32(0x80008000), 0xf8);  // and its sign
}
#else
// The magnitudes 0 to 7, which are subnormal, as bfloat16, and 127, by its low bits.
alignas(64) inline constexpr uint16_t kRareE4M3[32] = {
    0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0,      0,      0,      0,      0,      0,      0,      0, 0, 0, 0, 0, 0, 0, 0x7fc0};

// kPair codes as bfloat16. A normal number's exponent and fraction are moved.
inline BitVec load_halves(const e4m3* from) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m512i codes = _mm512_maskz_cvtepi8_epi16(~0u, bytes);  // the sign fills the upper half
  const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __m512i after = _mm512_and_si512(_mm512_add_epi16(magnitude, _mm512_set1_epi16(1)), _mm512_set1_epi16(0x7f));
  const __mmask32 rare = _mm512_cmplt_epi16_mask(after, _mm512_set1_epi16(9));
  const __m512i table = _mm512_load_si512(kRareE4M3);
  const __m512i found = _mm512_mask_permutexvar_epi16(normal, rare, magnitude, table);
  return (BitVec)found | ((BitVec)codes & 0x80008000);
}
#endif

inline void load_pair(const e4m3* from, Vec& first, Vec& second) {
  const BitVec halves = load_halves(from);
  first = (Vec)(halves << 16);
  second = (Vec)(halves & 0xffff0000);
}
#elif defined(__AVX2__)
// As load, of 16 codes at once. The magnitude of NaN alone carries into the highest bit of the exponent.
inline void load_pair(const e4m3* from, Vec& first, Vec& second) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i spread = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);  // the sign fills the upper bits
  const __m256i after = _mm256_add_epi16(_mm256_and_si256(spread, _mm256_set1_epi16(0x3f80)), _mm256_set1_epi16(0x80));
  const __m256i nan = _mm256_and_si256(after, _mm256_set1_epi16(0x4000));
  const __m256i halves =
      _mm256_or_si256(_mm256_and_si256(spread, _mm256_set1_epi16(static_cast<int16_t>(0xbfff))), nan);
  first = (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)) * 256.0f;
  second = (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)) * 256.0f;
}

// The same in half as many instructions where no code is NaN.
struct finite_e4m3 {
  uint8_t bits;
};
template <>
inline constexpr float kUnit<finite_e4m3> = 256.0f;
template <>
inline constexpr bool kHasFinite<e4m3> = true;

inline const finite_e4m3* const* as_finite(const e4m3* const* rows) {
  return reinterpret_cast<const finite_e4m3* const*>(rows);
}

// Whether none of these rows has a NaN: of the magnitudes, the greatest.
inline bool all_finite(const e4m3* const* rows, int64_t count, int64_t dim) {
  if (dim % 32) return false;  // not looked into
  typedef uint8_t Bytes __attribute__((vector_size(32)));
  Bytes most = {};
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t d = 0; d < dim; d += 32) {
      Bytes codes;
      std::memcpy(&codes, rows[n] + d, sizeof codes);
      codes |= 0x80;
      most = codes > most ? codes : most;
    }
  }
  return _mm256_movemask_epi8((__m256i)(most == 0xff)) == 0;
}

inline void load_pair(const finite_e4m3* from, Vec& first, Vec& second) {
  const __m256i spread = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)), 7);
  const __m256i halves = _mm256_and_si256(spread, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  first = (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  second = (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}
#endif

// The upper half of a float16.
inline Vec load(const e5m2* from) { return from_halves(load_half_bytes(from) << 8); }

// 2^(bits - 127), where 0 stands for a subnormal and 255 for NaN.
inline Vec e8m0_values(BitVec bits) {
  const BitVec normal = bits << 23, subnormal = BitVec{} + (1 << 22), nan = BitVec{} + 0x7fc00000;
  return (Vec)(bits == 0 ? subnormal : bits == 255 ? nan : normal);
}

inline Vec load(const e8m0* from) { return e8m0_values(load_bytes(from)); }

// The values of the low nibbles of integers.
inline Vec e2m1_values(BitVec code) {
#if defined(__AVX512F__)
  const __m512 values = _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6);
  return (Vec)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)code, values);
#elif defined(__AVX2__)
  const BitVec code_bits = {0u, 1u << 28, 2u << 28, 3u << 28, 4u << 28, 5u << 28, 6u << 28, 7u << 28};
  const Vec values = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const __m256i table = (__m256i)((BitVec)values ^ code_bits);  // the code's own bits, which are moved with its sign
  return (Vec)((BitVec)_mm256_permutevar8x32_epi32(table, (__m256i)code) ^ code << 28);
#else
  Vec out;
  for (int i = 0; i < kLanes; ++i) out[i] = e2m1_to_float(code[i]);
  return out;
#endif
}

inline Vec uint4_values(BitVec code) {  // below 2^23 an integer is a mantissa
  return (Vec)((code & 15) | 0x4b000000) - 8388608.0f;
}

// kLanes codes in order.
inline Vec load(const e2m1x2* from) { return e2m1_values(load_nibbles(from)); }
inline Vec load(const uint4x2* from) { return uint4_values(load_nibbles(from)); }

// kPair codes, even ones first.
inline void load_pair(const e2m1x2* from, Vec& first, Vec& second) {
  const BitVec code = load_bytes(from);
  first = e2m1_values(code);
  second = e2m1_values(code >> 4);
}

inline void load_pair(const uint4x2* from, Vec& first, Vec& second) {
  const BitVec code = load_bytes(from);
  first = uint4_values(code);
  second = uint4_values(code >> 4);
}

inline void load_pair(const int8_t* from, Vec& first, Vec& second) {
  first = load(from);
  second = load(from + kLanes);
}

inline Vec least(Vec a, Vec b) {  // b where either is NaN
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

inline Vec greatest(Vec a, Vec b) {  // b where either is NaN
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// As magnitude_code, lane by lane, with the sign above.
template <int mantissa, int least_exponent, int bits_of_code>
inline BitVec float_codes(Vec value, float largest) {
  constexpr int dropped = 23 - mantissa;
  constexpr uint32_t spacing = static_cast<uint32_t>(127 + least_exponent + dropped) << 23;
  constexpr uint32_t offset = static_cast<uint32_t>(126 + least_exponent) << 23;
  const Vec magnitude = least((Vec)((BitVec)value & 0x7fffffff), broadcast(largest));
  const BitVec bits = (BitVec)magnitude;
  const BitVec subnormal = (BitVec)(magnitude + bits_to_float(spacing)) - spacing;
  const BitVec normal = (bits + ((1u << (dropped - 1)) - 1 - offset) + (bits >> dropped & 1)) >> dropped;
  const float smallest_normal = bits_to_float(static_cast<uint32_t>(127 + least_exponent) << 23);
  const BitVec sign = (BitVec)value >> (32 - bits_of_code) & (1u << (bits_of_code - 1));
  return (magnitude < smallest_normal ? subnormal : normal) | sign;
}

inline void store(e4m3* to, Vec value) { store_bytes(to, float_codes<3, -6, 8>(value, e4m3::kLargest)); }

inline void store(e5m2* to, Vec value) { store_bytes(to, float_codes<2, -14, 8>(value, e5m2::kLargest)); }

// The float below 0.5 is added, whose sum rounds to a whole number just where value + 0.5 is one.
inline void store(int8_t* to, Vec value) {
  const Vec limited = least(greatest(value, broadcast(-128.0f)), broadcast(127.0f));
  const BitVec half = ((BitVec)value & 0x80000000) | 0x3effffff;
  typedef int32_t IntVec __attribute__((vector_size(sizeof(Vec))));
  store_bytes(to, (BitVec) __builtin_convertvector(limited + (Vec)half, IntVec));
}

inline void store(e2m1x2* to, Vec value) { store_nibbles(to, float_codes<1, 0, 4>(value, e2m1x2::kLargest)); }

inline void store(uint4x2* to, Vec value) {
  const Vec limited = least(greatest(value, Vec{}), broadcast(15.0f));
  store_nibbles(to, (BitVec)(limited + 12582912.0f) & 15);  // the adder rounds
}

}  // namespace kvbackend::KVBACKEND_ISA
