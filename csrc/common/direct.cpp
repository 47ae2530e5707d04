// The list of a library's kernels, for csrc/module.cpp.
#include "direct.h"

namespace kvbackend {

std::vector<DirectOp>& direct_ops() {
  static std::vector<DirectOp> ops;  // filled while the library is loaded
  return ops;
}

}  // namespace kvbackend

extern "C" __attribute__((visibility("default"))) kvbackend::DirectOps kvbackend_direct_ops() {
  const auto& ops = kvbackend::direct_ops();
  return {ops.data(), static_cast<int64_t>(ops.size()),
          [](void* owner) { delete static_cast<torch::stable::Tensor*>(owner); }};
}
