// Blocks of a pool onto other blocks of the pool; the pairs are on the device.
#include "copy.h"

namespace kvbackend::cuda {

void copy_blocks(const Tensor& cache, const Tensor& block_mapping) {
  KVBACKEND_CHECK(cache.dim() > 0, "cache has no dims; its first must be blocks: reshape it");
  const int64_t num_pairs = block_mapping.size(0);
  expect_shape(block_mapping, "block_mapping", {num_pairs, 2});
  const bool wide = block_mapping.scalar_type() == ScalarType::Long;
  if (!wide) expect_dtype(block_mapping, "block_mapping", ScalarType::Int);
  KVBACKEND_CHECK(block_mapping.is_cuda() && block_mapping.get_device_index() == cache.get_device_index(),
                  "block_mapping is elsewhere; it must be on the cache's device, where the kernel reads it: move it");
  const DeviceGuard guard(cache.get_device_index());
  const cudaStream_t stream = current_stream(cache.get_device_index());
  const Box page = box_of(cache, 1, cache, 1);
  const int64_t block = cache.stride(0) * cache.element_size();
  const char* ids = static_cast<const char*>(block_mapping.const_data_ptr());
  void* pages = cache.mutable_data_ptr();
  for (int64_t first = 0; first < num_pairs; first += kGridY) {
    const DevicePairs pairs{ids + first * block_mapping.stride(0) * block_mapping.element_size(),
                            block_mapping.stride(0), block_mapping.stride(1), wide};
    copy(page, pages, block, pages, block, pairs, std::min(kGridY, num_pairs - first), stream);
  }
}

}  // namespace kvbackend::cuda

STABLE_TORCH_LIBRARY_IMPL(kvbackend_native, CUDA, m) {
  m.impl("copy_blocks", KVBACKEND_BOX(kvbackend::cuda::copy_blocks));
}
