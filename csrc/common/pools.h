// What copies between two pools of blocks need, whoever makes them.
#pragma once

#include "check.h"

namespace kvbackend {

// Pages of one shape and dtype.
inline void expect_equal_pages(const Tensor& source, const Tensor& target) {
  KVBACKEND_CHECK(source.dim() > 0 && source.dim() == target.dim(), "source has ", source.dim(), " dims and target ",
                  target.dim(), "; both must have blocks and equal pages: reshape them");
  for (int64_t dim = 1; dim < source.dim(); ++dim) {
    KVBACKEND_CHECK(source.size(dim) == target.size(dim), "source has size ", source.size(dim), " in dim ", dim,
                    " and target ", target.size(dim), "; pages must be of one shape: pass pools of one layout");
  }
  expect_dtype(target, "target", source.scalar_type());
}

}  // namespace kvbackend
