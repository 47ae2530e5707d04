// Blocks of one pool onto blocks of another: on one GPU by a kernel that the pairs travel with; to and from the host,
// and between GPUs, as one batch of asynchronous copies in the order of the current stream.
#include "../common/pools.h"
#include "copy.h"

namespace kvbackend::cuda {
namespace {

using Pairs = std::vector<std::pair<int64_t, int64_t>>;

Pairs pairs_of(const Tensor& block_mapping) {
  const int64_t num_pairs = block_mapping.size(0);
  expect_shape(block_mapping, "block_mapping", {num_pairs, 2});
  const bool wide = block_mapping.scalar_type() == ScalarType::Long;
  if (!wide) expect_dtype(block_mapping, "block_mapping", ScalarType::Int);
  KVBACKEND_CHECK(block_mapping.is_cpu(),
                  "block_mapping is on a device; it must be on the host, where the copies are issued: build it there");
  const auto at = [&](int64_t i, int64_t column) {
    const int64_t offset = i * block_mapping.stride(0) + column * block_mapping.stride(1);
    const void* ids = block_mapping.const_data_ptr();
    return wide ? static_cast<const int64_t*>(ids)[offset] : int64_t(static_cast<const int32_t*>(ids)[offset]);
  };
  Pairs pairs;
  for (int64_t i = 0; i < num_pairs; ++i) pairs.emplace_back(at(i, 0), at(i, 1));
  return pairs;
}

void on_one_gpu(const Box& page, const char* from, int64_t from_block, char* to, int64_t to_block, const Pairs& pairs,
                cudaStream_t stream) {
  for (size_t first = 0; first < pairs.size(); first += GivenPairs::kMost) {
    const size_t count = std::min<size_t>(GivenPairs::kMost, pairs.size() - first);
    GivenPairs given;
    for (size_t i = 0; i < count; ++i) {
      given.pairs[i][0] = pairs[first + i].first;
      given.pairs[i][1] = pairs[first + i].second;
    }
    copy(page, from, from_block, to, to_block, given, count, stream);
  }
}

// One call for all copies where the toolkit has one; it takes no legacy default stream, whose handle is null.
void batched(const std::vector<Copy>& copies, const char* from, char* to, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  if (stream != nullptr && copies.size() > 1) {
    std::vector<void*> sources, targets;
    std::vector<size_t> sizes;
    for (const Copy& copy : copies) {
      sources.push_back(const_cast<char*>(from) + copy.from);
      targets.push_back(to + copy.to);
      sizes.push_back(copy.bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
#if CUDART_VERSION >= 13000
    expect_success(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes, &first,
                                        1, stream),
                   "cudaMemcpyBatchAsync");
#else
    size_t failed = 0;
    expect_success(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes, &first,
                                        1, &failed, stream),
                   "cudaMemcpyBatchAsync");
#endif
    return;
  }
#endif
  for (const Copy& copy : copies) {
    expect_success(cudaMemcpyAsync(to + copy.to, from + copy.from, copy.bytes, cudaMemcpyDefault, stream),
                   "cudaMemcpyAsync");
  }
}

}  // namespace

void swap_blocks(const Tensor& source, const Tensor& target, const Tensor& block_mapping) {
  expect_equal_pages(source, target);
  const int32_t device = target.is_cuda() ? target.get_device_index() : source.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const Pairs pairs = pairs_of(block_mapping);
  const Box page = box_of(source, 1, target, 1);
  const int64_t element = source.element_size();
  const int64_t from_block = source.stride(0) * element, to_block = target.stride(0) * element;
  if (page.bytes() == 0 || source.size(0) == 0 || target.size(0) == 0) return;
  const char* from = static_cast<const char*>(source.const_data_ptr());
  char* to = static_cast<char*>(target.mutable_data_ptr());
  if (source.is_cuda() && target.is_cuda() && source.get_device_index() == target.get_device_index()) {
    on_one_gpu(page, from, from_block, to, to_block, pairs, stream);
  } else {
    batched(copies_of(page, from_block, to_block, pairs), from, to, stream);
  }
}

}  // namespace kvbackend::cuda

STABLE_TORCH_LIBRARY_IMPL(kvbackend_native, CUDA, m) {
  m.impl("swap_blocks", KVBACKEND_BOX(kvbackend::cuda::swap_blocks));
}
