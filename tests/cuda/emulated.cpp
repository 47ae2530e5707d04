// csrc/cuda's kernels and its host side as plain functions, for tests/cuda/test_kernels.py.
#include "emulated.h"

#include <cstring>
#include <vector>

#include "../../csrc/cuda/pages.cuh"
#include "../../csrc/cuda/rows.cuh"

using namespace kvbackend::cuda;

namespace {

Box box_of_call(int64_t element, int64_t dims, const int64_t* sizes, const int64_t* from, const int64_t* to) {
  std::vector<Dim> found;
  for (int64_t dim = 0; dim < dims; ++dim) found.push_back({sizes[dim], from[dim] * element, to[dim] * element});
  return box_of(element, found);
}

template <class Unit, class Pairs>
void run_copy(const void* from, void* to, const Pairs& pairs, int64_t num_pairs, const Geometry& g) {
  const uint32_t blocks = (g.units + kThreads * kUnits - 1) / (kThreads * kUnits);
  run_grid({blocks, uint32_t(num_pairs)}, kThreads,
           [&] { copy_pages(static_cast<const Unit*>(from), static_cast<Unit*>(to), pairs, g); });
}

template <class Pairs>
void copy(int64_t unit, const void* from, void* to, const Pairs& pairs, int64_t num_pairs, const Geometry& g) {
  if (unit == 16) return run_copy<uint4>(from, to, pairs, num_pairs, g);
  if (unit == 8) return run_copy<uint2>(from, to, pairs, num_pairs, g);
  if (unit == 4) return run_copy<uint32_t>(from, to, pairs, num_pairs, g);
  if (unit == 2) return run_copy<uint16_t>(from, to, pairs, num_pairs, g);
  run_copy<uint8_t>(from, to, pairs, num_pairs, g);
}

}  // namespace

extern "C" {

// way 0: pairs that travel with the launch; 1: pairs in memory, int64; 2: int32. Strides in elements. Returns the unit.
int64_t copy_blocks(int way, const void* source, void* target, int64_t element, int64_t dims, const int64_t* sizes,
                    const int64_t* from, const int64_t* to, int64_t from_block, int64_t to_block, const void* ids,
                    int64_t row, int64_t column, int64_t num_pairs) {
  const Box page = box_of_call(element, dims, sizes, from, to);
  from_block *= element, to_block *= element;
  if (page.bytes() == 0) return 0;
  const int64_t unit = unit_of(page, from_block, to_block, source, target);
  const Geometry g = geometry_of(page, from_block, to_block, unit);
  if (way == 0) {
    GivenPairs given;
    for (int64_t i = 0; i < num_pairs; ++i) {
      given.pairs[i][0] = static_cast<const int64_t*>(ids)[i * row];
      given.pairs[i][1] = static_cast<const int64_t*>(ids)[i * row + column];
    }
    copy(unit, source, target, given, num_pairs, g);
  } else {
    copy(unit, source, target, DevicePairs{ids, row, column, way == 1}, num_pairs, g);
  }
  return unit;
}

// The copies that swap_blocks would issue, made here; returns how many.
int64_t copies(const char* source, char* target, int64_t element, int64_t dims, const int64_t* sizes,
               const int64_t* from, const int64_t* to, int64_t from_block, int64_t to_block, const int64_t* pairs,
               int64_t num_pairs) {
  std::vector<std::pair<int64_t, int64_t>> listed;
  for (int64_t i = 0; i < num_pairs; ++i) listed.emplace_back(pairs[2 * i], pairs[2 * i + 1]);
  const Box page = box_of_call(element, dims, sizes, from, to);
  const std::vector<Copy> found = copies_of(page, from_block * element, to_block * element, listed);
  for (const Copy& each : found) std::memcpy(target + each.to, source + each.from, each.bytes);
  return int64_t(found.size());
}

// Returns how many pieces, or -1 where the records do not fit; widths[i] is the unit of piece i.
int64_t transcode(const uint8_t* pages, uint8_t* out, const char* from_layout, const char* to_layout,
                  int64_t block_size, int64_t num_pages, int64_t page_stride, int64_t* widths) {
  const Record &source = *find_record(from_layout), &target = *find_record(to_layout);
  Pieces pieces;
  if (!plan(source, target, block_size, page_stride, pieces)) return -1;
  for (int i = 0; i < pieces.count; ++i) widths[i] = pieces.each[i].unit;
  run_grid({blocks_of(pieces, num_pages), uint32_t(pieces.count)}, 256,
           [&] { move_rows(pages, out, pieces, uint32_t(num_pages), page_stride, target.page_bytes(block_size)); });
  return pieces.count;
}
}
