// Copying of equally shaped pieces of two tensors, bytes of any dtype: planned once, then made for many pieces.
#pragma once

#include "kernel.h"

namespace kvbackend::KVBACKEND_ISA {

// The dims of `from` from from_dim on, and those of `to` from to_dim on: one size, any strides.
class BoxCopy {
 public:
  BoxCopy(const Tensor& from, int64_t from_dim, const Tensor& to, int64_t to_dim) : run_(from.element_size()) {
    std::vector<Dim> dims;
    bytes_ = run_;
    for (; to_dim < to.dim(); ++from_dim, ++to_dim) {
      const int64_t size = to.size(to_dim);
      bytes_ *= size;
      if (size != 1) dims.push_back({size, from.stride(from_dim) * run_, to.stride(to_dim) * run_});
    }
    // In the order of the target's memory, innermost first, dims that follow each other on both sides become one.
    std::reverse(dims.begin(), dims.end());
    std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.to < b.to; });
    for (const Dim& dim : dims) {
      if (dims_.empty() && dim.from == run_ && dim.to == run_) {
        run_ *= dim.size;
      } else if (!dims_.empty() && dim.from == dims_.back().from * dims_.back().size &&
                 dim.to == dims_.back().to * dims_.back().size) {
        dims_.back().size *= dim.size;
      } else {
        dims_.push_back(dim);
      }
    }
  }

  int64_t bytes() const { return bytes_; }
  bool is_one_run() const { return dims_.empty(); }

  void operator()(const char* from, char* to) const { copy(dims_.size(), from, to); }

  // The same copy in parts that several threads can take.
  int64_t parts() const { return dims_.empty() ? (run_ + kPart - 1) / kPart : dims_.back().size; }

  void copy_part(int64_t part, const char* from, char* to) const {
    if (dims_.empty()) {
      std::memcpy(to + part * kPart, from + part * kPart, std::min(kPart, run_ - part * kPart));
    } else {
      copy(dims_.size() - 1, from + part * dims_.back().from, to + part * dims_.back().to);
    }
  }

 private:
  struct Dim {
    int64_t size, from, to;  // strides in bytes
  };
  static constexpr int64_t kPart = 1 << 16;

  // the innermost `depth` dims
  void copy(size_t depth, const char* from, char* to) const {
    if (depth == 0) {
      std::memcpy(to, from, run_);
      return;
    }
    const Dim& dim = dims_[depth - 1];
    for (int64_t i = 0; i < dim.size; ++i) copy(depth - 1, from + i * dim.from, to + i * dim.to);
  }

  int64_t run_;            // bytes that follow each other on both sides
  int64_t bytes_;          // of the whole box
  std::vector<Dim> dims_;  // how the runs lie, innermost first
};

// target[b] = source[a] for the pairs (a, b) of block_mapping [n, 2]; a pair with a block outside its pool is skipped.
// Parallel over pairs and the parts of a page.
inline void copy_pages(const Tensor& source, const Tensor& target, const Tensor& block_mapping) {
  const int64_t num_sources = source.size(0), num_targets = target.size(0), num_pairs = block_mapping.size(0);
  expect_shape(block_mapping, "block_mapping", {num_pairs, 2});
  const Ids blocks(block_mapping, "block_mapping");
  const BoxCopy page(source, 1, target, 1);
  const int64_t parts = page.parts();
  if (parts == 0) return;
  const int64_t source_block = source.stride(0) * static_cast<int64_t>(source.element_size());
  const int64_t target_block = target.stride(0) * static_cast<int64_t>(target.element_size());
  const char* from = static_cast<const char*>(source.const_data_ptr());
  char* to = static_cast<char*>(target.mutable_data_ptr());
  torch::stable::parallel_for(0, num_pairs * parts, grain(page.bytes() / parts), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t a = blocks(i / parts, 0), b = blocks(i / parts, 1);
      if (a < 0 || a >= num_sources || b < 0 || b >= num_targets) continue;
      page.copy_part(i % parts, from + a * source_block, to + b * target_block);
    }
  });
}

}  // namespace kvbackend::KVBACKEND_ISA
