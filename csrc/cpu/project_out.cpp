// Each head's latent result times its W_UV, for few tokens.
#include "few_tokens.h"

namespace kvbackend::KVBACKEND_ISA {

Tensor project_out(const Tensor& latent, const Tensor& w_uv) {
  expect_rank(latent, "latent", 3);
  expect_rank(w_uv, "w_uv", 3);
  const int64_t num_tokens = latent.size(0), num_heads = latent.size(1), dim = w_uv.size(1);
  expect_shape(w_uv, "w_uv", {num_heads, dim, latent.size(2)});
  expect_dtype(w_uv, "w_uv", latent.scalar_type());
  Tensor out = new_result(latent, {num_tokens, num_heads, dim});
  with_dtype(latent, "latent", [&](auto zero) {
    using T = decltype(zero);
    multiply_heads(latent, static_cast<const T*>(w_uv.const_data_ptr()), w_uv.stride(0), dim, w_uv.stride(1),
                   w_uv.stride(2), static_cast<T*>(out.mutable_data_ptr()));
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(project_out)
