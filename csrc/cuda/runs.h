// Copies of pages as runs of bytes: which copies of a batch follow each other. No CUDA in it, so that it is tested
// without (tests/cuda/).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "../common/boxes.h"

namespace kvbackend::cuda {

struct Copy {
  int64_t from, to, bytes;  // offsets from the first byte of source and target
};

// The copies of pairs (source block, target block), with their strides in bytes: none for a pair with a negative block,
// one for runs that follow each other, of one page or of neighbouring blocks.
inline std::vector<Copy> copies_of(const Box& page, int64_t from_block, int64_t to_block,
                                   const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  std::vector<Copy> copies;
  const int64_t runs = page.run ? page.bytes() / page.run : 0;
  for (const auto& [a, b] : pairs) {
    if (a < 0 || b < 0) continue;
    for (int64_t i = 0; i < runs; ++i) {
      Copy next{a * from_block, b * to_block, page.run};
      int64_t rest = i;
      for (const Dim& dim : page.dims) {
        next.from += rest % dim.size * dim.from;
        next.to += rest % dim.size * dim.to;
        rest /= dim.size;
      }
      Copy* last = copies.empty() ? nullptr : &copies.back();
      if (last && last->from + last->bytes == next.from && last->to + last->bytes == next.to) {
        last->bytes += next.bytes;
      } else {
        copies.push_back(next);
      }
    }
  }
  return copies;
}

// The widest unit of 16, 8, 4, 2 or 1 bytes that divides all of some numbers: sizes, strides, addresses.
inline int64_t unit_of(const std::vector<int64_t>& numbers) {
  int64_t unit = 16;
  for (int64_t number : numbers) {
    while (number % unit) unit /= 2;
  }
  return unit;
}

}  // namespace kvbackend::cuda
