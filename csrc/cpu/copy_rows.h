// Rows of a paged cache by slot: the copying that the cache-writing ops share.
#pragma once

#include "kernel.h"

namespace kvbackend::KVBACKEND_ISA {

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
  void operator()(int64_t token, int64_t slot) const {
    const char* from = source_ + token * row_ * element_;
    char* to = target_ + (slot / block_size_ * block_ + slot % block_size_ * slot_) * element_;
    if (whole_) {
      std::memcpy(to, from, row_bytes());
      return;
    }
    for (int64_t head = 0; head < heads_; ++head) {
      const char* head_from = from + head * row_head_ * element_;
      char* head_to = to + head * slot_head_ * element_;
      if (row_dim_ == 1 && slot_dim_ == 1) {
        std::memcpy(head_to, head_from, dim_ * element_);
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
template <class... Copy>
inline void write_slots(const Tensor& slot_mapping, int64_t num_slots, const Copy&... copies) {
  const Ids slots(slot_mapping, "slot_mapping");
  torch::stable::parallel_for(0, slot_mapping.size(0), grain((copies.row_bytes() + ...)),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t token = begin; token < end; ++token) {
                                  const int64_t slot = slots[token];
                                  if (slot < 0 || slot >= num_slots) continue;
                                  (copies(token, slot), ...);
                                }
                              });
}

}  // namespace kvbackend::KVBACKEND_ISA
