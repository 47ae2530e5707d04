// Boxes of equal shape in two tensors as runs of bytes. Nothing of torch in it, so that tests/cuda runs it too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvbackend::KVBACKEND_ISA {

struct Dim {
  int64_t size, from, to;  // strides in bytes
};

// A box of the source and the box of the target that it becomes: runs of bytes that follow each other on both sides,
// and how the runs lie, innermost dim first.
struct Box {
  int64_t run;
  std::vector<Dim> dims;

  int64_t bytes() const {
    int64_t all = run;
    for (const Dim& dim : dims) all *= dim.size;
    return all;
  }
};

// Dims of a box, outermost first, strides in bytes, in the order of the target's memory; those that follow each other
// on both sides become one.
inline Box box_of(int64_t element_bytes, std::vector<Dim> dims) {
  Box box{element_bytes, {}};
  std::reverse(dims.begin(), dims.end());
  std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.to < b.to; });
  for (const Dim& dim : dims) {
    if (dim.size == 1) continue;
    if (box.dims.empty() && dim.from == box.run && dim.to == box.run) {
      box.run *= dim.size;
      continue;
    }
    Dim* last = box.dims.empty() ? nullptr : &box.dims.back();
    if (last && dim.from == last->from * last->size && dim.to == last->to * last->size) {
      last->size *= dim.size;
    } else {
      box.dims.push_back(dim);
    }
  }
  return box;
}

// The dims of `from` from from_dim on, and those of `to` from to_dim on: one size, any strides.
template <class Tensor>
Box box_of(const Tensor& from, int64_t from_dim, const Tensor& to, int64_t to_dim) {
  const int64_t element = to.element_size();
  std::vector<Dim> dims;
  for (; to_dim < to.dim(); ++from_dim, ++to_dim) {
    dims.push_back({to.size(to_dim), from.stride(from_dim) * element, to.stride(to_dim) * element});
  }
  return box_of(element, dims);
}

}  // namespace kvbackend::KVBACKEND_ISA
