// A call as torch hands it to a kernel: tensors, and the stack that they come on.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace kvbackend {

// A tensor whose sizes and strides are read where they lie. torch's own calls libtorch for each, and for a dtype up to
// twenty times.
class Tensor : public torch::stable::Tensor {
 public:
  Tensor() = default;

  Tensor(torch::stable::Tensor tensor) : torch::stable::Tensor(std::move(tensor)) {
    const auto sizes = torch::stable::Tensor::sizes();
    dim_ = static_cast<int64_t>(sizes.size());
    sizes_ = sizes.data();
    strides_ = torch::stable::Tensor::strides().data();
  }

  int64_t dim() const { return dim_; }

  // Of a dim that is not there, torch tells.
  int64_t size(int64_t dim) const { return has(dim) ? sizes_[dim] : torch::stable::Tensor::size(dim); }
  int64_t stride(int64_t dim) const { return has(dim) ? strides_[dim] : torch::stable::Tensor::stride(dim); }

  torch::headeronly::ScalarType scalar_type() const {
    using torch::headeronly::ScalarType;
    static const std::pair<int32_t, ScalarType> common[] = {
        {aoti_torch_dtype_bfloat16(), ScalarType::BFloat16}, {aoti_torch_dtype_float32(), ScalarType::Float},
        {aoti_torch_dtype_float16(), ScalarType::Half},      {aoti_torch_dtype_int32(), ScalarType::Int},
        {aoti_torch_dtype_int64(), ScalarType::Long},
    };
    int32_t dtype;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(get(), &dtype));
    for (const auto& [number, type] : common) {
      if (dtype == number) return type;
    }
    return torch::stable::Tensor::scalar_type();
  }

 private:
  bool has(int64_t dim) const { return 0 <= dim && dim < dim_; }

  int64_t dim_ = 0;
  const int64_t *sizes_ = nullptr, *strides_ = nullptr;
};

// ------------------------------------------------------------------------------------------------------- the stack

// A value of the stack, which is ours then.
template <class T>
T unbox(StableIValue value) {
  using torch::stable::detail::to;
  if constexpr (std::is_same_v<T, Tensor>) {
    return to<torch::stable::Tensor>(value);
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    return to<std::optional<torch::stable::Tensor>>(value);
  } else if constexpr (std::is_same_v<T, std::string>) {  // torch's own leaks each (2.13: a `new std::string`)
    const auto handle = to<StringHandle>(value);
    size_t length;
    const char* data;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string text(data, length);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  } else {
    return to<T>(value);
  }
}

inline StableIValue box(const Tensor& result) {
  return torch::stable::detail::from(static_cast<const torch::stable::Tensor&>(result));
}

// Calls a kernel with what is on the stack and leaves its results there.
template <auto kernel>
struct Boxed;

template <class Result, class... Arguments, Result (*kernel)(Arguments...)>
struct Boxed<kernel> {
  static void call(StableIValue* stack, uint64_t num_arguments, uint64_t) {
    STD_TORCH_CHECK(num_arguments == sizeof...(Arguments), "the schema has ", num_arguments, " arguments, the kernel ",
                    sizeof...(Arguments));
    call(stack, std::index_sequence_for<Arguments...>{});
  }

 private:
  template <size_t... I>
  static void call(StableIValue* stack, std::index_sequence<I...>) {
    std::tuple<std::decay_t<Arguments>...> arguments{unbox<std::decay_t<Arguments>>(stack[I])...};
    if constexpr (std::is_void_v<Result>) {
      std::apply(kernel, arguments);
    } else if constexpr (std::is_same_v<Result, Tensor>) {
      stack[0] = box(std::apply(kernel, arguments));
    } else {
      std::apply([&](const auto&... results) { ((*stack++ = box(results)), ...); }, std::apply(kernel, arguments));
    }
  }
};

}  // namespace kvbackend

#define KVBACKEND_BOX(kernel) &kvbackend::Boxed<&kernel>::call
