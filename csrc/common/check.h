// Refusals of native kernels. The mark lets kvbackend/dispatch.py raise them as ArgumentError.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <initializer_list>

#include "tensor.h"

#define KVBACKEND_CHECK(condition, ...) STD_TORCH_CHECK(condition, "[kvbackend] ", __VA_ARGS__)

namespace kvbackend {

// What memory safety needs, also for those who call torch.ops.kvbackend_native directly.
inline void expect_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  KVBACKEND_CHECK(tensor.dim() == static_cast<int64_t>(shape.size()), name, " has ", tensor.dim(),
                  " dims; it must have ", shape.size(), ": reshape it");
  int64_t dim = 0;
  for (int64_t size : shape) {
    KVBACKEND_CHECK(tensor.size(dim) == size, name, " has size ", tensor.size(dim), " in dim ", dim, "; it must be ",
                    size, ": pass tensors of one call");
    ++dim;
  }
}

inline void expect_rank(const Tensor& tensor, const char* name, int64_t rank) {
  KVBACKEND_CHECK(tensor.dim() == rank, name, " has ", tensor.dim(), " dims; it must have ", rank, ": reshape it");
}

inline void expect_dtype(const Tensor& tensor, const char* name, torch::headeronly::ScalarType dtype) {
  KVBACKEND_CHECK(tensor.scalar_type() == dtype, name, " is ", torch::headeronly::toString(tensor.scalar_type()),
                  "; it must be ", torch::headeronly::toString(dtype), ": convert it");
}

}  // namespace kvbackend
