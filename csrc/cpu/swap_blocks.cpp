// Blocks of one pool in host memory onto blocks of another.
#include "box_copy.h"

namespace kvbackend::KVBACKEND_ISA {

void swap_blocks(const Tensor& source, const Tensor& target, const Tensor& block_mapping) {
  KVBACKEND_CHECK(source.dim() > 0 && source.dim() == target.dim(), "source has ", source.dim(), " dims and target ",
                  target.dim(), "; both must have blocks and equal pages: reshape them");
  for (int64_t dim = 1; dim < source.dim(); ++dim) {
    KVBACKEND_CHECK(source.size(dim) == target.size(dim), "source has size ", source.size(dim), " in dim ", dim,
                    " and target ", target.size(dim), "; pages must be of one shape: pass pools of one layout");
  }
  expect_dtype(target, "target", source.scalar_type());
  copy_pages(source, target, block_mapping);
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(swap_blocks)
