// Copying of equally shaped pieces of two tensors, bytes of any dtype: planned once, then made for many pieces.
#pragma once

#include "../common/boxes.h"
#include "kernel.h"

namespace kvbackend::KVBACKEND_ISA {

// The dims of `from` from from_dim on, and those of `to` from to_dim on: one size, any strides.
class BoxCopy {
 public:
  BoxCopy(const Tensor& from, int64_t from_dim, const Tensor& to, int64_t to_dim)
      : box_(box_of(from, from_dim, to, to_dim)) {}

  int64_t bytes() const { return box_.bytes(); }
  bool is_one_run() const { return box_.dims.empty(); }

  void operator()(const char* from, char* to) const { copy(box_.dims.size(), from, to); }

  // The same copy in parts that several threads can take.
  int64_t parts() const { return box_.dims.empty() ? (box_.run + kPart - 1) / kPart : box_.dims.back().size; }

  void copy_part(int64_t part, const char* from, char* to) const {
    if (box_.dims.empty()) {
      std::memcpy(to + part * kPart, from + part * kPart, std::min(kPart, box_.run - part * kPart));
    } else {
      copy(box_.dims.size() - 1, from + part * box_.dims.back().from, to + part * box_.dims.back().to);
    }
  }

 private:
  static constexpr int64_t kPart = 1 << 16;

  // the innermost `depth` dims
  void copy(size_t depth, const char* from, char* to) const {
    if (depth == 0) {
      std::memcpy(to, from, box_.run);
      return;
    }
    const Dim& dim = box_.dims[depth - 1];
    for (int64_t i = 0; i < dim.size; ++i) copy(depth - 1, from + i * dim.from, to + i * dim.to);
  }

  const Box box_;
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
