// Blocks of one pool onto blocks of another, within an NPU or between an NPU and host memory, by the runtime's copies.
//
// The copies run on the current stream, behind the call. They go through torch_npu's task queue and so keep their place
// among its ops. Pageable host memory cannot wait: there the stream is waited for, and each copy blocks.
// torch_npu has no such op; vllm-ascend's swap_blocks_batch and sglang's transfer_kv_dim_exchange do the same.

#include <ATen/core/CachingHostAllocator.h>
#include <acl/acl_rt.h>
#include <torch/library.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "torch_npu/csrc/core/npu/NPUGuard.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

#define KVBACKEND_CHECK(condition, ...) TORCH_CHECK(condition, "[kvbackend] ", __VA_ARGS__)

#pragma weak aclrtMemcpyBatchAsync  // CANN has it from 8.5 on

namespace {

using at::Tensor;

// Copies of one direction, in the arrays that the runtime takes.
struct Copies {
  aclrtMemcpyKind kind;
  std::vector<void*> targets, sources;
  std::vector<size_t> bytes;

  void add(char* target, char* source, size_t size) {
    const bool goes_on = !bytes.empty() && static_cast<char*>(targets.back()) + bytes.back() == target &&
                         static_cast<char*>(sources.back()) + bytes.back() == source;
    if (goes_on) {
      bytes.back() += size;
    } else {
      targets.push_back(target), sources.push_back(source), bytes.push_back(size);
    }
  }
};

bool on_npu(const Tensor& pool) { return pool.device().type() == c10::DeviceType::PrivateUse1; }

aclrtMemLocation location(bool is_device, uint32_t device) {
  return {is_device ? device : 0, is_device ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST};
}

// One submission for all copies where the runtime has it: it takes copies from and to the host only.
aclError submit_batch(Copies& copies, uint32_t device, aclrtStream stream) {
  if (!aclrtMemcpyBatchAsync || copies.kind == ACL_MEMCPY_DEVICE_TO_DEVICE) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
  aclrtMemcpyBatchAttr attribute{};
  attribute.srcLoc = location(copies.kind == ACL_MEMCPY_DEVICE_TO_HOST, device);
  attribute.dstLoc = location(copies.kind == ACL_MEMCPY_HOST_TO_DEVICE, device);
  size_t first = 0, failed = 0;  // the attribute holds from the first copy on
  return aclrtMemcpyBatchAsync(copies.targets.data(), copies.bytes.data(), copies.sources.data(), copies.bytes.data(),
                               copies.bytes.size(), &attribute, &first, 1, &failed, stream);
}

aclError submit(Copies& copies, uint32_t device, aclrtStream stream) {
  aclError error = submit_batch(copies, device, stream);
  if (error != ACL_ERROR_RT_FEATURE_NOT_SUPPORT) return error;  // some drivers have the symbol and refuse the call
  error = ACL_SUCCESS;
  for (size_t i = 0; i < copies.bytes.size() && error == ACL_SUCCESS; ++i) {
    error =
        aclrtMemcpyAsync(copies.targets[i], copies.bytes[i], copies.sources[i], copies.bytes[i], copies.kind, stream);
  }
  return error;
}

// [num_blocks, *page] with pages that are dense, wherever they begin.
size_t page_bytes(const Tensor& pool, const char* name) {
  KVBACKEND_CHECK(pool.dim() > 0, name, " has no dims; it must have blocks: reshape it");
  int64_t numbers = 1;
  for (int64_t dim = pool.dim() - 1; dim > 0; --dim) {
    KVBACKEND_CHECK(pool.size(dim) == 1 || pool.stride(dim) == numbers, name,
                    " has strided pages; each must be dense: allocate it so");
    numbers *= pool.size(dim);
  }
  return numbers * pool.element_size();
}

template <typename Index>
void collect(Copies& copies, const Tensor& target, const Tensor& source, const Tensor& block_mapping, size_t size) {
  const auto pairs = block_mapping.accessor<Index, 2>();
  auto* const from = static_cast<char*>(source.data_ptr());
  auto* const to = static_cast<char*>(target.data_ptr());
  const int64_t source_step = source.stride(0) * source.element_size();
  const int64_t target_step = target.stride(0) * target.element_size();
  for (int64_t i = 0; i < block_mapping.size(0); ++i) {
    const int64_t source_block = pairs[i][0], target_block = pairs[i][1];
    if (source_block < 0 || target_block < 0 || source_block >= source.size(0) || target_block >= target.size(0))
      continue;
    copies.add(to + target_block * target_step, from + source_block * source_step, size);
  }
}

void swap_blocks(const Tensor& source, const Tensor& target, const Tensor& block_mapping) {
  const size_t size = page_bytes(source, "source");
  page_bytes(target, "target");  // for its checks
  KVBACKEND_CHECK(source.sizes().slice(1) == target.sizes().slice(1) && source.dtype() == target.dtype(),
                  "source and target differ in pages or dtype; they must be alike: pass pools of one layout");
  KVBACKEND_CHECK(block_mapping.device().is_cpu() && block_mapping.dim() == 2 && block_mapping.size(1) == 2,
                  "block_mapping must be [n, 2] on the host: build it there");
  KVBACKEND_CHECK(!on_npu(source) || !on_npu(target) || source.device() == target.device(), "source is on ",
                  source.device(), " and target on ", target.device(), "; they must be on one: copy through the host");
  const c10_npu::NPUGuard guard(on_npu(source) ? source.device() : target.device());
  const uint32_t device = guard.current_device().index();

  Copies copies{};
  copies.kind = !on_npu(source)  ? ACL_MEMCPY_HOST_TO_DEVICE
                : on_npu(target) ? ACL_MEMCPY_DEVICE_TO_DEVICE
                                 : ACL_MEMCPY_DEVICE_TO_HOST;
  if (block_mapping.scalar_type() == at::kInt) {
    collect<int32_t>(copies, target, source, block_mapping, size);
  } else {
    collect<int64_t>(copies, target, source, block_mapping, size);
  }
  if (copies.bytes.empty() || size == 0) return;

  const auto stream = c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(device));
  if (copies.kind != ACL_MEMCPY_DEVICE_TO_DEVICE) {
    const Tensor& host = on_npu(source) ? target : source;
    if (!host.is_pinned()) {
      const aclrtStream emptied = stream.stream();  // waits for the task queue
      aclError error = aclrtSynchronizeStream(emptied);
      for (size_t i = 0; i < copies.bytes.size() && error == ACL_SUCCESS; ++i) {
        error = aclrtMemcpy(copies.targets[i], copies.bytes[i], copies.sources[i], copies.bytes[i], copies.kind);
      }
      TORCH_CHECK(error == ACL_SUCCESS, "swap_blocks: the ACL runtime answered ", error);
      return;
    }
  }
  at_npu::native::OpCommand::RunOpApi(
      "kvbackend_swap_blocks",
      [copies, device, handle = stream.stream(false)]() mutable -> int { return submit(copies, device, handle); });
  if (copies.kind != ACL_MEMCPY_DEVICE_TO_DEVICE) {  // the allocator gives pinned memory away when the copies are done
    const auto& memory = (on_npu(source) ? target : source).storage().data_ptr();
    at::getHostAllocator(at::kPrivateUse1)->record_event(memory.get(), memory.get_context(), stream.unwrap());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(kvbackend_native, PrivateUse1, m) { m.impl("swap_blocks", &swap_blocks); }
