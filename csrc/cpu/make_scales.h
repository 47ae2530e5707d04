// What scales are made from, the magnitudes and limits of numbers, and the scales: to the bit as kvbackend/codecs has
// them. NaN counts as 0, infinity as 65504.
#pragma once

#include "code_pairs.h"
#include "kv_format.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr float kLargestFloat16 = 65504.0f;
constexpr float kInfiniteFloat = std::numeric_limits<float>::infinity();

inline Vec without_nan(Vec x) { return x == x ? x : Vec{}; }
inline float without_nan(float x) { return x == x ? x : 0.0f; }

inline float magnitude(float x) {
  const float absolute = std::fabs(without_nan(x));
  return absolute == kInfiniteFloat ? kLargestFloat16 : absolute;
}

inline Vec magnitude(Vec x) {
  const Vec absolute = (Vec)((BitVec)without_nan(x) & 0x7fffffff);
  return absolute == kInfiniteFloat ? broadcast(kLargestFloat16) : absolute;
}

// ------------------------------------------------------------------------------------------------------ magnitudes

// The bits of numbers as integers, which are ordered as magnitudes are.
template <class T>
struct Bits {  // of 16 bits
  typedef uint16_t Integer;
  typedef HalfVec Vector;
  typedef int16_t Signed __attribute__((vector_size(sizeof(HalfVec))));
  static constexpr bool kIsHalf = std::is_same_v<T, fp16>;
  static constexpr Integer kInfinity = kIsHalf ? 0x7c00 : 0x7f80;
  static constexpr int16_t kMost = kIsHalf ? 0x7bff : 0x477f;  // the largest number that is no more than 65504
};
template <>
struct Bits<float> {
  typedef uint32_t Integer;
  typedef BitVec Vector;
  typedef int32_t Signed __attribute__((vector_size(sizeof(BitVec))));
  static constexpr Integer kInfinity = 0x7f800000;
  static constexpr int32_t kMost = 0x477fe000;
};

template <class T, class Integer>
inline float bits_as_float(Integer bits) {
  T number;
  std::memcpy(&number, &bits, sizeof number);
  return to_float(number);
}

// One of the lanes of a vector: the one that pick(a, b) prefers to all others.
template <class Vector, class F>
inline auto pick_lane(Vector vector, F&& pick) {
  typedef std::remove_reference_t<decltype(vector[0])> Lane;
  typedef Lane Four __attribute__((vector_size(4 * sizeof(Lane))));
  Four parts[kLanes / 4];
  std::memcpy(parts, &vector, sizeof vector);
  for (int half = kLanes / 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) parts[i] = pick(parts[i], parts[i + half]);
  }
  const Four four = parts[0];
  return pick(pick(four[0], four[1]), pick(four[2], four[3]));
}

template <class Vector>
inline auto largest_lane(Vector vector) {
  return pick_lane(vector, [](auto a, auto b) { return a > b ? a : b; });
}

template <class Vector>
inline auto least_lane(Vector vector) {
  return pick_lane(vector, [](auto a, auto b) { return a < b ? a : b; });
}

#if defined(__AVX2__)
inline uint16_t largest_lane(HalfVec vector) {  // the instruction finds the least of eight
#if defined(__AVX512F__)
  const __m128i eight =
      _mm_max_epu16(_mm256_castsi256_si128((__m256i)vector), _mm256_extracti128_si256((__m256i)vector, 1));
#else
  const __m128i eight = (__m128i)vector;
#endif
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  return static_cast<uint16_t>(~_mm_cvtsi128_si32(least));
}
#endif

// The largest magnitude among numbers that follow each other, as bits: kInfinity and more where one is not finite.
template <class T, class Size>
inline typename Bits<T>::Integer largest_bits(const T* x, Size size) {
  typedef typename Bits<T>::Integer Integer;
  typedef typename Bits<T>::Vector Vector;
  constexpr Integer kMagnitude = std::numeric_limits<Integer>::max() >> 1;
  Integer largest = 0;
  int64_t i = 0;
  if (size >= kLanes) {
    Vector top{};
    for (; i + kLanes <= size; i += kLanes) {
      Vector bits;
      std::memcpy(&bits, x + i, sizeof bits);
      bits &= kMagnitude;
      top = bits > top ? bits : top;
    }
    largest = largest_lane(top);
  }
  if constexpr (kMayHaveRest<Size>) {
    for (; i < size; ++i) {
      Integer bits;
      std::memcpy(&bits, x + i, sizeof bits);
      largest = std::max<Integer>(largest, bits & kMagnitude);
    }
  }
  return largest;
}

template <class T>
inline float largest_magnitude(const T* x, int64_t size) {
  const auto largest = largest_bits(x, size);
  if (largest < Bits<T>::kInfinity) return bits_as_float<T>(largest);
  float finite = 0.0f;
  for (int64_t i = 0; i < size; ++i) finite = std::max(finite, magnitude(to_float(x[i])));
  return finite;
}

// Bits of numbers as integers that are ordered as the numbers are, and back: -0 comes just below 0.
template <class Signed>
inline Signed ordered(Signed bits) {
  constexpr int kSign = 8 * sizeof(bits[0]) - 1;
  return bits ^ (bits >> kSign & std::numeric_limits<std::remove_reference_t<decltype(bits[0])>>::max());
}

// ---------------------------------------------------------------------------------------------------------- scales

template <class Code>
struct Grid {
  static constexpr float kLargest = Code::kLargest;
  static constexpr int kExponent = std::is_same_v<Code, e4m3> ? 8 : std::is_same_v<Code, e5m2> ? 15 : 2;  // of kLargest
  static constexpr float kFloor = std::is_same_v<Code, e2m1x2> ? 6 * 0x1p-126f : 1e-4f;  // least amax for a power of 2
};
template <>
struct Grid<int8_t> {
  static constexpr float kLargest = 127.0f, kFloor = 1e-4f;
  static constexpr int kExponent = 6;
};

// Scales of spans whose largest magnitudes are amax [count]: as floats, over amax, and as they are stored. Both arrays
// have room for a multiple of kLanes.
template <class Code>
inline void make_scales(Rule rule, float* amax, int64_t count, void* stored) {
  const Vec largest = broadcast(Grid<Code>::kLargest), inverse = broadcast(1.0f / Grid<Code>::kLargest);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec top = load(amax + i);
    uint8_t* bytes = static_cast<uint8_t*>(stored) + i;
    if (rule == Rule::amax) {
      const Vec scale = maximum(quotient(top, largest, inverse), broadcast(1e-6f));
      store(static_cast<float*>(stored) + i, scale);
      store(amax + i, scale);
    } else if (rule == Rule::e4m3) {
      const Vec limited = least(top, broadcast(0x1p12f));  // more than the scales hold, which saturate; top may be inf
      BitVec codes;
      const Vec scale = rounded_to_e4m3(maximum(quotient(limited, largest, inverse), broadcast(0x1p-9f)), codes);
      store_bytes(bytes, codes);
      store(amax + i, scale);
    } else {
      BitVec exponent;
      if (rule == Rule::pow2_ceil) {
        const BitVec bits = (BitVec)quotient(maximum(top, broadcast(Grid<Code>::kFloor)), largest, inverse);
        exponent = (bits >> 23) + ((BitVec)((bits & 0x7fffff) != 0) & 1);
        exponent = exponent > 254 ? BitVec{} + 254 : exponent;
      } else {
        exponent = (BitVec)top >> 23;
        exponent = exponent > Grid<Code>::kExponent ? exponent - Grid<Code>::kExponent : BitVec{};
      }
      store_bytes(bytes, exponent);
      store(amax + i, e8m0_values(exponent));
    }
  }
}

// What KIVI's grid of 16 steps begins with and is made of: limits [count] of the numbers of each span, which become the
// minimum and the step as they are stored in float16. The step is 1 where all are equal, or as good as.
inline void make_ranges(float* lows, float* highs, int64_t count, fp16* stored_lows, fp16* stored_steps) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store(stored_steps + i, (load(highs + i) - load(lows + i)) / 15.0f);
    store(stored_lows + i, load(lows + i) + 0.0f);  // 0 for -0
    const Vec step = load(stored_steps + i);
    store(highs + i, step == 0.0f ? broadcast(1.0f) : step);
    store(stored_steps + i, load(highs + i));
    store(lows + i, load(stored_lows + i));
  }
}

inline float within_float16(float x) { return std::min(std::max(without_nan(x), -kLargestFloat16), kLargestFloat16); }

// The least and the largest of up to kLanes columns of numbers, `stride` apart, as floats. False where one of them is
// NaN or beyond float16: then both mean nothing.
template <class T>
inline bool column_limits(const T* x, int64_t rows, int64_t stride, Vec& lows, Vec& highs) {
  typedef typename Bits<T>::Signed Signed;
  const auto number = [&](int64_t row) {
    Signed bits;
    std::memcpy(&bits, x + row * stride, sizeof bits);
    return ordered(bits);
  };
  Signed low = number(0), high = low;
  for (int64_t row = 1; row < rows; ++row) {
    const Signed next = number(row);
    low = next < low ? next : low;
    high = next > high ? next : high;
  }
  T numbers[kLanes];
  const Signed low_bits = ordered(low), high_bits = ordered(high);
  std::memcpy(numbers, &low_bits, sizeof numbers);
  lows = load(numbers);
  std::memcpy(numbers, &high_bits, sizeof numbers);
  highs = load(numbers);
  const auto within = (high <= Bits<T>::kMost) & (low >= ~Bits<T>::kMost);
  return largest_lane(within) != 0;  // true is -1
}

// Those of a row of numbers.
template <class T, class Size>
inline bool find_limits(const T* x, Size size, float& low, float& high) {
  bool within = true;
  low = std::numeric_limits<float>::infinity();
  high = -low;
  int64_t i = 0;
  if (size >= kLanes) {
    Vec lows, highs;
    within = column_limits(x, size / kLanes, kLanes, lows, highs);
    low = least_lane(lows);
    high = largest_lane(highs);
    i = size / kLanes * kLanes;
  }
  if constexpr (kMayHaveRest<Size>) {
    for (; i < size; ++i) {
      const float number = to_float(x[i]);
      within &= std::fabs(number) <= kLargestFloat16;
      low = std::min(low, number);
      high = std::max(high, number);
    }
  }
  return within;
}

}  // namespace kvbackend::KVBACKEND_ISA
