// The two ways into a kernel: torch's stack of boxed values, and a call past torch's dispatcher (call.h).
#pragma once

#include <string>
#include <tuple>
#include <type_traits>

#include "tensor.h"

namespace kvbackend {

// -------------------------------------------------------------------------------------------------- torch's stack

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

inline StableIValue box(const Tensor& result) { return torch::stable::detail::from(result.of_torch()); }

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

// --------------------------------------------------------------------------------------- past torch's dispatcher

template <class T>
T read(const Value& value) {
  if constexpr (std::is_same_v<T, Tensor>) {
    return Tensor(*value.array);
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    return value.array ? std::optional<Tensor>(Tensor(*value.array)) : std::nullopt;
  } else if constexpr (std::is_same_v<T, std::string>) {
    return value.text;
  } else if constexpr (std::is_same_v<T, double>) {
    return value.number;
  } else {
    return static_cast<T>(value.integer);
  }
}

inline void hand_over(const Tensor& tensor, Result& result) {
  result = {tensor.array(), new torch::stable::Tensor(tensor.of_torch())};
}

template <auto kernel>
struct Direct;

template <class R, class... Arguments, R (*kernel)(Arguments...)>
struct Direct<kernel> {
  static constexpr int kArguments = sizeof...(Arguments);
  static constexpr int kResults = [] {
    if constexpr (std::is_void_v<R>) {
      return 0;
    } else if constexpr (std::is_same_v<R, Tensor>) {
      return 1;
    } else {
      return static_cast<int>(std::tuple_size_v<R>);
    }
  }();

  static bool call(const Value* arguments, Result* results) {
    try {
      call(arguments, results, std::index_sequence_for<Arguments...>{});
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }

 private:
  template <size_t... I>
  static void call(const Value* arguments, Result* results, std::index_sequence<I...>) {
    std::tuple<std::decay_t<Arguments>...> read_ones{read<std::decay_t<Arguments>>(arguments[I])...};
    if constexpr (std::is_void_v<R>) {
      std::apply(kernel, read_ones);
    } else if constexpr (std::is_same_v<R, Tensor>) {
      hand_over(std::apply(kernel, read_ones), *results);
    } else {
      std::apply([&](const auto&... made) { (hand_over(made, *results++), ...); }, std::apply(kernel, read_ones));
    }
  }
};

}  // namespace kvbackend

#define KVBACKEND_BOX(kernel) &kvbackend::Boxed<&kernel>::call
