// What token_logits and sparse_attention share: a query and a kv head have keys of their own, and are a sequence here.
// Such a pair is numbered token * kv_heads + head. page_logits asks for the middle only.
#pragma once

#include "attention_batch.h"

namespace kvbackend::KVBACKEND_ISA {

// The tokens that dynamic sparsity chooses among: those between the first and the last ones of a query.
struct Middle {
  Middle(int64_t page, int64_t sinks, int64_t recent) : page_size(page), num_sinks(sinks), num_recent(recent) {
    KVBACKEND_CHECK(page >= 1 && sinks >= 0 && recent >= 0, "page_size is ", page, ", num_sinks ", sinks,
                    " and num_recent ", recent, "; they must be at least 1, 0 and 0: pass counts of tokens");
  }

  // Where the last tokens of a query at this position begin: at a page, so that none is recent in part.
  int64_t end(int64_t position) const {
    return std::max<int64_t>(0, position + 1 - num_recent) / page_size * page_size;
  }

  int64_t page_size, num_sinks, num_recent;
};

// The larger one; NaN where either is NaN.
inline float larger(float a, float b) { return a > b || a != a ? a : b; }

// What is chosen for each pair, [T, Hk, n]; and whose tokens these are.
class Choices {
 public:
  Choices(const Tensor& chosen, const char* name, const Middle& middle, const Tensor& block_table, int64_t num_blocks,
          int64_t block_size)
      : ids_(chosen, name),
        first_(chosen.stride(0)),
        second_(chosen.stride(1)),
        third_(chosen.stride(2)),
        kv_heads_(chosen.size(1)),
        middle_(middle),
        table_(block_table, "block_table"),
        num_blocks_(num_blocks),
        block_size_(block_size),
        sequence_(chosen.size(0), -1),
        position_(chosen.size(0), -1) {}

  // Queries of a sequence, at the end of its tokens.
  void add(const Sequence& sequence) {
    for (int64_t i = 0; i < sequence.queries; ++i) {
      sequence_[sequence.first_token + i] = sequence.index;
      position_[sequence.first_token + i] = sequence.start + i;
    }
  }

  int64_t position(int64_t token) const { return position_[token]; }

 protected:
  int64_t chosen(int64_t pair, int64_t i) const {
    return ids_.at(pair / kv_heads_ * first_ + pair % kv_heads_ * second_ + i * third_);
  }

  // function(index, count, block, slot) for neighbouring tokens, which are keys from `index` on, as far as they exist.
  template <class F>
  void visit_tokens(int64_t token, int64_t position, int64_t count, int64_t index, F&& function) const {
    while (count > 0) {
      const int64_t column = position / block_size_, slot = position - column * block_size_;
      const int64_t some = std::min(count, block_size_ - slot), block = table_(sequence_[token], column);
      if (block >= 0 && block < num_blocks_) function(index, some, block, slot);
      index += some;
      position += some;
      count -= some;
    }
  }

  Ids ids_;
  int64_t first_, second_, third_, kv_heads_;
  Middle middle_;

 private:
  Ids table_;
  int64_t num_blocks_, block_size_;
  std::vector<int64_t> sequence_, position_;  // of each query: row of block_table, and where it stands
};

}  // namespace kvbackend::KVBACKEND_ISA
