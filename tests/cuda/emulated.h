// CUDA's words as C++ has them: what lets a kernel without shared memory be run thread by thread on a CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
};
inline dim3 blockIdx, threadIdx;
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
using std::min;

// Calls the kernel once for each thread of a grid, the last block first, since no order is promised.
template <class Kernel>
void run_grid(dim3 grid, uint32_t threads, Kernel&& kernel) {
  for (uint32_t y = grid.y; y-- > 0;) {
    for (uint32_t x = grid.x; x-- > 0;) {
      for (uint32_t thread = 0; thread < threads; ++thread) {
        blockIdx = {x, y, 1}, threadIdx = {thread, 1, 1};
        kernel();
      }
    }
  }
}
