// Codes of floating-point grids without a division: under a scale there are numbers of 16 bits at which each code
// begins.
//
// The bits of magnitudes are ordered as these are. They are cut into cells, in each of which at most one code begins.
// To what VPERMW finds for a number's cell the number's place in it is added: the sum carries into the code where the
// next one has begun.
#pragma once

#include "make_scales.h"

namespace kvbackend::KVBACKEND_ISA {

// A thread's way to do so, for rows of `count` spans. False means that it does not, and has done nothing. What is too
// small for it goes to otherwise(i), kPair numbers from i on.
template <class T, class Code, class = void>
struct StepEncoder {
  StepEncoder(const KVFormat&, float /*global*/, int64_t /*span*/, int64_t /*count*/) {}
  template <class F>
  bool encode(const T*, const uint8_t* /*scales*/, Code*, F&& /*otherwise*/) const {
    return false;
  }
  void take(const float* /*scales*/) {}
  template <class F>
  bool encode_taken(const T*, Code*, F&& /*otherwise*/) const {
    return false;
  }
};

#if defined(__AVX512F__)

constexpr int kCells = 32;  // what VPERMW looks up

// Numbers of 16 bits under scales.
template <class T>
struct Beginnings {
  static constexpr bool kHalf = std::is_same_v<T, fp16>;
  static constexpr int kMantissa = kHalf ? 10 : 7;
  static constexpr int64_t kMany = 1 << 14;  // numbers, before which it does not pay off to find steps

  // In each lane the bits of the first number that is more than `middle` after division by global and by scale, or,
  // where a tie goes up, as much.
  static BitVec of(Vec middle, BitVec up, Vec global, Vec scale) {
    T near[kLanes];  // it or one next to it is the last before
    store(near, scale * global * middle);
    BitVec bits, before{};
    for (int lane = 0; lane < kLanes; ++lane) bits[lane] = near[lane].bits - 1u;
    for (int next = 0; next < 3; ++next) {
      for (int lane = 0; lane < kLanes; ++lane) near[lane].bits = static_cast<uint16_t>(bits[lane] + next);
      const Vec scaled = load(near) / global / scale;
      before -= (BitVec)(scaled < middle) | ((BitVec)(scaled == middle) & (BitVec)(up == 0));
    }
    return bits + before;
  }
};

KVBACKEND_INLINE HalfPair pair_at(const void* x) {
  HalfPair numbers;
  std::memcpy(&numbers, x, sizeof numbers);
  return numbers;
}

// Whether the first `count` lanes are from least to most.
inline bool all_within(BitVec numbers, int least, int most, int64_t count) {
  const BitVec above = numbers - static_cast<uint32_t>(least);
  const __m512i range = _mm512_set1_epi32(most - least);
  const int beyond = _mm512_cmpgt_epu32_mask((__m512i)above, range);
  return (count < kLanes ? beyond & ((1 << count) - 1) : beyond) == 0;
}

// ------------------------------------------------------------------------------------------------------------ 4 bits

// Four cells to a power of two: each code begins at 1.4 times where the one before does, or more.
struct FourBitSteps {
  alignas(64) uint16_t sums[kCells];  // of eight powers of two; codes begin in 20 of these cells at most
  uint32_t first;  // where the cells begin, twice. The first has no beginning in it, and does for all that lies below
};

template <class T>
struct StepEncoder<T, e2m1x2, std::enable_if_t<sizeof(T) == sizeof(uint16_t)>> {
 public:
  StepEncoder(const KVFormat& format, float global, int64_t span, int64_t count)
      : in_pairs_(format.rule == Rule::e4m3 && span == 16 && count % 2 == 0),
        powers_(format.scale_dtype == ScalarType::Byte && span % kPair == 0),
        global_(global),
        span_(span),
        count_(count),
        firsts_(powers_ ? round_up(count, kLanes) : 0) {
    if (powers_) steps_ = one_scale(1.0f);
    if (in_pairs_ && !format.global_scale) {
      static const std::vector<FourBitSteps> of_ones = every_scale(1.0f);
      table_ = of_ones.data();
    }
  }

  // A row whose scales are stored as given.
  template <class F>
  bool encode(const T* x, const uint8_t* scales, e2m1x2* codes, F&& /*otherwise*/) {
    if (powers_ && find_firsts(scales)) {
      encode_spans(x, firsts_.data(), count_, span_, codes);
      return true;
    }
    if (!in_pairs_ || !(table_ || many(0x1p-9f * global_, e4m3::kLargest * global_))) return false;
    if (!table_) {
      own_table_ = every_scale(global_);
      table_ = own_table_.data();
    }
    encode_pairs(x, scales, codes);
    return true;
  }

  // The scales of all rows to come: one, or else rows are not encoded here.
  void take(const float* scales) {
    taken_ = std::all_of(scales, scales + count_, [&](float scale) { return scale == scales[0]; }) ? scales[0] : 0.0f;
    coded_ = 0;
    steps_.first = 0;
  }

  template <class F>
  bool encode_taken(const T* x, e2m1x2* codes, F&& /*otherwise*/) {
    if (span_ * count_ % kPair || !(steps_.first || many(taken_, taken_))) return false;
    if (!steps_.first) steps_ = one_scale(taken_);
    encode_spans(x, &steps_.first, 1, span_ * count_, codes);
    return true;
  }

 private:
  using At = Beginnings<T>;
  static constexpr int kPlaceBits = At::kMantissa - 2, kCell = 1 << kPlaceBits;
  static constexpr uint16_t kPlace = kCell - 1, kLast = kCells * kCell - 1;
  static constexpr int kLeastPower = At::kHalf ? -12 : -124;  // of a scale under which codes begin at normal numbers

  // Whether finding the steps pays off: rows are not few, and codes begin at normal numbers under scales between these.
  bool many(float least, float most) {
    coded_ += span_ * count_;
    return coded_ > At::kMany && least >= std::ldexp(1.0f, kLeastPower) && most <= (At::kHalf ? 0x1p13f : 0x1p125f);
  }

  // Where the cells of scales that are powers of two begin.
  bool find_firsts(const uint8_t* scales) {
    bool serves = true;
    for (int64_t i = 0; i < count_; i += kLanes) {
      const BitVec power = load_bytes(scales + i) - 127,
                   first = steps_.first + power * ((1u << At::kMantissa) * 0x10001u);
      serves &= all_within(power, kLeastPower, 128, count_ - i);
      std::memcpy(&firsts_[i], &first, sizeof first);
    }
    return serves;
  }

  static FourBitSteps one_scale(float scale) {
    FourBitSteps all[kLanes];
    find_steps(broadcast(scale), 1.0f, all);
    return all[0];
  }

  // Of the scales that are E4M3 codes; what it says of 0 and NaN means nothing.
  static std::vector<FourBitSteps> every_scale(float global) {
    std::vector<FourBitSteps> all(128);
    uint8_t codes[128];
    for (int i = 0; i < 128; ++i) codes[i] = static_cast<uint8_t>(i);
    for (int i = 0; i < 128; i += kLanes) find_steps(load(reinterpret_cast<const e4m3*>(codes + i)), global, &all[i]);
    return all;
  }

  // Of kLanes scales, for numbers that are divided by `global` before.
  static void find_steps(Vec scales, float global, FourBitSteps* out) {
    constexpr float kMiddles[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    BitVec begins[7];
    for (uint32_t i = 0; i < 7; ++i)
      begins[i] = At::of(broadcast(kMiddles[i]), BitVec{} + i % 2, broadcast(global), scales);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int first = static_cast<int>(begins[0][lane]) / kCell * kCell - kCell;
      out[lane].first = static_cast<uint32_t>(first) * 0x10001u;
      for (int cell = 0; cell < kCells; ++cell) {
        int sum = 0;
        for (const BitVec& begin : begins)
          sum += std::clamp(first + (cell + 1) * kCell - static_cast<int>(begin[lane]), 0, kCell);
        out[lane].sums[cell] = static_cast<uint16_t>(sum);
      }
    }
  }

  KVBACKEND_INLINE static HalfPair cells(HalfPair numbers, __m512i firsts) {
    const HalfPair above = (HalfPair)_mm512_maskz_subs_epu16(~0u, (__m512i)(numbers & 0x7fff), firsts);
    return least(above, HalfPair{} + kLast) >> kPlaceBits;
  }

  KVBACKEND_INLINE static void store_found(e2m1x2* to, HalfPair numbers, __m512i found) {
    const HalfPair code = ((HalfPair)found + (numbers & kPlace)) >> kPlaceBits;
    store_nibbles(to, code | (numbers >> 12 & 8));
  }

  // Two groups of 16 at a time, each with steps of its own.
  void encode_pairs(const T* x, const uint8_t* scales, e2m1x2* codes) const {
    const HalfPair second = (HalfPair)_mm512_maskz_set1_epi16(0xffff0000, kCells);
    for (int64_t i = 0; i < count_; i += 2) {
      const FourBitSteps &low = table_[scales[i]], &high = table_[scales[i + 1]];
      const __m512i firsts = _mm512_mask_set1_epi32(_mm512_set1_epi32(low.first), 0xff00, high.first);
      const HalfPair numbers = pair_at(x + i * 16), cell = cells(numbers, firsts) | second;
      store_found(codes + i * 8, numbers,
                  _mm512_maskz_permutex2var_epi16(~0u, _mm512_load_si512(low.sums), (__m512i)cell,
                                                  _mm512_load_si512(high.sums)));
    }
  }

  // Spans whose cells differ in where they begin.
  void encode_spans(const T* x, const uint32_t* firsts, int64_t count, int64_t span, e2m1x2* codes) const {
    const __m512i sums = _mm512_load_si512(steps_.sums);
    for (int64_t i = 0; i < count; ++i) {
      const __m512i first = _mm512_set1_epi32(firsts[i]);
      for (int64_t j = i * span; j < (i + 1) * span; j += kPair) {
        const HalfPair numbers = pair_at(x + j);
        store_found(codes + j / 2, numbers, _mm512_maskz_permutexvar_epi16(~0u, (__m512i)cells(numbers, first), sums));
      }
    }
  }

  const bool in_pairs_, powers_;
  const float global_;
  const int64_t span_, count_;
  float taken_ = 0.0f;
  int64_t coded_ = 0;  // numbers that came without steps
  std::vector<uint32_t> firsts_;
  std::vector<FourBitSteps> own_table_;
  const FourBitSteps* table_ = nullptr;
  FourBitSteps steps_{};
};

// ------------------------------------------------------------------------------------------------------------ 8 bits

// Normal numbers of the grid, 32 cells to a power of two, all of which are alike but for the exponent. What is smaller,
// but for 0, is rare under a scale that is made from the numbers.
template <class Code>
struct EightBits;
template <>
struct EightBits<e4m3> {
  static constexpr int kMantissa = 3, kLeast = -6;
  static constexpr uint16_t kLargest = 0x7e;
};
template <>
struct EightBits<e5m2> {
  static constexpr int kMantissa = 2, kLeast = -14;
  static constexpr uint16_t kLargest = 0x7b;
};

struct EightBitSteps {
  alignas(64) uint16_t less[kCells];  // than numbers are their codes, with the bits below
  uint16_t below;                     // the last number that is not normal in the grid
};

template <class T, class Code>
struct StepEncoder<
    T, Code,
    std::enable_if_t<sizeof(T) == sizeof(uint16_t) && (std::is_same_v<Code, e4m3> || std::is_same_v<Code, e5m2>)>> {
 public:
  StepEncoder(const KVFormat& format, float /*global*/, int64_t span, int64_t count)
      : span_(span),
        count_(count),
        less_(format.scale_dtype == ScalarType::Byte ? round_up(count, kLanes) : 0),
        below_(less_.size()) {
    if (!less_.empty()) steps_.assign(1, find_steps(1.0f));
  }

  // A row whose scales, powers of two, are stored as given.
  template <class F>
  bool encode(const T* x, const uint8_t* scales, Code* codes, F&& otherwise) {
    if (less_.empty() || span_ * count_ % kPair || !shift_steps(scales)) return false;
    const uint32_t *less = less_.data(), *below = below_.data();
    const HalfPair table = pair_at(steps_[0].less);
    if (span_ == kPair / 2) {
      const auto both = [](const uint32_t* two) {
        return (HalfPair)_mm512_mask_set1_epi32(_mm512_set1_epi32(two[0]), 0xff00, two[1]);
      };
      for (int64_t i = 0; i < count_; i += 2) {
        if (!encode_pair(x + i * span_, table, both(less + i), both(below + i), codes + i * span_))
          otherwise(i * span_);
      }
      return true;
    }
    for (int64_t i = 0; i < count_; ++i) {
      const HalfPair more = (HalfPair)_mm512_set1_epi32(less[i]), small = (HalfPair)_mm512_set1_epi32(below[i]);
      for (int64_t j = i * span_; j < (i + 1) * span_; j += kPair) {
        if (!encode_pair(x + j, table, more, small, codes + j)) otherwise(j);
      }
    }
    return true;
  }

  // The scales of all rows to come.
  void take(const float* scales) {
    const auto serves = [](float scale) { return scale >= 1.0f / kFarthest && scale <= kFarthest; };
    taken_.assign(scales, scales + count_);
    if (span_ % kPair || !std::all_of(scales, scales + count_, serves)) taken_.clear();
    coded_ = 0;
    steps_.clear();
  }

  template <class F>
  bool encode_taken(const T* x, Code* codes, F&& otherwise) {
    if (steps_.empty()) {
      coded_ += span_ * count_;
      if (taken_.empty() || coded_ < At::kMany * count_) return false;
      for (float scale : taken_) steps_.push_back(find_steps(scale));
    }
    for (int64_t i = 0; i < count_; ++i) {
      const HalfPair table = pair_at(steps_[i].less), small = HalfPair{} + steps_[i].below;
      for (int64_t j = i * span_; j < (i + 1) * span_; j += kPair) {
        if (!encode_pair(x + j, table, HalfPair{}, small, codes + j)) otherwise(j);
      }
    }
    return true;
  }

 private:
  using At = Beginnings<T>;
  using Grid = EightBits<Code>;
  static constexpr int kCellBits = At::kMantissa - 5, kCell = 1 << kCellBits,
                       kDropped = At::kMantissa - Grid::kMantissa;
  static constexpr float kFarthest = At::kHalf ? 0x1p12f : 0x1p100f;  // of scales from 1: they and numbers are normal
  static constexpr int kFarthestPower = At::kHalf ? 12 : 100;
  static constexpr int kBelow = (1 << At::kMantissa) - 1;  // the last number that is not normal itself

  // The steps of scales that are powers of two, by how much more or less they are than those of 1.
  bool shift_steps(const uint8_t* scales) {
    bool serves = true;
    for (int64_t i = 0; i < count_; i += kLanes) {
      const BitVec power = load_bytes(scales + i) - 127, more = power << At::kMantissa;
      const IntVec below = (IntVec)more + steps_[0].below;
      const BitVec twice[] = {(more & 0xffff) * 0x10001u,
                              (BitVec)(below > kBelow ? below : IntVec{} + kBelow) * 0x10001u};
      serves &= all_within(power, -kFarthestPower, kFarthestPower, count_ - i);
      std::memcpy(&less_[i], &twice[0], sizeof twice[0]);
      std::memcpy(&below_[i], &twice[1], sizeof twice[1]);
    }
    return serves;
  }

  // Those of the scale's own power of two do for all.
  static EightBitSteps find_steps(float scale) {
    constexpr int kHalfCode = (-1 - Grid::kLeast + 1) << Grid::kMantissa;  // of 0.5
    Vec middles;
    BitVec up;
    for (int i = 0; i < kLanes; ++i) {
      const Code below{static_cast<uint8_t>(kHalfCode + i)}, above{static_cast<uint8_t>(kHalfCode + i + 1)};
      middles[i] = (to_float(below) + to_float(above)) / 2;
      up[i] = i % 2;
    }
    const BitVec begins = At::of(middles, up, broadcast(1.0f), broadcast(scale));
    T near;
    EightBitSteps out;
    near = from_float<T>(scale);
    const int octave = near.bits >> At::kMantissa << At::kMantissa;
    for (int cell = 0; cell < kCells; ++cell) {
      const int start = octave + cell * kCell;
      int code = kHalfCode, rest = 0;
      for (int i = 0; i < kLanes; ++i) {
        const int begin = static_cast<int>(begins[i]);
        code += begin <= start;
        if (begin > start && begin < start + kCell) rest = begin - start;
      }
      const int sum = rest ? ((code + 1) << kDropped) - rest : code << kDropped;
      out.less[cell] = static_cast<uint16_t>(start - sum);
    }
    const Vec normal = broadcast(bits_to_float(static_cast<uint32_t>(127 + Grid::kLeast) << 23));
    const BitVec least = At::of(normal, BitVec{} + 1, broadcast(1.0f), broadcast(scale));
    out.below = static_cast<uint16_t>(std::max<int>(static_cast<int>(least[0]) - 1, kBelow));
    return out;
  }

  // False where a number is too small, but for 0.
  KVBACKEND_INLINE static bool encode_pair(const T* x, HalfPair table, HalfPair more, HalfPair below, Code* to) {
    const HalfPair numbers = pair_at(x), magnitudes = numbers & 0x7fff;
    if (_mm512_cmplt_epu16_mask((__m512i)(magnitudes - 1), (__m512i)below)) return false;
    const HalfPair less =
        (HalfPair)_mm512_maskz_permutexvar_epi16(~0u, (__m512i)(magnitudes >> kCellBits), (__m512i)table) + more;
    const __mmask32 some = _mm512_test_epi16_mask((__m512i)magnitudes, (__m512i)magnitudes);
    const HalfPair code = (HalfPair)_mm512_maskz_srli_epi16(some, (__m512i)(magnitudes - less), kDropped);
    store_bytes(to, least(code, HalfPair{} + Grid::kLargest) | (numbers >> 8 & 0x80));
    return true;
  }

  const int64_t span_, count_;
  int64_t coded_ = 0;                   // numbers that came without steps
  std::vector<uint32_t> less_, below_;  // of each scale, twice: how much more to take off, and what is too small
  std::vector<float> taken_;
  std::vector<EightBitSteps> steps_;
};

#endif

}  // namespace kvbackend::KVBACKEND_ISA
