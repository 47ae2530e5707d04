// Rows of one paged cache, as numbers of T or as codes, in the ways in which attention reads them:
//
//   whole      load(.., float*): what the row stands for
//   exact      load(.., exact_bf16*): without the factor that the whole row has, so that codes and the scales of groups
//              are exact in bfloat16; the factor belongs into the row's logit, or its weight
//   in place   with_rows: pointers to the codes, and the scales of groups; the factor as before
#pragma once

#include "attention_loops.h"
#include "kv_format.h"

namespace kvbackend::KVBACKEND_ISA {

// A bfloat16 that holds a float exactly, or what is left of it without its lower half.
struct exact_bf16 {
  uint16_t bits;
};

template <>
inline exact_bf16 from_float<exact_bf16>(float value) {
  return {static_cast<uint16_t>(float_to_bits(value) >> 16)};
}

inline void store(exact_bf16* to, Vec value) {
#if defined(__AVX512F__)
  const __m256i half = _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)((BitVec)value >> 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
#else
  const HalfVec half = __builtin_convertvector((BitVec)value >> 16, HalfVec);
  std::memcpy(to, &half, sizeof half);
#endif
}

// What names a cache and its scales in a call.
struct CacheArguments {
  ScalarType dtype;     // of the call's numbers
  const Tensor& cache;  // [nb, bs, Hk, width], or [nb, bs, width] where all heads share a row
  const char* name;
  const KVFormat* format;  // null: as the cache's dtype says
  bool keys;
  std::optional<Tensor> scale;
  const char* scale_name;
  std::optional<Tensor> scale_cache;
  const char* scale_cache_name;
};

// A cache in the dtype of the call.
inline CacheArguments plain_cache(const Tensor& like, const Tensor& cache, const char* name) {
  return {like.scalar_type(), cache, name, nullptr, true, {}, "", {}, ""};
}

// What a thread keeps from row to row: neighbours may share their scales.
struct RowBuffer {
  std::vector<float> scales, lows;
  std::vector<char> codes;
  int64_t offset = -1;
};

// Where the rows of a cache are and what its codes stand for: all that does not depend on the dtype of the call. What
// takes more than a few steps is in cached_codes.cpp.
class CachedCodes {
 public:
  CachedCodes() = default;  // no rows

  explicit CachedCodes(const CacheArguments& given);

  int64_t size() const { return size_; }
  bool coded() const { return format_; }

  // Whether the scales of a row can be left out of it but for those of groups.
  bool factored() const { return !format_ || (format_->per != Per::channel && format_->per != Per::kivi); }

  bool in_place() const {
    return step_ == 1 && size_ % kPair == 0 && factored() && (!format_ || scales_->span() % kLanes == 0);
  }

  // Whether rows are numbers of T, one after the other, in whole pairs of vectors.
  bool plain() const { return data_ && !format_ && step_ == 1 && size_ % kPair == 0; }

  // Places of rows [n, n + count), which are those from a slot on.
  void locate(int64_t block, int64_t slot, int64_t n, int64_t count, Places& places) const {
    const int64_t first = block * block_ + slot * slot_, step = slot_;
    for (int64_t i = 0; i < count; ++i) places.row[n + i] = first + i * step;
    if (scales_) scales_->locate(block, slot, count, places.scale + n);
  }
  int64_t slot_bytes() const { return slot_; }
  const char* row(int64_t offset, int64_t head) const { return data_ + offset + head * head_; }

  // Whether the heads of a token lie side by side, so that its rows are one.
  bool heads_together() const { return head_ == row_bytes(); }

  template <class Ahead>
  void prefetch(const int64_t* offsets, const Wanted& wanted, Ahead& ahead) const {
    const int64_t rows = heads_together() ? wanted.heads : 1, heads = wanted.heads / std::max<int64_t>(1, rows);
    for (int64_t head = 0; head < heads; ++head)
      ahead.add(row(0, wanted.head + head), rows * row_bytes(), offsets + wanted.first, wanted.last - wanted.first);
  }

  // Of a row of a head.
  int64_t row_bytes() const { return size_ * element_ / (format_ ? format_->per_byte() : 1); }

  // What a row's numbers are to be multiplied with beyond what an exact load and with_rows make of them: nothing, the
  // same for all rows of a head, or for each row its own.
  bool has_factor() const { return format_ && factored() && (format_->per != Per::group || format_->global_scale); }
  void load_factors(const Places& places, int64_t count, int64_t head, float* out) const;

  // Asks for the scales of rows [first, last), if each has its own.
  void prefetch_scales(const Places& places, int64_t first, int64_t last) const {
    if (!format_ || format_->is_static()) return;
    for (int64_t n = first; n < last; ++n) scales_->prefetch(places.scale[n]);
  }

  // The same of some heads, named to be fetched with other rows.
  template <class Ahead>
  void prefetch_scales(const Places& places, const Wanted& wanted, Ahead& ahead) const {
    if (!format_ || format_->is_static()) return;
    scales_->prefetch(places.scale + wanted.first, wanted.last - wanted.first, wanted.head, wanted.heads, ahead);
  }

  // Whether rows read in place have scales of groups, and how many numbers one covers.
  bool grouped() const { return format_ && format_->per == Per::group; }
  int64_t span() const { return scales_->span(); }

  // The scales of the groups of a tile's rows, of each those of `heads` heads: `out` has room for kLanes more.
  void load_scales(const Places& places, int64_t count, int64_t head, int64_t heads, float* out) const;

  // Whether rows in place are codes of 4 bits whose groups have bytes as scales, one after the other,
  bool nibbles() const { return grouped() && format_->storage == ScalarType::Byte && scales_->bytes_at(0); }

  // and those bytes of up to 2 kLanes rows, for each kLanes dims: [heads, 2, size / kLanes, kLanes rows], 0 where no
  // row is.
  void load_scales_across(const Places& places, int64_t count, int64_t first_head, int64_t heads, uint8_t* out) const;

  // function(bytes) of their type.
  template <class F>
  void with_scales_of(const uint8_t* bytes, F&& function) const {
    if (format_->scale_dtype == ScalarType::Byte) return function(reinterpret_cast<const e8m0*>(bytes));
    function(reinterpret_cast<const e4m3*>(bytes));
  }

 protected:
  // Row n of codes.
  template <class E>
  void load_codes(const Places& places, int64_t n, int64_t head, RowBuffer& buffer, E* out) const;

  template <class Code>
  const Code* dense_codes(const char* from, RowBuffer& buffer) const;

  void read_scales(int64_t offset, RowBuffer& buffer) const;

  const char* data_ = nullptr;
  const KVFormat* format_ = nullptr;  // null: numbers of T
  int64_t element_ = 0;
  int64_t block_ = 0, slot_ = 0, head_ = 0;  // strides in bytes
  int64_t step_ = 1, size_ = 0;              // from element to element, and how many numbers
  std::optional<Scales> scales_;
  float global_ = 1.0f;
};

extern template void CachedCodes::load_codes(const Places&, int64_t, int64_t, RowBuffer&, float*) const;
extern template void CachedCodes::load_codes(const Places&, int64_t, int64_t, RowBuffer&, exact_bf16*) const;

template <class T>
class CachedRows : public CachedCodes {
 public:
  using CachedCodes::CachedCodes;

  // function(Code{} or T{}).
  template <class F>
  void with_type(F&& function) const {
    format_ ? with_codes(*format_, function) : function(T{});
  }

  // Whether load_pair delivers even numbers first.
  bool evens_first() const {
    bool evens_first = false;
    with_type([&](auto zero) { evens_first = kEvensFirst<decltype(zero)>; });
    return evens_first;
  }

  // Row n of a head. exact_bf16 is for T of bf16 only. What is not factored is rounded to it.
  template <class E>
  void load(const Places& places, int64_t n, int64_t head, RowBuffer& buffer, E* out) const {
    if (format_) return load_codes(places, n, head, buffer, out);
    constexpr bool exact = std::is_same_v<E, exact_bf16>;
    load_row(reinterpret_cast<const std::conditional_t<exact, bf16, T>*>(row(places.row[n], head)), step_, size_,
             reinterpret_cast<std::conditional_t<exact, bf16, E>*>(out));
  }
};

// The rows of a tile's keys in a cache, and where; none where a source has its rows elsewhere.
template <class T>
struct StoredRows {
  const CachedRows<T>* rows = nullptr;
  const int64_t* offsets = nullptr;
};

}  // namespace kvbackend::KVBACKEND_ISA
