// Blocks of a pool onto other blocks of the pool.
#include "box_copy.h"

namespace kvbackend::KVBACKEND_ISA {

void copy_blocks(const Tensor& cache, const Tensor& block_mapping) {
  KVBACKEND_CHECK(cache.dim() > 1, "cache has ", cache.dim(), " dims; it must have blocks and their pages: reshape it");
  copy_pages(cache, cache, block_mapping);
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(copy_blocks)
