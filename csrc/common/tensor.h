// A tensor as kernels see it.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>

#include "call.h"

namespace kvbackend {

// The dtypes of arrays that come past torch's dispatcher, by their codes in DLPack. Others stay on its way.
struct NamedType {
  ElementType element;
  torch::headeronly::ScalarType type;
};
constexpr NamedType kTypes[] = {
    {{2, 32}, torch::headeronly::ScalarType::Float},         {{4, 16}, torch::headeronly::ScalarType::BFloat16},
    {{2, 16}, torch::headeronly::ScalarType::Half},          {{0, 32}, torch::headeronly::ScalarType::Int},
    {{0, 64}, torch::headeronly::ScalarType::Long},          {{1, 8}, torch::headeronly::ScalarType::Byte},
    {{0, 8}, torch::headeronly::ScalarType::Char},           {{6, 8}, torch::headeronly::ScalarType::Bool},
    {{10, 8}, torch::headeronly::ScalarType::Float8_e4m3fn}, {{12, 8}, torch::headeronly::ScalarType::Float8_e5m2},
};

// A tensor of torch's, or of one that calls past torch's dispatcher (call.h), who then keeps it. Sizes and strides are
// read where they lie: torch's own calls libtorch for each, and for a dtype up to twenty times.
class Tensor {
 public:
  Tensor() = default;

  Tensor(torch::stable::Tensor tensor) : tensor_(std::move(tensor)) {
    const auto sizes = tensor_->sizes();
    dim_ = static_cast<int64_t>(sizes.size());
    sizes_ = sizes.data();
    strides_ = tensor_->strides().data();
  }

  explicit Tensor(const Array& array)
      : dim_(array.dim), sizes_(array.sizes), strides_(array.strides), data_(array.data), element_(array.dtype) {}

  Array array() const {
    const auto type = scalar_type();
    const auto named =
        std::find_if(std::begin(kTypes), std::end(kTypes), [&](auto& each) { return each.type == type; });
    STD_TORCH_CHECK(named != std::end(kTypes), "a dtype that calls past torch's dispatcher do not know");
    return {mutable_data_ptr(), sizes_, strides_, static_cast<int32_t>(dim_), named->element};
  }

  int64_t dim() const { return dim_; }
  int64_t size(int64_t dim) const { return sizes_[known(dim)]; }
  int64_t stride(int64_t dim) const { return strides_[known(dim)]; }

  int64_t numel() const {
    int64_t product = 1;
    for (int64_t dim = 0; dim < dim_; ++dim) product *= sizes_[dim];
    return product;
  }

  // The dtype as torch's C functions number it, of any dtype.
  int32_t torch_dtype() const {
    if (!tensor_) return torch::stable::detail::to<int32_t>(torch::stable::detail::from(scalar_type()));
    int32_t dtype;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor_->get(), &dtype));
    return dtype;
  }

  torch::headeronly::ScalarType scalar_type() const {
    using torch::headeronly::ScalarType;
    if (!tensor_) {
      for (const NamedType& named : kTypes) {
        if (named.element == element_) return named.type;
      }
      STD_TORCH_CHECK(false, "a dtype that kernels do not know");
    }
    static const std::pair<int32_t, ScalarType> common[] = {
        {aoti_torch_dtype_bfloat16(), ScalarType::BFloat16}, {aoti_torch_dtype_float32(), ScalarType::Float},
        {aoti_torch_dtype_float16(), ScalarType::Half},      {aoti_torch_dtype_int32(), ScalarType::Int},
        {aoti_torch_dtype_int64(), ScalarType::Long},
    };
    const int32_t dtype = torch_dtype();
    for (const auto& [number, type] : common) {
      if (dtype == number) return type;
    }
    return tensor_->scalar_type();
  }

  int64_t element_size() const { return tensor_ ? static_cast<int64_t>(tensor_->element_size()) : element_.bits / 8; }
  const void* const_data_ptr() const { return tensor_ ? tensor_->const_data_ptr() : data_; }
  void* mutable_data_ptr() const { return tensor_ ? tensor_->mutable_data_ptr() : data_; }

  bool is_cpu() const { return of_torch().is_cpu(); }
  bool is_cuda() const { return of_torch().is_cuda(); }
  int32_t get_device_index() const { return of_torch().get_device_index(); }

  // As torch has it, for torch's own functions.
  const torch::stable::Tensor& of_torch() const {
    STD_TORCH_CHECK(tensor_, "this op is called through torch's dispatcher only");
    return *tensor_;
  }

 private:
  int64_t known(int64_t dim) const {
    STD_TORCH_CHECK(0 <= dim && dim < dim_, "dim ", dim, " of a tensor that has ", dim_);
    return dim;
  }

  std::optional<torch::stable::Tensor> tensor_;
  int64_t dim_ = 0;
  const int64_t *sizes_ = nullptr, *strides_ = nullptr;
  void* data_ = nullptr;
  ElementType element_{};
};

}  // namespace kvbackend
