// The k best of the scores that are added: highest first, of equal ones those that were added first. NaN and -inf are
// never among them.
//
// What may be among them is kept beside its position, until there is no room: then all but the k best are dropped, and
// from then on only what exceeds the least of these is kept. So most scores are read once and nothing else.
#pragma once

#include "simd.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// Integers that are ordered as scores are. -0 is 0; NaN does not come here.
inline uint32_t ordered(float score) {
  const uint32_t bits = float_to_bits(score + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000);
}

inline float from_ordered(uint32_t key) { return bits_to_float(key & 0x80000000 ? key ^ 0x80000000 : ~key); }

#if defined(__AVX512F__)
inline __mmask16 first_lanes(int64_t count) { return count >= kLanes ? 0xffff : (1 << count) - 1; }
#endif

// Those of `count` scores that exceed `floor`, with their positions, which count from `first`; returns how many. Both
// outputs may be written to up to kLanes past that.
inline int64_t keep_above(float floor, const float* scores, int64_t count, int32_t first, float* kept,
                          int32_t* positions) {
  int64_t n = 0;
#if defined(__AVX512F__)
  const __m512 floors = _mm512_set1_ps(floor);
  const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 there = first_lanes(count - i);
    const __m512 some = _mm512_maskz_loadu_ps(there, scores + i);
    const __mmask16 above = _mm512_mask_cmp_ps_mask(there, some, floors, _CMP_GT_OQ);
    if (!above) continue;
    const __m512i index = _mm512_add_epi32(numbers, _mm512_set1_epi32(first + static_cast<int32_t>(i)));
    _mm512_storeu_ps(kept + n, _mm512_maskz_compress_ps(above, some));
    _mm512_storeu_si512(positions + n, _mm512_maskz_compress_epi32(above, index));
    n += __builtin_popcount(above);
  }
#else
  for (int64_t i = 0; i < count; ++i) {
    kept[n] = scores[i];
    positions[n] = first + static_cast<int32_t>(i);
    n += scores[i] > floor;
  }
#endif
  return n;
}

class Best {
 public:
  explicit Best(int64_t k) : k_(k), room_(k + std::max<int64_t>(512, k / 2)) {}

  // Nothing added yet. What is not above `floor` is dropped at once.
  void start(float floor = kNever) {
    scores_.resize(room_ + kLanes);
    positions_.resize(room_ + kLanes);
    count_ = 0;
    floor_ = floor;
  }

  // Scores of `count` consecutive positions, all past those of before.
  void add(const float* scores, int64_t count, int64_t first) {
    while (count > 0) {
      if (count_ == room_) cut();
      const int64_t some = std::min(count, room_ - count_);
      count_ += keep_above(floor_, scores, some, static_cast<int32_t>(first), &scores_[count_], &positions_[count_]);
      scores += some;
      first += some;
      count -= some;
    }
  }

  // What another has found, further on.
  void add(const Best& other) {
    for (int64_t i = 0; i < other.count_; ++i) {
      if (count_ == room_) cut();
      scores_[count_] = other.scores_[i];
      positions_[count_] = other.positions_[i];
      count_ += other.scores_[i] > floor_;
    }
  }

  // How many there are, at most k.
  int64_t finish() {
    if (count_ > k_) cut();
    return count_;
  }

  float least() const { return floor_; }  // of the best, once there were more than k

  // After finish: k positions, ascending or by score, -1 in the tail.
  void write(bool by_score, int32_t* out) {
    if (by_score) sort();
    std::copy_n(positions_.begin(), count_, out);
    std::fill(out + count_, out + k_, -1);
  }

 private:
  // What a cut needs, one after the other: all that a thread keeps share it.
  struct Keys {
    std::vector<uint32_t> all, some;
  };

  static Keys& scratch_of_thread() {
    thread_local Keys keys;
    return keys;
  }

  // Drops all but the k best.
  void cut() {
    Keys& scratch = scratch_of_thread();
    for (std::vector<uint32_t>* keys : {&scratch.all, &scratch.some})
      keys->resize(std::max<size_t>(keys->size(), room_ + kLanes));
    for (int64_t i = 0; i < count_; ++i) scratch.all[i] = ordered(scores_[i]);
    int64_t ties = k_;
    const uint32_t least = find(ties, scratch, count_);
    floor_ = from_ordered(least);
    count_ = keep_best(least, ties, scratch.all.data());
  }

  // Moves what is above the least key, and the first `ties` of those that equal it, to the front; returns how many.
  int64_t keep_best(uint32_t least, int64_t ties, const uint32_t* keys) {
    int64_t n = 0;
#if defined(__AVX512F__)
    for (int64_t i = 0; i < count_; i += kLanes) {
      const __mmask16 there = first_lanes(count_ - i);
      const __m512i key = _mm512_loadu_si512(keys + i), leasts = _mm512_set1_epi32(static_cast<int32_t>(least));
      uint32_t tied = _mm512_mask_cmpeq_epi32_mask(there, key, leasts);
      while (__builtin_popcount(tied) > ties) tied ^= 1u << (31 - __builtin_clz(tied));
      ties -= __builtin_popcount(tied);
      const __mmask16 kept = _mm512_mask_cmpgt_epu32_mask(there, key, leasts) | tied;
      const __m512 score = _mm512_maskz_compress_ps(kept, _mm512_loadu_ps(&scores_[i]));
      const __m512i position = _mm512_maskz_compress_epi32(kept, _mm512_loadu_si512(&positions_[i]));
      _mm512_storeu_ps(&scores_[n], score);
      _mm512_storeu_si512(&positions_[n], position);
      n += __builtin_popcount(kept);
    }
#else
    for (int64_t i = 0; i < count_; ++i) {
      const bool tied = keys[i] == least && ties > 0;
      ties -= tied;
      scores_[n] = scores_[i];
      positions_[n] = positions_[i];
      n += tied || keys[i] > least;
    }
#endif
    return n;
  }

  // The k-th greatest key; `wanted` becomes how many of that key are among the k.
#if defined(__AVX512F__)
  // Bit by bit: how many keys are not below it with that bit set. Those that the upper bits tell apart are dropped.
  static uint32_t find(int64_t& wanted, Keys& scratch, int64_t size) {
    constexpr int kUpper = 20;
    const uint32_t* keys = scratch.all.data();
    uint32_t found = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const uint32_t larger = found | 1u << bit;
      if (count_from(larger, keys, size) >= wanted) found = larger;
      if (bit != kUpper) continue;
      const uint32_t last = found | ((1u << kUpper) - 1);
      if (last != ~0u) wanted -= count_from(last + 1, keys, size);
      size = keep_between(found, last, keys, size, scratch.some.data());
      keys = scratch.some.data();
    }
    if (found != ~0u) wanted -= count_from(found + 1, keys, size);
    return found;
  }

  static int64_t count_from(uint32_t least, const uint32_t* keys, int64_t size) {
    const __m512i leasts = _mm512_set1_epi32(static_cast<int32_t>(least));
    int64_t count = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 there = first_lanes(size - i);
      count += __builtin_popcount(_mm512_mask_cmpge_epu32_mask(there, _mm512_loadu_si512(keys + i), leasts));
    }
    return count;
  }

  static int64_t keep_between(uint32_t first, uint32_t last, const uint32_t* keys, int64_t size, uint32_t* kept) {
    const __m512i firsts = _mm512_set1_epi32(static_cast<int32_t>(first));
    const __m512i lasts = _mm512_set1_epi32(static_cast<int32_t>(last));
    int64_t n = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 there = first_lanes(size - i);
      const __m512i key = _mm512_loadu_si512(keys + i);
      const __mmask16 within =
          _mm512_mask_cmple_epu32_mask(_mm512_mask_cmpge_epu32_mask(there, key, firsts), key, lasts);
      _mm512_storeu_si512(kept + n, _mm512_maskz_compress_epi32(within, key));
      n += __builtin_popcount(within);
    }
    return n;
  }
#else
  // Digit by digit, among those that share the digits found so far.
  static uint32_t find(int64_t& wanted, Keys& scratch, int64_t size) {
    constexpr int kShifts[] = {21, 10, 0};  // of digits of 11, 11 and 10 bits
    constexpr uint32_t kDigit = 2047;
    const uint32_t* keys = scratch.all.data();
    uint32_t found = 0;
    for (int shift : kShifts) {
      uint32_t histogram[kDigit + 1] = {};
      for (int64_t i = 0; i < size; ++i) ++histogram[keys[i] >> shift & kDigit];
      uint32_t digit = kDigit;
      for (; histogram[digit] < wanted; --digit) wanted -= histogram[digit];
      found |= digit << shift;
      int64_t n = 0;
      for (int64_t i = 0; i < size; ++i) {
        const uint32_t key = keys[i];
        scratch.some[n] = key;
        n += (key >> shift & kDigit) == digit;
      }
      keys = scratch.some.data();
      size = n;
    }
    return found;
  }
#endif

  // Highest first; equal ones stay in order. Four passes over a byte each.
  void sort() {
    order_.resize(2 * count_);
    uint64_t *from = order_.data(), *to = from + count_;
    for (int64_t i = 0; i < count_; ++i)
      from[i] = static_cast<uint64_t>(~ordered(scores_[i])) << 32 | static_cast<uint32_t>(positions_[i]);
    for (int shift = 32; shift < 64; shift += 8) {
      uint32_t starts[257] = {};
      for (int64_t i = 0; i < count_; ++i) ++starts[(from[i] >> shift & 255) + 1];
      for (int digit = 1; digit < 256; ++digit) starts[digit] += starts[digit - 1];
      for (int64_t i = 0; i < count_; ++i) to[starts[from[i] >> shift & 255]++] = from[i];
      std::swap(from, to);
    }
    for (int64_t i = 0; i < count_; ++i) positions_[i] = static_cast<int32_t>(from[i]);
  }

  int64_t k_, room_, count_ = 0;
  float floor_ = kNever;
  std::vector<float> scores_;
  std::vector<int32_t> positions_;
  std::vector<uint64_t> order_;
};

}  // namespace kvbackend::KVBACKEND_ISA
