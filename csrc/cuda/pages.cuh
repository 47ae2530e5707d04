// The kernel that copies pages of one GPU onto other pages: in units as wide as everything is aligned, each thread
// several of them. Nothing of torch in it and no launch, so that tests/cuda runs it as C++.
#pragma once

#include <cstdint>

#include "runs.h"

namespace kvbackend::cuda {

constexpr int kDims = 4;  // of a page, past its runs: more than any pool that we know
constexpr int kThreads = 256;
constexpr int kUnits = 4;  // of a thread, so that several loads are on their way

// A page in units: how many, how many of them follow each other, and how the runs lie (strides in units).
struct Geometry {
  uint32_t units, run;
  int dims;
  uint32_t size[kDims];
  int64_t from[kDims], to[kDims];
  int64_t from_block, to_block;
};

inline Geometry geometry_of(const Box& page, int64_t from_block, int64_t to_block, int64_t unit) {
  Geometry g{};
  g.units = uint32_t(page.bytes() / unit), g.run = uint32_t(page.run / unit), g.dims = int(page.dims.size());
  for (int dim = 0; dim < g.dims; ++dim) {
    g.size[dim] = uint32_t(page.dims[dim].size);
    g.from[dim] = page.dims[dim].from / unit, g.to[dim] = page.dims[dim].to / unit;
  }
  g.from_block = from_block / unit, g.to_block = to_block / unit;
  return g;
}

// The bytes that a thread can move at once.
inline int64_t unit_of(const Box& page, int64_t from_block, int64_t to_block, const void* from, const void* to) {
  std::vector<int64_t> numbers{page.run, from_block, to_block, int64_t(reinterpret_cast<uintptr_t>(from) % 16),
                               int64_t(reinterpret_cast<uintptr_t>(to) % 16)};
  for (const Dim& dim : page.dims) numbers.insert(numbers.end(), {dim.from, dim.to});
  return unit_of(numbers);
}

// Pairs in device memory, int32 or int64.
struct DevicePairs {
  const void* ids;
  int64_t row, column;
  bool wide;

  __device__ int64_t at(int64_t offset) const {
    return wide ? static_cast<const int64_t*>(ids)[offset] : static_cast<const int32_t*>(ids)[offset];
  }
  __device__ int64_t source(int64_t i) const { return at(i * row); }
  __device__ int64_t target(int64_t i) const { return at(i * row + column); }
};

// Pairs that travel with the launch: no memory of the device, nothing to wait for.
struct GivenPairs {
  static constexpr int kMost = 240;
  int64_t pairs[kMost][2];

  __device__ int64_t source(int64_t i) const { return pairs[i][0]; }
  __device__ int64_t target(int64_t i) const { return pairs[i][1]; }
};

// Grid: x over the units of a page, y over pairs.
template <class Unit, class Pairs>
__global__ void __launch_bounds__(kThreads) copy_pages(const Unit* from, Unit* to, Pairs pairs, Geometry g) {
  const int64_t a = pairs.source(blockIdx.y), b = pairs.target(blockIdx.y);
  if (a < 0 || b < 0) return;
  from += a * g.from_block;
  to += b * g.to_block;
  const uint32_t first = blockIdx.x * (kThreads * kUnits) + threadIdx.x;
  Unit held[kUnits];
  int64_t place[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const uint32_t unit = min(first + i * kThreads, g.units - 1);  // past the end the last one, which is not stored
    int64_t source = unit, target = unit;
    if (g.dims) {
      uint32_t rest = unit / g.run;
      source = target = unit - rest * g.run;
#pragma unroll
      for (int dim = 0; dim < kDims; ++dim) {
        if (dim >= g.dims) break;
        const uint32_t outer = rest / g.size[dim], index = rest - outer * g.size[dim];
        source += index * g.from[dim];
        target += index * g.to[dim];
        rest = outer;
      }
    }
    held[i] = from[source];
    place[i] = target;
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (first + i * kThreads < g.units) to[place[i]] = held[i];
  }
}

}  // namespace kvbackend::cuda
