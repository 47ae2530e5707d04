// What every kernel file of CUDA starts with. Only libtorch's stable ABI is used, as in csrc/cpu.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "../common/check.h"
#include "../common/entries.h"
#include "runs.h"

namespace kvbackend::cuda {

using torch::headeronly::ScalarType;
using torch::stable::accelerator::DeviceGuard;

inline void expect_success(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, " failed: ", cudaGetErrorString(error));
}

// torch's current stream of a device.
inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace kvbackend::cuda
