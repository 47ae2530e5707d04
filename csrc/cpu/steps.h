// Codes of E2M1 without a division: under each scale there are seven numbers of 16 bits at which the next code begins.
//
// The bits of magnitudes are ordered as these are. They are cut into cells, four to a power of two, in each of which at
// most one code begins, since each begins at 1.4 times the one before or more. To what VPERMW finds for a number's cell
// the number's place in it is added: the sum carries into the code where the next one has begun.
#pragma once

#include "make_scales.h"

namespace kvbackend::KVBACKEND_ISA {

// A thread's way to do so, for rows of `count` spans. False means that it does not, and has done nothing.
template <class T, class Code, class = void>
struct StepEncoder {
  StepEncoder(const KVFormat&, float /*global*/, int64_t /*span*/, int64_t /*count*/) {}
  bool encode(const T*, const uint8_t* /*scales*/, Code*) const { return false; }
  void take(float /*scale*/) {}
  bool encode_taken(const T*, Code*) const { return false; }
};

#if defined(__AVX512F__)

// What is to be found for the numbers under one scale.
struct Steps {
  static constexpr int kCells = 32;  // eight powers of two; codes begin in 20 of these cells at most
  alignas(64) uint16_t sums[kCells];
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
      static const std::vector<Steps> of_ones = every_scale(1.0f);
      table_ = of_ones.data();
    }
  }

  // A row whose scales are stored as given.
  bool encode(const T* x, const uint8_t* scales, e2m1x2* codes) {
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

  // The scale of all numbers to come.
  void take(float scale) {
    taken_ = scale;
    coded_ = 0;
    steps_.first = 0;
  }

  bool encode_taken(const T* x, e2m1x2* codes) {
    if (span_ * count_ % kPair || !(steps_.first || many(taken_, taken_))) return false;
    if (!steps_.first) steps_ = one_scale(taken_);
    encode_spans(x, &steps_.first, 1, span_ * count_, codes);
    return true;
  }

 private:
  static constexpr bool kHalf = std::is_same_v<T, fp16>;
  static constexpr int kMantissa = kHalf ? 10 : 7, kPlaceBits = kMantissa - 2, kCell = 1 << kPlaceBits;
  static constexpr uint16_t kPlace = kCell - 1, kLast = Steps::kCells * kCell - 1;
  static constexpr int kLeastPower = kHalf ? -12 : -124;  // of a scale under which codes begin at normal numbers

  // Whether finding the steps pays off: rows are not few, and codes begin at normal numbers under scales between these.
  bool many(float least, float most) {
    constexpr int64_t kMany = 1 << 14;
    coded_ += span_ * count_;
    return coded_ > kMany && least >= std::ldexp(1.0f, kLeastPower) && most <= (kHalf ? 0x1p13f : 0x1p125f);
  }

  // Where the cells of scales that are powers of two begin.
  bool find_firsts(const uint8_t* scales) {
    uint8_t least = 255;
    for (int64_t i = 0; i < count_; ++i) least = std::min(least, scales[i]);
    if (least < 127 + kLeastPower) return false;
    for (int64_t i = 0; i < count_; i += kLanes) {
      const BitVec first = steps_.first + (load_bytes(scales + i) - 127) * ((1u << kMantissa) * 0x10001u);
      std::memcpy(&firsts_[i], &first, sizeof first);
    }
    return true;
  }

  static Steps one_scale(float scale) {
    Steps all[kLanes];
    find_steps(broadcast(scale), 1.0f, all);
    return all[0];
  }

  // Of the scales that are E4M3 codes; what it says of 0 and NaN means nothing.
  static std::vector<Steps> every_scale(float global) {
    std::vector<Steps> all(128);
    uint8_t codes[128];
    for (int i = 0; i < 128; ++i) codes[i] = static_cast<uint8_t>(i);
    for (int i = 0; i < 128; i += kLanes) find_steps(load(reinterpret_cast<const e4m3*>(codes + i)), global, &all[i]);
    return all;
  }

  // Of kLanes scales, for numbers that are divided by `global` before.
  static void find_steps(Vec scales, float global, Steps* out) {
    constexpr float kMiddles[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    BitVec begins[7];
    for (int i = 0; i < 7; ++i) {
      const Vec middle = broadcast(kMiddles[i]);
      T near[kLanes];
      store(near, scales * global * middle);  // it or one next to it is the last before the code begins
      BitVec bits, before{};
      for (int lane = 0; lane < kLanes; ++lane) bits[lane] = near[lane].bits - 1u;
      for (int next = 0; next < 3; ++next) {
        for (int lane = 0; lane < kLanes; ++lane) near[lane].bits = static_cast<uint16_t>(bits[lane] + next);
        const Vec scaled = load(near) / global / scales;
        before -= (BitVec)(i % 2 ? scaled < middle : scaled <= middle);  // ties go to the even code
      }
      begins[i] = bits + before;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const int first = static_cast<int>(begins[0][lane]) / kCell * kCell - kCell;
      out[lane].first = static_cast<uint32_t>(first) * 0x10001u;
      for (int cell = 0; cell < Steps::kCells; ++cell) {
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
    const HalfPair second = (HalfPair)_mm512_maskz_set1_epi16(0xffff0000, Steps::kCells);
    for (int64_t i = 0; i < count_; i += 2) {
      const Steps &low = table_[scales[i]], &high = table_[scales[i + 1]];
      const __m512i firsts = _mm512_mask_set1_epi32(_mm512_set1_epi32(low.first), 0xff00, high.first);
      HalfPair numbers;
      std::memcpy(&numbers, x + i * 16, sizeof numbers);
      store_found(
          codes + i * 8, numbers,
          _mm512_maskz_permutex2var_epi16(~0u, _mm512_load_si512(low.sums), (__m512i)(cells(numbers, firsts) | second),
                                          _mm512_load_si512(high.sums)));
    }
  }

  // Spans whose cells differ in where they begin.
  void encode_spans(const T* x, const uint32_t* firsts, int64_t count, int64_t span, e2m1x2* codes) const {
    const __m512i sums = _mm512_load_si512(steps_.sums);
    for (int64_t i = 0; i < count; ++i) {
      const __m512i first = _mm512_set1_epi32(firsts[i]);
      for (int64_t j = i * span; j < (i + 1) * span; j += kPair) {
        HalfPair numbers;
        std::memcpy(&numbers, x + j, sizeof numbers);
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
  std::vector<Steps> own_table_;
  const Steps* table_ = nullptr;
  Steps steps_{};
};

#endif

}  // namespace kvbackend::KVBACKEND_ISA
