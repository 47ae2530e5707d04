// Pages of one record as pages of another: bytes in another order, each written once.
#include <string>

#include "kernel.h"
#include "rows.cuh"

namespace kvbackend::cuda {
namespace {

constexpr int64_t kThreadsAtMost = int64_t(1) << 31;  // of a launch, so that they count in 32 bits

const Record& record_named(const std::string& name, const char* argument) {
  const Record* found = find_record(name.c_str());
  KVBACKEND_CHECK(found, argument, " is '", name, "'; it must be a record of kvbackend.formats: choose one");
  return *found;
}

}  // namespace

Tensor transcode(const Tensor& pages, const std::string& from_layout, const std::string& to_layout,
                 int64_t block_size) {
  const Record &source = record_named(from_layout, "from_layout"), &target = record_named(to_layout, "to_layout");
  KVBACKEND_CHECK(block_size > 0, "block_size is ", block_size, "; a page holds 1 row or more: pass the rows of one");
  expect_rank(pages, "pages", 2);
  expect_dtype(pages, "pages", ScalarType::Byte);
  const int64_t num_pages = pages.size(0), page_bytes = target.page_bytes(block_size);
  expect_shape(pages, "pages", {num_pages, source.page_bytes(block_size)});
  const uint8_t* from = static_cast<const uint8_t*>(pages.const_data_ptr());
  KVBACKEND_CHECK(pages.stride(1) == 1 && reinterpret_cast<uintptr_t>(from) % 16 == 0, "pages have bytes ",
                  pages.stride(1), " apart, or start at an odd address; the CUDA kernel takes dense ones: copy them");
  Pieces pieces;
  KVBACKEND_CHECK(plan(source, target, block_size, pages.stride(0), pieces), "to_layout is '", to_layout, "'; '",
                  from_layout, "' has other fields: code the rows again");
  const DeviceGuard guard(pages.get_device_index());
  Tensor out = torch::stable::new_empty(pages.of_torch(), {num_pages, page_bytes});
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const int64_t step = std::max<int64_t>(1, kThreadsAtMost / (int64_t(blocks_of(pieces, 1)) * 256));
  for (int64_t first = 0; first < num_pages; first += step) {
    const int64_t count = std::min(step, num_pages - first);
    move_rows<<<dim3(blocks_of(pieces, count), pieces.count), 256, 0, current_stream(pages.get_device_index())>>>(
        from + first * pages.stride(0), to + first * page_bytes, pieces, uint32_t(count), pages.stride(0), page_bytes);
    expect_success(cudaGetLastError(), "move_rows");
  }
  return out;
}

}  // namespace kvbackend::cuda

STABLE_TORCH_LIBRARY_IMPL(kvbackend_native, CUDA, m) { m.impl("transcode", KVBACKEND_BOX(kvbackend::cuda::transcode)); }
