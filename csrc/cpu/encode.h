// Rows of numbers as codes: x / scale in the grid, to the bit as kvbackend/codecs has it.
#pragma once

#include "make_scales.h"

namespace kvbackend::KVBACKEND_ISA {

// ----------------------------------------------------------------------------------------------------------- codes

// How a number becomes what the grid rounds. `other` is the global scale, or the minimum. A power of two has an exact
// reciprocal, which is then what `scale` is. Numbers that are encoded are not NaN: RowEncoder sees to that.
enum class By { scale, reciprocal, global_and_scale, minimum_and_scale };

template <By by, class Number>
inline Number scaled(Number x, Number scale, Number other) {
  if constexpr (by == By::minimum_and_scale) x = x - other;
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
template <By by, class T, class Size, class Code>
inline void encode_span(const T* x, Size size, float scale, float other, Code* codes) {
  const Vec scales = broadcast(scale), others = broadcast(other);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(codes + i / kPerByte<Code>, scaled<by>(load(x + i), scales, others));
  if constexpr (kMayHaveRest<Size>) {
    for (; i < size; i += kPerByte<Code>)
      store_code(codes, i, [&](int64_t at) { return scaled<by>(to_float(x[at]), scale, other); });
  }
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
    bool plain = true;
    with_span(span_, [&](auto span) {
      for (int64_t i = 0; i < count_; ++i) {
        if constexpr (kHasMinimum<Code>) {
          plain &= find_limits(x + i * span, span, lows_[i], scales_[i]);
        } else {
          const auto largest = largest_bits(x + i * span, span);
          plain &= largest < Bits<T>::kInfinity;
          scales_[i] = bits_as_float<T>(largest);
        }
      }
    });
    if (!plain) {
      clean(x, 1, 0);
      for (int64_t i = 0; i < count_; ++i) slow_limits(cleaned_.data() + i * span_, span_, 1, i);
    }
    finish_scales();
    plain ? apply(x, scales_.data(), codes) : apply(cleaned_.data(), scales_.data(), codes);
  }

  // Rows [group, row] that share the scales of their channels: `stride` numbers apart, their codes `codes_stride`.
  void encode_group(const T* x, int64_t group, int64_t stride, Code* codes, int64_t codes_stride) {
    bool plain = count_ % kLanes == 0;
    for (int64_t i = 0; plain && i < count_; i += kLanes) {
      Vec lows, highs;
      plain &= column_limits(x + i, group, stride, lows, highs);
      store(&lows_[i], lows);
      store(&scales_[i], highs);
    }
    if (!plain) {
      clean(x, group, stride);
      for (int64_t i = 0; i < count_; ++i) slow_limits(cleaned_.data() + i, group, count_, i);
    }
    finish_scales();
    for (int64_t row = 0; row < group; ++row) {
      Code* to = codes + row * codes_stride;
      plain ? apply(x + row * stride, scales_.data(), to) : apply(&cleaned_[row * count_], scales_.data(), to);
    }
  }

  void encode(const T* x, const float* scales, Code* codes) {
    if (largest_bits(x, span_ * count_) <= Bits<T>::kInfinity) return apply(x, scales, codes);
    clean(x, 1, 0);
    apply(cleaned_.data(), scales, codes);
  }

 private:
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

  // N is T, or float where the row was cleaned.
  template <class N>
  void apply(const N* x, const float* scales, Code* codes) {
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

  template <By by, class N>
  void encode_by(const N* x, const float* scales, Code* codes) const {
    if (span_ == 1) return encode_each<by>(x, count_, scales, lows_.data(), global_, codes);
    with_span(span_, [&](auto span) {
      for (int64_t i = 0; i < count_; ++i) {
        const float other = kHasMinimum<Code> ? lows_[i] : global_;
        encode_span<by>(x + i * span, span, scales[i], other, codes + i * span / kPerByte<Code>);
      }
    });
  }

  const KVFormat& format_;
  float global_;
  int64_t span_, count_;
  std::vector<float> scales_, lows_, cleaned_;
  std::vector<uint8_t> stored_;
  std::vector<fp16> stored_lows_;
};

}  // namespace kvbackend::KVBACKEND_ISA
