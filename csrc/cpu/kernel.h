// What every kernel file of the CPU starts with.
//
// setup.py compiles each <op>.cpp, and each file that is a part of several ops, once per instruction set, with
// KVBACKEND_ISA naming the namespace that the code then lives in: plain, avx2, avx512. So the same loops exist several
// times, vectorized differently, and nothing compiled for a newer CPU can be reached on an older one. Only the plain
// build registers the op, with the variant that isa() chose when the library was loaded: KVBACKEND_REGISTER(op), last
// in the file. A file that ends in KVBACKEND_REGISTER_BF16(op), or in KVBACKEND_PART_BF16, is compiled a fourth time,
// as avx512_bf16: products of bfloat16, in AMX tiles where the CPU has them (amx.h). Such a CPU has VBMI too.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../common/check.h"
#include "../common/direct.h"

namespace kvbackend {

enum class Isa { plain, avx2, avx512, avx512_bf16, amx };
Isa isa();  // isa.cpp: the best that this CPU has and this build holds, or the lower one KVBACKEND_CPU_ISA names

}  // namespace kvbackend

// What this build holds besides plain (setup.py): KVBACKEND_AVX2 for avx2, KVBACKEND_AVX512 for the other two.
#if defined(KVBACKEND_AVX2)
#define KVBACKEND_IF_AVX2(...) __VA_ARGS__
#else
#define KVBACKEND_IF_AVX2(...)
#endif
#if defined(KVBACKEND_AVX512)
#define KVBACKEND_IF_AVX512(...) __VA_ARGS__
#else
#define KVBACKEND_IF_AVX512(...)
#endif

#define KVBACKEND_DECLARE(variant, name)        \
  namespace kvbackend::variant {                \
  extern decltype(kvbackend::plain::name) name; \
  }
#define KVBACKEND_DECLARE_VARIANTS(name)           \
  KVBACKEND_IF_AVX2(KVBACKEND_DECLARE(avx2, name)) \
  KVBACKEND_IF_AVX512(KVBACKEND_DECLARE(avx512, name))

// use(variant, name) with the variant that isa() chose.
#define KVBACKEND_FROM(variant, use, name) kvbackend::isa() >= kvbackend::Isa::variant ? use(variant, name):
#define KVBACKEND_CHOSEN(use, name)                      \
  KVBACKEND_IF_AVX512(KVBACKEND_FROM(avx512, use, name)) \
  KVBACKEND_IF_AVX2(KVBACKEND_FROM(avx2, use, name)) use(plain, name)
#define KVBACKEND_CHOSEN_BF16(use, name) \
  KVBACKEND_IF_AVX512(KVBACKEND_FROM(avx512_bf16, use, name)) KVBACKEND_CHOSEN(use, name)

#if defined(KVBACKEND_REGISTERS)
#define KVBACKEND_IMPLEMENT(variant, name) kvbackend::implement<&kvbackend::variant::name>(m, #name)
#define KVBACKEND_REGISTER(op)   \
  KVBACKEND_DECLARE_VARIANTS(op) \
  STABLE_TORCH_LIBRARY_IMPL(kvbackend_native, CPU, m) { KVBACKEND_CHOSEN(KVBACKEND_IMPLEMENT, op); }
#define KVBACKEND_REGISTER_BF16(op)                       \
  KVBACKEND_DECLARE_VARIANTS(op)                          \
  KVBACKEND_IF_AVX512(KVBACKEND_DECLARE(avx512_bf16, op)) \
  STABLE_TORCH_LIBRARY_IMPL(kvbackend_native, CPU, m) { KVBACKEND_CHOSEN_BF16(KVBACKEND_IMPLEMENT, op); }
#else
#define KVBACKEND_REGISTER(op)
#define KVBACKEND_REGISTER_BF16(op)
#endif
#define KVBACKEND_PART_BF16  // setup.py looks for it

namespace kvbackend::KVBACKEND_ISA {

using torch::headeronly::ScalarType;

// --------------------------------------------------------------------------------------------------------- scalars

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }

// Exponent and mantissa as a tiny float, scaled up by 2^112: exact for subnormals too; infinity and NaN are put back.
inline float to_float(fp16 value) {
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  uint32_t bits = float_to_bits(bits_to_float(magnitude) * bits_to_float(0x77800000));
  bits |= magnitude >= 0x0f800000 ? 0x7f800000 : 0;
  return bits_to_float(bits | static_cast<uint32_t>(value.bits & 0x8000) << 16);
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline bf16 from_float<bf16>(float value) {  // round to nearest even; NaN stays NaN
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded)};
}

template <>
inline fp16 from_float<fp16>(float value) {  // round to nearest even; too large becomes infinity
  const uint32_t sign = float_to_bits(value) & 0x80000000;
  const uint32_t bits = float_to_bits(value) ^ sign;
  uint32_t half;
  if (bits >= 0x47800000) {  // at least 2^16, infinity or NaN
    half = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (bits < 0x38800000) {  // a subnormal half: let the float adder round, at 2^-24
    half = float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000;
  } else {
    half = (bits + 0xc8000fff + ((bits >> 13) & 1)) >> 13;
  }
  return {static_cast<uint16_t>(half | sign >> 16)};
}

// Room for a result, in the dtype of `like` if none is named. Other than torch's new_empty it does not go through the
// dispatcher, which takes three times as long.
inline Tensor new_result(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                         std::optional<ScalarType> dtype = std::nullopt) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = strides.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(1, sizes[dim]);
  const int32_t number =
      dtype ? torch::stable::detail::to<int32_t>(torch::stable::detail::from(*dtype)) : like.torch_dtype();
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                         strides.data(), number, aoti_torch_device_type_cpu(), 0,
                                                         &made));
  return torch::stable::Tensor(made);
}

// Call function(T{}) with the C++ type of a dtype.
template <class F>
void with_dtype(const Tensor& tensor, const char* name, F&& function) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return function(float{});
    case ScalarType::BFloat16:
      return function(bf16{});
    case ScalarType::Half:
      return function(fp16{});
    default:
      KVBACKEND_CHECK(false, name, " is ", torch::headeronly::toString(tensor.scalar_type()),
                      "; the CPU kernels take float32, bfloat16 and float16: convert it");
  }
}

// ------------------------------------------------------------------------------------------------------------ rows

// A row of numbers, `stride` elements apart, to and from consecutive floats.
template <class T>
inline void load_row(const T* row, int64_t stride, int64_t size, float* out) {
  if (stride == 1) {
    for (int64_t i = 0; i < size; ++i) out[i] = to_float(row[i]);
  } else {
    for (int64_t i = 0; i < size; ++i) out[i] = to_float(row[i * stride]);
  }
}

template <class T>
inline void store_row(const float* in, int64_t size, T* row, int64_t stride) {
  if (stride == 1) {
    for (int64_t i = 0; i < size; ++i) row[i] = from_float<T>(in[i]);
  } else {
    for (int64_t i = 0; i < size; ++i) row[i * stride] = from_float<T>(in[i]);
  }
}

// Integers in int32 or int64, as int64.
class Ids {
 public:
  Ids(const Tensor& tensor, const char* name)
      : stride_(tensor.dim() ? tensor.stride(tensor.dim() - 1) : 1),
        row_stride_(tensor.dim() > 1 ? tensor.stride(tensor.dim() - 2) : 0) {
    const bool wide = tensor.scalar_type() == ScalarType::Long;
    KVBACKEND_CHECK(wide || tensor.scalar_type() == ScalarType::Int, name, " is ",
                    torch::headeronly::toString(tensor.scalar_type()), "; it must be int32 or int64: convert it");
    (wide ? wide_ : static_cast<const void*&>(narrow_)) = tensor.const_data_ptr();
  }

  int64_t operator[](int64_t i) const { return at(i * stride_); }
  int64_t operator()(int64_t row, int64_t i) const { return at(row * row_stride_ + i * stride_); }
  int64_t at(int64_t offset) const {
    return wide_ ? static_cast<const int64_t*>(wide_)[offset] : static_cast<const int32_t*>(narrow_)[offset];
  }

 private:
  const void* wide_ = nullptr;
  const void* narrow_ = nullptr;
  int64_t stride_, row_stride_;
};

// How many items a thread should at least take, for items of that many bytes touched.
inline int64_t grain(int64_t item_bytes, int64_t thread_bytes = 1 << 16) {
  return std::max<int64_t>(1, thread_bytes / std::max<int64_t>(1, item_bytes));
}

}  // namespace kvbackend::KVBACKEND_ISA
