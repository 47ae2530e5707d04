// Rows of a paged cache by slot: the copying that the cache-writing ops share.
#pragma once

#include "kernel.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t kStreamed = 1 << 21;  // bytes of a call, from which on no cache keeps them: see copy_past_caches

// Whole lines go to memory without being read first, which a store in a cache would do. The others may be stored so
// too; finish_copies() before another thread looks at them.
inline void copy_past_caches(char* to, const char* from, int64_t bytes) {
#if defined(__AVX512F__)
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    for (; bytes >= 64; bytes -= 64, from += 64, to += 64)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
#elif defined(__AVX2__)
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    for (; bytes >= 64; bytes -= 64, from += 64, to += 64) {
      const __m256i* line = reinterpret_cast<const __m256i*>(from);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(line));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, _mm256_loadu_si256(line + 1));
    }
  }
#endif
  std::memcpy(to, from, bytes);
}

inline void finish_copies() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// rows [T, *row] and cache [nb, bs, *row], row of rank 1 or 2, any strides, as bytes.
class RowCopy {
 public:
  RowCopy(const Tensor& rows, const Tensor& cache)
      : element_(rows.element_size()),
        heads_(rows.dim() == 3 ? rows.size(1) : 1),
        dim_(rows.size(rows.dim() - 1)),
        block_size_(cache.size(1)),
        row_(rows.stride(0)),
        row_head_(rows.dim() == 3 ? rows.stride(1) : 0),
        row_dim_(rows.stride(rows.dim() - 1)),
        block_(cache.stride(0)),
        slot_(cache.stride(1)),
        slot_head_(rows.dim() == 3 ? cache.stride(2) : 0),
        slot_dim_(cache.stride(cache.dim() - 1)),
        source_(static_cast<const char*>(rows.const_data_ptr())),
        target_(static_cast<char*>(cache.mutable_data_ptr())) {
    whole_ = row_dim_ == 1 && slot_dim_ == 1 && (heads_ == 1 || (row_head_ == dim_ && slot_head_ == dim_));
  }

  int64_t row_bytes() const { return heads_ * dim_ * element_; }

  // cache[slot] = rows[token]
  void operator()(int64_t token, int64_t slot) const { (*this)(token, slot, std::memcpy); }

  // The same with a way to copy what lies in one piece.
  template <class Copy>
  void operator()(int64_t token, int64_t slot, Copy&& copy) const {
    const char* from = source_ + token * row_ * element_;
    char* to = target_ + (slot / block_size_ * block_ + slot % block_size_ * slot_) * element_;
    if (whole_) {
      copy(to, from, row_bytes());
      return;
    }
    for (int64_t head = 0; head < heads_; ++head) {
      const char* head_from = from + head * row_head_ * element_;
      char* head_to = to + head * slot_head_ * element_;
      if (row_dim_ == 1 && slot_dim_ == 1) {
        copy(head_to, head_from, dim_ * element_);
      } else {
        for (int64_t i = 0; i < dim_; ++i)
          std::memcpy(head_to + i * slot_dim_ * element_, head_from + i * row_dim_ * element_, element_);
      }
    }
  }

 private:
  int64_t element_, heads_, dim_, block_size_;
  int64_t row_, row_head_, row_dim_, block_, slot_, slot_head_, slot_dim_;
  const char* source_;
  char* target_;
  bool whole_;
};

// Write rows of one kind or several (keys and values, latent and rotary) to the same slots. Parallel over tokens; a
// slot outside the cache, -1 among them, is skipped.
template <class... Rows>
inline void write_slots(const Tensor& slot_mapping, int64_t num_slots, const Rows&... rows) {
  const Ids slots(slot_mapping, "slot_mapping");
  const int64_t count = slot_mapping.size(0), bytes = (rows.row_bytes() + ...);
  const auto write = [&](int64_t begin, int64_t end, auto&& copy) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = slots[token];
      if (slot < 0 || slot >= num_slots) continue;
      (rows(token, slot, copy), ...);
    }
  };
  torch::stable::parallel_for(0, count, grain(bytes), [&](int64_t begin, int64_t end) {
    if (count * bytes < kStreamed) return write(begin, end, std::memcpy);
    write(begin, end, copy_past_caches);
    finish_copies();
  });
}

}  // namespace kvbackend::KVBACKEND_ISA
