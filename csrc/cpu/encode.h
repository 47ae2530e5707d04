// Rows of numbers as codes: x / scale in the grid, to the bit as kvbackend/codecs has it.
#pragma once

#include "steps.h"

namespace kvbackend::KVBACKEND_ISA {

// ----------------------------------------------------------------------------------------------------------- codes

// How a number becomes what the grid rounds. `other` is the global scale, or the minimum. Numbers that are encoded are
// not NaN: RowEncoder sees to that.
enum class By { scale, power_of_two, global_and_scale, minimum_and_scale };

template <By by, class Number>
inline Number scaled(Number x, Number scale, Number other) {
  if constexpr (by == By::minimum_and_scale) x = x - other;
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

// --------------------------------------------------------------------------------------------------- 16 bits a number

// What kLanes numbers are divided by, and the reciprocals of it.
struct Divisor {
  Vec scale, inverse, other, other_inverse;
};

template <By by>
KVBACKEND_INLINE Vec scaled(Vec x, const Divisor& by_what) {
  if constexpr (by == By::power_of_two) return x * by_what.inverse;
  if constexpr (by == By::minimum_and_scale) x = x - by_what.other;
  if constexpr (by == By::global_and_scale) x = quotient(x, by_what.other, by_what.other_inverse);
  return quotient(x, by_what.scale, by_what.inverse);
}

// kPair numbers. Divisors stay in registers only where this is a part of its caller.
template <By by, class T, class Code>
KVBACKEND_INLINE void encode_pair(const T* x, const Divisor& evens, const Divisor& odds, Code* codes) {
  HalfPair bits;
  std::memcpy(&bits, x, sizeof bits);
  Vec even, odd;
  split(kHasMinimum<Code> ? bits : bits & 0x7fff, T{}, even, odd);
  store_pair(codes, scaled<by>(even, evens), scaled<by>(odd, odds), bits);
}

// ---------------------------------------------------------------------------------------------------- 32 bits a number

// Neighbours that share a scale.
template <By by, class Size, class Code>
inline void encode_span(const float* x, Size size, float scale, float other, Code* codes) {
  const Vec scales = broadcast(scale), others = broadcast(other);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(codes + i / kPerByte<Code>, scaled<by>(load(x + i), scales, others));
  if constexpr (kMayHaveRest<Size>) {
    for (; i < size; i += kPerByte<Code>)
      store_code(codes, i, [&](int64_t at) { return scaled<by>(x[at], scale, other); });
  }
}

// A scale for each number.
template <By by, class Code>
inline void encode_each(const float* x, int64_t size, const float* scales, const float* lows, float global,
                        Code* codes) {
  constexpr bool kLows = by == By::minimum_and_scale;
  const Vec globals = broadcast(global);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(codes + i / kPerByte<Code>, scaled<by>(load(x + i), load(scales + i), kLows ? load(lows + i) : globals));
  for (; i < size; i += kPerByte<Code>)
    store_code(codes, i, [&](int64_t at) { return scaled<by>(x[at], scales[at], kLows ? lows[at] : global); });
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
        inverses_(scales_.size()),
        paired_(span == 1 ? 3 * scales_.size() : 0),
        stored_(scales_.size() * sizeof(float)),
        stored_lows_(lows_.size()),
        steps_(format, global, span, count) {
    limit(global, global);
  }

  // Stores the rows' own scales, after encode(x, codes).
  void write(const Scales& scales, int64_t offset) const {
    if (const uint8_t* bytes = scales.bytes_at(offset)) {
      std::memcpy(const_cast<uint8_t*>(bytes), stored_.data(), count_);
    } else {
      scales.write(offset, stored_.data(), stored_lows_.data());
    }
  }

  // A row with scales of its own.
  void encode(const T* x, Code* codes) {
    bool plain = true;
    const auto find = [&](auto span) {
      int64_t i = 0;
      if constexpr (!kMayHaveRest<decltype(span)> && sizeof(T) == sizeof(uint16_t)) {
        for (; i + kLanes <= count_; i += kLanes) plain &= find_short<span>(x + i * span, i);
      }
      for (; i < count_; ++i) {
        if constexpr (kHasMinimum<Code>) {
          plain &= find_limits(x + i * span, span, lows_[i], scales_[i]);
        } else {
          const auto largest = largest_bits(x + i * span, span);
          plain &= largest < limit_;
          scales_[i] = bits_as_float<T>(largest);
        }
      }
    };
    span_ == 64 ? find(std::integral_constant<int64_t, 64>{}) : with_span(span_, find);
    if (!plain) {
      clean(x, 1, 0);
      for (int64_t i = 0; i < count_; ++i) slow_limits(cleaned_.data() + i * span_, span_, 1, i);
    }
    finish_scales(plain);
    if (plain && steps_.encode(x, stored_.data(), codes, [&](int64_t i) { divide_pair(x, i, codes); })) return;
    prepare();
    plain ? apply(x, codes) : apply(cleaned_.data(), codes);
  }

  // Rows [group, row] that share the scales of their channels: `stride` numbers apart, their codes `codes_stride`.
  void encode_group(const T* x, int64_t group, int64_t stride, Code* codes, int64_t codes_stride) {
    bool plain = count_ % kLanes == 0;
    int64_t i = 0;
    if constexpr (sizeof(T) == sizeof(uint16_t)) {
      plain = plain && find_columns(x, group, stride);
      i = count_ / kPair * kPair;
    }
    for (; plain && i < count_; i += kLanes) {
      Vec lows, highs;
      plain &= column_limits(x + i, group, stride, lows, highs);
      store(&lows_[i], lows);
      store(&scales_[i], highs);
    }
    if (!plain) {
      clean(x, group, stride);
      for (int64_t i = 0; i < count_; ++i) slow_limits(cleaned_.data() + i, group, count_, i);
    }
    finish_scales(plain);
    prepare();
    for (int64_t row = 0; row < group; row += kRows) {
      Code* to = codes + row * codes_stride;
      if constexpr (sizeof(T) == sizeof(uint16_t)) {
        if (plain) {
          encode_channels<By::minimum_and_scale, kRows>(x + row * stride, to, stride, codes_stride, group * stride);
          continue;
        }
      }
      for (int64_t next = 0; next < kRows; ++next, to += codes_stride)
        plain ? apply(x + (row + next) * stride, to) : apply(&cleaned_[(row + next) * count_], to);
    }
  }

  // Scales for the rows to come.
  void take(const float* scales) {
    std::copy_n(scales, count_, scales_.data());
    const auto [least, most] = std::minmax_element(scales, scales + count_);
    limit(*least, *most);
    prepare();
    steps_.take(scales);
  }

  // A row with the scales taken.
  void encode_taken(const T* x, Code* codes) {
    if (largest_bits(x, span_ * count_) < limit_) {
      if (!steps_.encode_taken(x, codes, [&](int64_t i) { divide_pair(x, i, codes); })) apply(x, codes);
      return;
    }
    clean(x, 1, 0);
    apply(cleaned_.data(), codes);
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);  // numbers in a cache line
  static constexpr int kRows = 4;                   // of a group, which has a multiple of these, side by side

  // Sets the magnitude, as bits, from which on numbers take the slow way: those that are not finite, and those that
  // divisors from least to most leave too large for store_pair. All of them, where a reciprocal might not be a normal
  // number, or a product's rest less than one.
  void limit(float least, float most) {
    limit_ = Bits<T>::kInfinity;
    if constexpr (sizeof(T) == sizeof(uint16_t)) {
      const T largest = from_float<T>(kMostEncoded * std::min(least, 1.0f));
      limit_ = least >= 0x1p-60f && most <= 0x1p125f ? std::min<int>(limit_, largest.bits) : 0;
    }
  }

  // What encode() seeks for kLanes spans from i on.
  template <int span>
  bool find_short(const T* x, int64_t i) {
    const auto numbers = [&](int at) {
      SignedHalfPair bits;
      std::memcpy(&bits, x + at * kPair, sizeof bits);
      return bits;
    };
    Vec found, odd;
    IntVec most, beyond;
    if constexpr (kHasMinimum<Code>) {
      const auto bits = [](IntVec number) { return (HalfPair)(number ^ (number >> 31 & 0x7fff)); };  // see ordered
      const auto in_order = [&](int at) { return ordered(numbers(at)); };
      const IntVec least = group_minima<span>(in_order);
      most = group_maxima<span>(in_order);
      beyond = (most > Bits<T>::kMost) | (least < ~Bits<T>::kMost);
      split(bits(least), T{}, found, odd);
      store(&lows_[i], found);
      split(bits(most), T{}, found, odd);
    } else {
      most = group_maxima<span>([&](int at) { return numbers(at) & 0x7fff; });
      beyond = most >= limit_;
      split((HalfPair)most, T{}, found, odd);
    }
    store(&scales_[i], found);
    return !any(beyond);
  }

  // What encode_group() seeks in its first columns, those that are whole pairs. Rows are read once, a few at a time.
  bool find_columns(const T* x, int64_t rows, int64_t stride) {
    constexpr int64_t kRows = 8;
    const SignedHalfPair most = SignedHalfPair{} + 0x7fff;
    const int64_t pairs = count_ / kPair;
    limits_.resize(2 * pairs);
    for (int64_t row = 0; row < rows; row += kRows) {
      for (int64_t i = 0; i < pairs; ++i) {
        SignedHalfPair low = row ? limits_[2 * i] : most, high = row ? limits_[2 * i + 1] : ~most;
        for (int64_t next = row; next < std::min(row + kRows, rows); ++next) {
          SignedHalfPair bits;
          std::memcpy(&bits, x + next * stride + i * kPair, sizeof bits);
          bits = ordered(bits);
          low = least(low, bits);
          high = greatest(high, bits);
        }
        limits_[2 * i] = low;
        limits_[2 * i + 1] = high;
      }
    }
    SignedHalfPair beyond{};
    for (int64_t i = 0; i < pairs; ++i) {
      const SignedHalfPair low = limits_[2 * i], high = limits_[2 * i + 1];
      beyond |= (high > Bits<T>::kMost) | (low < ~Bits<T>::kMost);
      T numbers[2 * kPair];
      const SignedHalfPair bits[2] = {ordered(low), ordered(high)};
      std::memcpy(numbers, bits, sizeof numbers);
      for (int64_t part = 0; part < kPair; part += kLanes) {
        store(&lows_[i * kPair + part], load(numbers + part));
        store(&scales_[i * kPair + part], load(numbers + kPair + part));
      }
    }
    return !any((IntVec)beyond);
  }

  // Rows as floats without NaN, and within float16 where their limits are to be.
  void clean(const T* x, int64_t rows, int64_t stride) {
    const int64_t size = span_ * count_;
    cleaned_.resize(rows * size);
    for (int64_t i = 0; i < rows * size; ++i) {
      const float number = to_float(x[i / size * stride + i % size]);
      cleaned_[i] = kHasMinimum<Code> ? within_float16(number) : without_nan(number);
    }
  }

  // What encode() seeks for span i, number by number.
  void slow_limits(const float* x, int64_t size, int64_t stride, int64_t i) {
    float low = x[0], high = x[0], largest = 0.0f;
    for (int64_t j = 0; j < size; ++j) {
      low = std::min(low, x[j * stride]);
      high = std::max(high, x[j * stride]);
      largest = std::max(largest, magnitude(x[j * stride]));
    }
    scales_[i] = kHasMinimum<Code> ? high : largest;
    if constexpr (kHasMinimum<Code>) lows_[i] = low;
  }

  // From the limits of numbers that are `plain`, or from others.
  void finish_scales(bool plain) {
    if constexpr (kHasMinimum<Code>) {
      make_ranges(lows_.data(), scales_.data(), count_, stored_lows_.data(), reinterpret_cast<fp16*>(stored_.data()));
    } else {
      if (format_.global_scale) {
        const Vec global = broadcast(global_), inverse = broadcast(1.0f / global_);
        for (int64_t i = 0; i < count_; i += kLanes) {
          const Vec top = load(&scales_[i]);
          store(&scales_[i], plain && sizeof(T) == sizeof(uint16_t) ? quotient(top, global, inverse) : top / global);
        }
      }
      make_scales<Code>(format_.rule, scales_.data(), count_, stored_.data());
    }
  }

  // What 16-bit numbers need besides the scales.
  void prepare() {
    if constexpr (sizeof(T) == sizeof(uint16_t)) {
      for (int64_t i = 0; i < count_; i += kLanes) store(&inverses_[i], 1.0f / load(&scales_[i]));
      if (span_ != 1) return;
      split_pairs(scales_.data(), paired_.data());
      split_pairs(inverses_.data(), paired_.data() + scales_.size());
      if constexpr (kHasMinimum<Code>) split_pairs(lows_.data(), paired_.data() + 2 * scales_.size());
    }
  }

  // Even ones first, pair by pair.
  void split_pairs(const float* row, float* out) const {
    for (int64_t i = 0; i + kPair <= count_; i += kPair)
      split(row + i, out + i, std::make_integer_sequence<int, kLanes>{});
  }

  // kPair numbers from i on, where nothing has been prepared.
  void divide_pair(const T* x, int64_t i, Code* codes) const {
    if constexpr (sizeof(T) == sizeof(uint16_t)) {
      const float* scale = &scales_[i / span_];
      const Vec divisor = span_ < kPair ? halves(scale) : broadcast(*scale);
      const Divisor all{divisor, 1.0f / divisor, {}, {}};
      encode_pair<By::scale>(x + i, all, all, codes + i / kPerByte<Code>);
    }
  }

  template <class N>
  void apply(const N* x, Code* codes) const {
    if constexpr (kHasMinimum<Code>) {
      encode_by<By::minimum_and_scale>(x, codes);
    } else if (format_.global_scale) {
      encode_by<By::global_and_scale>(x, codes);
    } else if (format_.scale_dtype == ScalarType::Byte) {
      encode_by<By::power_of_two>(x, codes);
    } else {
      encode_by<By::scale>(x, codes);
    }
  }

  template <By by>
  void encode_by(const float* x, Code* codes) const {
    if (span_ == 1) return encode_each<by>(x, count_, scales_.data(), lows_.data(), global_, codes);
    with_span(span_, [&](auto span) {
      for (int64_t i = 0; i < count_; ++i)
        encode_span<by>(x + i * span, span, scales_[i], other(i), codes + i * span / kPerByte<Code>);
    });
  }

  template <By by, class N>
  void encode_by(const N* x, Code* codes) const {
    if (span_ == 1) return encode_channels<by>(x, codes);
    with_span(span_, [&](auto span) { encode_spans<by>(x, span, codes); });
  }

  template <By by, class N, class Size>
  void encode_spans(const N* x, Size span, Code* codes) const {
    // not as members, which whatever is stored might have changed
    const float *scales = scales_.data(), *inverses = inverses_.data(), *lows = lows_.data();
    const int64_t count = count_;
    const Vec global = broadcast(global_), global_inverse = broadcast(1.0f / global_);
    int64_t i = 0;
    if constexpr (!kMayHaveRest<Size>) {
      for (; 2 * span == kPair && i + 2 <= count; i += 2) {
        const Divisor both{halves(scales + i), halves(inverses + i), kHasMinimum<Code> ? halves(lows + i) : global,
                           global_inverse};
        encode_pair<by>(x + i * span, both, both, codes + i * span / kPerByte<Code>);
      }
    }
    for (; i < count; ++i) {
      const Divisor all{broadcast(scales[i]), broadcast(inverses[i]), kHasMinimum<Code> ? broadcast(lows[i]) : global,
                        global_inverse};
      const N* from = x + i * span;
      Code* to = codes + i * span / kPerByte<Code>;
      int64_t j = 0;
      for (; j + kPair <= span; j += kPair) encode_pair<by>(from + j, all, all, to + j / kPerByte<Code>);
      for (; j < span; j += kPerByte<Code>)
        store_code(to, j, [&](int64_t at) { return scaled<by>(to_float(from[at]), scales[i], other(i)); });
    }
  }

  // Rows side by side, so that divisors are read once for all. Those `ahead` are asked for meanwhile.
  template <By by, int rows = 1, class N>
  void encode_channels(const N* x, Code* codes, int64_t stride = 0, int64_t codes_stride = 0, int64_t ahead = 0) const {
    const float *scales = paired_.data(), *inverses = scales + scales_.size(), *lows = inverses + scales_.size();
    const Vec global = broadcast(global_), global_inverse = broadcast(1.0f / global_);
    const auto divisor = [&](int64_t i) {
      return Divisor{load(scales + i), load(inverses + i), kHasMinimum<Code> ? load(lows + i) : global, global_inverse};
    };
    int64_t i = 0;
    for (; i + kPair <= count_; i += kPair) {
      const Divisor evens = divisor(i), odds = divisor(i + kLanes);
      for (int row = 0; row < rows; ++row) {
        const N* from = x + row * stride + i;
        if (ahead && i % kLine == 0) __builtin_prefetch(from + ahead, 0, 2);
        encode_pair<by>(from, evens, odds, codes + row * codes_stride + i / kPerByte<Code>);
      }
    }
    for (; i < count_; i += kPerByte<Code>) {
      for (int row = 0; row < rows; ++row)
        store_code(codes + row * codes_stride, i,
                   [&](int64_t at) { return scaled<by>(to_float(x[row * stride + at]), scales_[at], other(at)); });
    }
  }

  float other(int64_t i) const { return kHasMinimum<Code> ? lows_[i] : global_; }

  const KVFormat& format_;
  const float global_;
  const int64_t span_, count_;
  typename Bits<T>::Integer limit_;
  std::vector<float> scales_, lows_, inverses_, paired_, cleaned_;
  std::vector<uint8_t> stored_;
  std::vector<SignedHalfPair> limits_;
  std::vector<fp16> stored_lows_;
  StepEncoder<T, Code> steps_;
};

}  // namespace kvbackend::KVBACKEND_ISA
