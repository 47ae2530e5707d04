// Each query head times its W_UK, for few tokens.
#include "few_tokens.h"

namespace kvbackend::KVBACKEND_ISA {

Tensor absorb_q(const Tensor& q_nope, const Tensor& w_uk) {
  expect_rank(q_nope, "q_nope", 3);
  expect_rank(w_uk, "w_uk", 3);
  const int64_t num_tokens = q_nope.size(0), num_heads = q_nope.size(1), rank = w_uk.size(2);
  expect_shape(w_uk, "w_uk", {num_heads, q_nope.size(2), rank});
  expect_dtype(w_uk, "w_uk", q_nope.scalar_type());
  Tensor out = new_result(q_nope, {num_tokens, num_heads, rank});
  with_dtype(q_nope, "q_nope", [&](auto zero) {
    using T = decltype(zero);
    multiply_heads(q_nope, static_cast<const T*>(w_uk.const_data_ptr()), w_uk.stride(0), rank, w_uk.stride(2),
                   w_uk.stride(1), static_cast<T*>(out.mutable_data_ptr()));
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(absorb_q)
