// Launches of pages.cuh.
#pragma once

#include "kernel.h"
#include "pages.cuh"

namespace kvbackend::cuda {

// Older toolkits pass no more to a kernel than this.
static_assert(sizeof(GivenPairs) + sizeof(Geometry) + 2 * sizeof(void*) <= 4096);

template <class Unit, class Pairs>
void launch(const void* from, void* to, const Pairs& pairs, int64_t num_pairs, const Geometry& g, cudaStream_t stream) {
  const dim3 grid((g.units + kThreads * kUnits - 1) / (kThreads * kUnits), unsigned(num_pairs));
  copy_pages<<<grid, kThreads, 0, stream>>>(static_cast<const Unit*>(from), static_cast<Unit*>(to), pairs, g);
  expect_success(cudaGetLastError(), "copy_pages");
}

// At most 65535 pairs.
template <class Pairs>
void copy(const Box& page, const void* from, int64_t from_block, void* to, int64_t to_block, const Pairs& pairs,
          int64_t num_pairs, cudaStream_t stream) {
  if (page.bytes() == 0 || num_pairs == 0) return;
  KVBACKEND_CHECK(page.dims.size() <= kDims && page.bytes() < int64_t(1) << 31, "pages of ", page.bytes(),
                  " bytes lie in ", page.dims.size(), " strided dims; the CUDA kernel takes less than 2 GiB in ", kDims,
                  ": allocate the pool in one piece");
  const int64_t unit = unit_of(page, from_block, to_block, from, to);
  const Geometry g = geometry_of(page, from_block, to_block, unit);
  switch (unit) {
    case 16:
      return launch<uint4>(from, to, pairs, num_pairs, g, stream);
    case 8:
      return launch<uint2>(from, to, pairs, num_pairs, g, stream);
    case 4:
      return launch<uint32_t>(from, to, pairs, num_pairs, g, stream);
    case 2:
      return launch<uint16_t>(from, to, pairs, num_pairs, g, stream);
    default:
      return launch<uint8_t>(from, to, pairs, num_pairs, g, stream);
  }
}

constexpr int64_t kGridY = 65535;

}  // namespace kvbackend::cuda
