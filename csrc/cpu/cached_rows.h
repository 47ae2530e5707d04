// Rows of one paged cache, as numbers of T or as codes, in the ways in which attention reads them:
//
//   whole      load(.., float*): what the row stands for
//   exact      load(.., exact_bf16*): without the factor that the whole row has, so that codes and the scales of groups
//              are exact in bfloat16; the factor belongs into the row's logit, or its weight
//   in place   with_rows: pointers to the codes, and the scales of groups; the factor as before
#pragma once

#include "attention_loops.h"
#include "decode.h"

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

// Where the rows of a cache are and what its codes stand for: all that does not depend on the dtype of the call, and so
// is compiled once for all of them.
class CachedCodes {
 public:
  CachedCodes() = default;  // no rows

  explicit CachedCodes(const CacheArguments& given)
      : data_(static_cast<const char*>(given.cache.const_data_ptr())),
        format_(given.format && given.format->quantized() ? given.format : nullptr),
        element_(given.cache.element_size()),
        block_(given.cache.stride(0) * element_),
        slot_(given.cache.stride(1) * element_),
        head_(given.cache.dim() == 4 ? given.cache.stride(2) * element_ : 0),
        step_(given.cache.stride(given.cache.dim() - 1)),
        size_(given.cache.size(given.cache.dim() - 1) * (format_ ? format_->per_byte() : 1)) {
    expect_dtype(given.cache, given.name, format_ ? format_->storage : given.dtype);
    if (!format_) return;
    const bool pages = !format_->is_static(), has_heads = given.cache.dim() == 4;
    const auto& scales = pages ? given.scale_cache : given.scale;
    const char* name = pages ? given.scale_cache_name : given.scale_name;
    KVBACKEND_CHECK(scales.has_value(), name, " is None; kv_format '", format_->name, "' has scales: pass them");
    KVBACKEND_CHECK(
        format_->group == 0 || (format_->across_tokens(given.keys) ? given.cache.size(1) : size_) % format_->group == 0,
        given.name, " has rows of ", size_, " numbers in blocks of ", given.cache.size(1), "; scales of '",
        format_->name, "' cover ", format_->group, ": choose a format whose groups divide them");
    std::vector<int64_t> shape =
        scales_shape(*format_, given.keys, given.cache.size(1), has_heads ? given.cache.size(2) : 1, size_);
    if (pages) {
      shape.insert(shape.begin(), given.cache.size(0));
      if (!has_heads) shape.erase(shape.begin() + 2);
    }
    expect_scales(*scales, name, *format_, shape);
    scales_.emplace(*format_, given.keys, *scales, 2, size_, has_heads);
    global_ = global_scale_of(*format_, given.scale, given.scale_name);
  }

  int64_t size() const { return size_; }
  bool coded() const { return format_; }

  // Whether the scales of a row can be left out of it but for those of groups.
  bool factored() const { return !format_ || (format_->per != Per::channel && format_->per != Per::kivi); }

  bool in_place() const {
    return step_ == 1 && size_ % kPair == 0 && factored() && (!format_ || scales_->span() % kLanes == 0);
  }

  // Whether rows are numbers of T, one after the other, in whole pairs of vectors.
  bool plain() const { return data_ && !format_ && step_ == 1 && size_ % kPair == 0; }

  // A row's place, with its head's to be added.
  int64_t offset(int64_t block, int64_t slot) const { return block * block_ + slot * slot_; }
  int64_t slot_bytes() const { return slot_; }
  const char* row(int64_t offset, int64_t head) const { return data_ + offset + head * head_; }

  // Whether the heads of a token lie side by side, so that its rows are one.
  bool heads_together() const { return head_ == row_bytes(); }

  void prefetch(const int64_t* offsets, const Wanted& wanted, Prefetcher& ahead) const {
    const int64_t rows = heads_together() ? wanted.heads : 1, heads = wanted.heads / std::max<int64_t>(1, rows);
    for (int64_t head = 0; head < heads; ++head)
      ahead.add(row(0, wanted.head + head), rows * row_bytes(), offsets + wanted.first, wanted.last - wanted.first);
  }

  // Of a row of a head.
  int64_t row_bytes() const { return size_ * element_ / (format_ ? format_->per_byte() : 1); }

  // What a row's numbers are to be multiplied with beyond what an exact load and with_rows make of them: nothing, the
  // same for all rows of a head, or for each row its own.
  bool has_factor() const { return format_ && factored() && (format_->per != Per::group || format_->global_scale); }
  void load_factors(const Keys& keys, int64_t head, float* out) const {
    if (grouped()) return void(std::fill_n(out, keys.count, global_));
    scales_->read_floats(keys.block, keys.slot, keys.count, head, out);
  }

  // Whether rows read in place have scales of groups, and how many numbers one covers.
  bool grouped() const { return format_ && format_->per == Per::group; }
  int64_t span() const { return scales_->span(); }

  // The scales of the groups of a tile's rows: `out` has room for kTile rows and kLanes more.
  void load_scales(const Keys& keys, int64_t head, float* out) const {
    constexpr int64_t kBytes = 32;  // of a row's scales: 512 channels in groups of 16
    const int64_t count = scales_->count();
    const auto offset = [&](int64_t n) { return scales_->offset(keys.block[n], keys.slot[n], head); };
    if (count > kBytes || !scales_->bytes_at(offset(0))) {
      for (int64_t n = 0; n < keys.count; ++n) scales_->read(offset(n), out + n * count, nullptr);
      return;
    }
    uint8_t bytes[kTile * kBytes + kLanes] = {};
    for (int64_t n = 0; n < keys.count; ++n) {
      const uint8_t* from = scales_->bytes_at(offset(n));
      count == 8 ? std::memcpy(bytes + n * 8, from, 8) : std::memcpy(bytes + n * count, from, count);
    }
    scales_->decode_bytes(bytes, keys.count * count, out);
  }

 protected:
  // The row of codes at `offset`; `block`, `slot` and `head` say whose scales it has.
  template <class E>
  void load_codes(int64_t offset, int64_t block, int64_t slot, int64_t head, RowBuffer& buffer, E* out) const {
    with_codes(*format_, [&](auto zero) {
      constexpr bool exact = std::is_same_v<E, exact_bf16>;
      const auto* codes = dense_codes<decltype(zero)>(row(offset, head), buffer);
      const bool bare = exact && factored();
      if (bare && !grouped()) return decode_span(codes, size_, 1.0f, 0.0f, 1.0f, out);
      read_scales(block, slot, head, buffer);
      const auto decode = [&](auto* to, float global) {
        decode_row(codes, scales_->span(), scales_->count(), buffer.scales.data(), buffer.lows.data(), global, to);
      };
      if constexpr (exact) {
        bare ? decode(out, 1.0f) : decode(reinterpret_cast<bf16*>(out), global_);
      } else {
        decode(out, global_);
      }
    });
  }

  template <class Code>
  const Code* dense_codes(const char* from, RowBuffer& buffer) const {
    const Code* codes = reinterpret_cast<const Code*>(from);
    if (step_ == 1) return codes;
    const int64_t stored = size_ / kPerByte<Code>;
    buffer.codes.resize(stored * sizeof(Code));
    Code* dense = reinterpret_cast<Code*>(buffer.codes.data());
    for (int64_t i = 0; i < stored; ++i) dense[i] = codes[i * step_];
    return dense;
  }

  void read_scales(int64_t block, int64_t slot, int64_t head, RowBuffer& buffer) const {
    const int64_t offset = scales_->offset(block, slot, head);
    if (offset == buffer.offset) return;
    buffer.scales.resize(scales_->count());
    buffer.lows.resize(scales_->count());
    scales_->read(offset, buffer.scales.data(), buffer.lows.data());
    buffer.offset = offset;
  }

  const char* data_ = nullptr;
  const KVFormat* format_ = nullptr;  // null: numbers of T
  int64_t element_ = 0;
  int64_t block_ = 0, slot_ = 0, head_ = 0;  // strides in bytes
  int64_t step_ = 1, size_ = 0;              // from element to element, and how many numbers
  std::optional<Scales> scales_;
  float global_ = 1.0f;
};

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

  // The row at `offset`; `block`, `slot` and `head` say whose scales it has. exact_bf16 is for T of bf16 only. What is
  // not factored is rounded to it.
  template <class E>
  void load(int64_t offset, int64_t block, int64_t slot, int64_t head, RowBuffer& buffer, E* out) const {
    if (format_) return load_codes(offset, block, slot, head, buffer, out);
    constexpr bool exact = std::is_same_v<E, exact_bf16>;
    load_row(reinterpret_cast<const std::conditional_t<exact, bf16, T>*>(row(offset, head)), step_, size_,
             reinterpret_cast<std::conditional_t<exact, bf16, E>*>(out));
  }
};

// The rows of a tile's keys in a cache, at their offsets; none where a source has its rows elsewhere.
template <class T>
struct StoredRows {
  const CachedRows<T>* rows = nullptr;
  const int64_t* offsets = nullptr;
};

}  // namespace kvbackend::KVBACKEND_ISA
