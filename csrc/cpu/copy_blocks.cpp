// Blocks of a pool onto other blocks of the pool.
#include "box_copy.h"

namespace kvbackend::KVBACKEND_ISA {

void copy_blocks(const Tensor& cache, const Tensor& block_mapping) {
  KVBACKEND_CHECK(cache.dim() > 0, "cache has no dims; its first must be blocks: reshape it");
  copy_pages(cache, cache, block_mapping);
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(copy_blocks)
