// Rows of numbers as codes: scales from the largest magnitudes, then x / scale in the grid, to the bit as
// kvbackend/codecs has it. NaN counts as 0, infinity as 65504 for a scale.
#pragma once

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

// Magnitudes are ordered as their bits are.
template <class T>
struct Bits;
template <>
struct Bits<float> {
  typedef uint32_t Integer;
  typedef BitVec Vector;
  static constexpr Integer kInfinity = 0x7f800000;
};
template <>
struct Bits<bf16> {
  typedef uint16_t Integer;
  typedef HalfVec Vector;
  static constexpr Integer kInfinity = 0x7f80;
};
template <>
struct Bits<fp16> {
  typedef uint16_t Integer;
  typedef HalfVec Vector;
  static constexpr Integer kInfinity = 0x7c00;
};

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

// The largest magnitude among numbers that follow each other.
template <class T>
inline float largest_magnitude(const T* x, int64_t size) {
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
  for (; i < size; ++i) {
    Integer bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max<Integer>(largest, bits & kMagnitude);
  }
  if (largest < Bits<T>::kInfinity) {
    T number;
    std::memcpy(&number, &largest, sizeof number);
    return to_float(number);
  }
  float finite = 0.0f;
  for (i = 0; i < size; ++i) finite = std::max(finite, magnitude(to_float(x[i])));
  return finite;
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
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec top = load(amax + i);
    uint8_t* bytes = static_cast<uint8_t*>(stored) + i;
    if (rule == Rule::amax) {
      const Vec scale = maximum(top / Grid<Code>::kLargest, broadcast(1e-6f));
      store(static_cast<float*>(stored) + i, scale);
      store(amax + i, scale);
    } else if (rule == Rule::e4m3) {
      e4m3* scales = reinterpret_cast<e4m3*>(bytes);
      store(scales, maximum(top / Grid<Code>::kLargest, broadcast(0x1p-9f)));
      store(amax + i, load(scales));
    } else {
      BitVec exponent;
      if (rule == Rule::pow2_ceil) {
        const BitVec bits = (BitVec)(maximum(top, broadcast(Grid<Code>::kFloor)) / Grid<Code>::kLargest);
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
    store(stored_lows + i, load(lows + i));
    const Vec step = load(stored_steps + i);
    store(highs + i, step == 0.0f ? broadcast(1.0f) : step);
    store(stored_steps + i, load(highs + i));
    store(lows + i, load(stored_lows + i));
  }
}

inline Vec within_float16(Vec x) {
  const Vec number = without_nan(x), low = broadcast(-kLargestFloat16), high = broadcast(kLargestFloat16);
  return number < low ? low : number > high ? high : number;
}

inline float within_float16(float x) { return std::min(std::max(without_nan(x), -kLargestFloat16), kLargestFloat16); }

inline Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

// The limits of numbers that follow each other.
template <class T>
inline void find_limits(const T* x, int64_t size, float& low, float& high) {
  low = high = within_float16(to_float(x[0]));
  int64_t i = 0;
  if (size >= kLanes) {
    Vec lowest = within_float16(load(x)), highest = lowest;
    for (i = kLanes; i + kLanes <= size; i += kLanes) {
      const Vec number = within_float16(load(x + i));
      lowest = minimum(lowest, number);
      highest = maximum(highest, number);
    }
    low = least_lane(lowest);
    high = largest_lane(highest);
  }
  for (; i < size; ++i) {
    const float number = within_float16(to_float(x[i]));
    low = std::min(low, number);
    high = std::max(high, number);
  }
}

// ----------------------------------------------------------------------------------------------------------- codes

// How a number becomes what the grid rounds. `other` is the global scale, or the minimum. A power of two has an exact
// reciprocal, which is then what `scale` is.
enum class By { scale, reciprocal, global_and_scale, minimum_and_scale };

template <By by, class Number>
inline Number scaled(Number x, Number scale, Number other) {
  if constexpr (by == By::minimum_and_scale) return (within_float16(x) - other) / scale;
  x = without_nan(x);
  if constexpr (by == By::reciprocal) return x * scale;
  if constexpr (by == By::global_and_scale) x = x / other;
  return x / scale;
}

template <class Code, class F>
inline void store_code(Code* codes, int64_t i, F&& number) {
  if constexpr (kPerByte<Code> == 1) {
    codes[i] = from_float<Code>(number(i));
  } else {
    codes[i / 2] = pair_of(number(i), number(i + 1), Code{});
  }
}

// Neighbours that share a scale.
template <By by, class T, class Code>
inline void encode_span(const T* x, int64_t size, float scale, float other, Code* codes) {
  const Vec scales = broadcast(scale), others = broadcast(other);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(codes + i / kPerByte<Code>, scaled<by>(load(x + i), scales, others));
  for (; i < size; i += kPerByte<Code>)
    store_code(codes, i, [&](int64_t at) { return scaled<by>(to_float(x[at]), scale, other); });
}

// A scale for each number.
template <By by, class T, class Code>
inline void encode_each(const T* x, int64_t size, const float* scales, const float* lows, float global, Code* codes) {
  constexpr bool kLows = by == By::minimum_and_scale;
  const Vec globals = broadcast(global);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(codes + i / kPerByte<Code>, scaled<by>(load(x + i), load(scales + i), kLows ? load(lows + i) : globals));
  for (; i < size; i += kPerByte<Code>)
    store_code(codes, i,
               [&](int64_t at) { return scaled<by>(to_float(x[at]), scales[at], kLows ? lows[at] : global); });
}

// x [T, Hk, D], or [T, D] where all heads share a row, as rows whose numbers follow each other.
template <class T>
struct Rows {
  explicit Rows(const Tensor& x)
      : data(static_cast<const T*>(x.const_data_ptr())),
        tokens(x.size(0)),
        heads(x.dim() == 3 ? x.size(1) : 1),
        row(x.size(x.dim() - 1)),
        token_stride(x.stride(0)),
        head_stride(x.dim() == 3 ? x.stride(1) : row),
        stride(x.stride(x.dim() - 1)) {}

  // Takes a token's heads as one row, where memory and scales allow it.
  bool merge_heads(Scales& scales) {
    if (stride != 1 || head_stride != row || !scales.merge_heads(heads)) return false;
    row *= heads;
    heads = 1;
    return true;
  }

  // `room` holds the row where its numbers do not follow each other.
  const T* at(int64_t token, int64_t head, std::vector<T>& room) const {
    const T* from = data + token * token_stride + head * head_stride;
    if (stride == 1) return from;
    room.resize(row);
    for (int64_t i = 0; i < row; ++i) room[i] = from[i * stride];
    return room.data();
  }

  int64_t row_bytes() const { return heads * row * static_cast<int64_t>(sizeof(T)); }

  const T* data;
  int64_t tokens, heads, row, token_stride, head_stride, stride;
};

// A thread's way to encode rows of `count` spans: with scales of their own, or with given ones.
template <class T, class Code>
class RowEncoder {
 public:
  RowEncoder(const KVFormat& format, float global, int64_t span, int64_t count)
      : format_(format),
        global_(global),
        span_(span),
        count_(count),
        scales_(round_up(count, kLanes)),
        lows_(kHasMinimum<Code> ? scales_.size() : 0),
        stored_(scales_.size() * sizeof(float)),
        stored_lows_(lows_.size()) {}

  // What the rows' own scales are stored as, after encode(x, codes).
  const void* stored() const { return stored_.data(); }
  const fp16* stored_lows() const { return stored_lows_.data(); }

  void encode(const T* x, Code* codes) {
    if constexpr (kHasMinimum<Code>) {
      for (int64_t i = 0; i < count_; ++i) find_limits(x + i * span_, span_, lows_[i], scales_[i]);
    } else {
      for (int64_t i = 0; i < count_; ++i) scales_[i] = largest_magnitude(x + i * span_, span_);
    }
    finish_scales();
    encode(x, scales_.data(), codes);
  }

  // Rows [group, row] that share the scales of their channels: `stride` numbers apart, their codes `codes_stride`.
  void encode_group(const T* x, int64_t group, int64_t stride, Code* codes, int64_t codes_stride) {
    for (int64_t i = 0; i < count_; ++i) lows_[i] = scales_[i] = within_float16(to_float(x[i]));
    for (int64_t row = 1; row < group; ++row) {
      const T* numbers = x + row * stride;
      int64_t i = 0;
      for (; i + kLanes <= count_; i += kLanes) {
        const Vec number = within_float16(load(numbers + i));
        store(&lows_[i], minimum(load(&lows_[i]), number));
        store(&scales_[i], maximum(load(&scales_[i]), number));
      }
      for (; i < count_; ++i) {
        const float number = within_float16(to_float(numbers[i]));
        lows_[i] = std::min(lows_[i], number);
        scales_[i] = std::max(scales_[i], number);
      }
    }
    finish_scales();
    for (int64_t row = 0; row < group; ++row) encode(x + row * stride, scales_.data(), codes + row * codes_stride);
  }

  void encode(const T* x, const float* scales, Code* codes) {
    if constexpr (kHasMinimum<Code>) {
      encode_by<By::minimum_and_scale>(x, scales, codes);
    } else if (format_.global_scale) {
      encode_by<By::global_and_scale>(x, scales, codes);
    } else if (format_.scale_dtype == ScalarType::Byte) {
      for (int64_t i = 0; i < count_; i += kLanes) store(&scales_[i], 1.0f / load(scales + i));
      encode_by<By::reciprocal>(x, scales_.data(), codes);
    } else {
      encode_by<By::scale>(x, scales, codes);
    }
  }

 private:
  void finish_scales() {
    if constexpr (kHasMinimum<Code>) {
      make_ranges(lows_.data(), scales_.data(), count_, stored_lows_.data(), reinterpret_cast<fp16*>(stored_.data()));
    } else {
      if (format_.global_scale) {
        for (int64_t i = 0; i < count_; i += kLanes) store(&scales_[i], load(&scales_[i]) / global_);
      }
      make_scales<Code>(format_.rule, scales_.data(), count_, stored_.data());
    }
  }

  template <By by>
  void encode_by(const T* x, const float* scales, Code* codes) const {
    if (span_ == 1) return encode_each<by>(x, count_, scales, lows_.data(), global_, codes);
    for (int64_t i = 0; i < count_; ++i) {
      const float other = kHasMinimum<Code> ? lows_[i] : global_;
      encode_span<by>(x + i * span_, span_, scales[i], other, codes + i * span_ / kPerByte<Code>);
    }
  }

  const KVFormat& format_;
  float global_;
  int64_t span_, count_;
  std::vector<float> scales_, lows_;
  std::vector<uint8_t> stored_;
  std::vector<fp16> stored_lows_;
};

}  // namespace kvbackend::KVBACKEND_ISA
