// Blocks of one pool in host memory onto blocks of another.
#include "../common/pools.h"
#include "box_copy.h"

namespace kvbackend::KVBACKEND_ISA {

void swap_blocks(const Tensor& source, const Tensor& target, const Tensor& block_mapping) {
  expect_equal_pages(source, target);
  copy_pages(source, target, block_mapping);
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(swap_blocks)
