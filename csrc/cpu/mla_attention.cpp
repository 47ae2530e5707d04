// Absorbed MLA over a paged latent cache: one kv head, whose key is the latent and the rotary part, whose value is the
// latent part. A cached row is read once for all heads.
#include "latent.h"

namespace kvbackend::KVBACKEND_ISA {

std::tuple<Tensor, Tensor> mla_attention(const Tensor& q_nope, const Tensor& q_pe, const Tensor& ckv_cache,
                                         const Tensor& kpe_cache, const Tensor& block_table, const Tensor& seq_lens,
                                         const Tensor& cu_seqlens_q, int64_t max_seqlen_q, double softmax_scale,
                                         bool causal, const std::string& kv_format,
                                         const std::optional<Tensor>& k_scale,
                                         const std::optional<Tensor>& k_scale_cache, bool return_lse) {
  expect_rank(q_nope, "q_nope", 3);
  expect_rank(q_pe, "q_pe", 3);
  expect_rank(ckv_cache, "ckv_cache", 3);
  expect_rank(block_table, "block_table", 2);
  const int64_t num_blocks = ckv_cache.size(0), block_size = ckv_cache.size(1);
  expect_shape(q_pe, "q_pe", {q_nope.size(0), q_nope.size(1), q_pe.size(2)});
  expect_rank(kpe_cache, "kpe_cache", 3);
  expect_shape(kpe_cache, "kpe_cache", {num_blocks, block_size, q_pe.size(2)});
  expect_dtype(q_pe, "q_pe", q_nope.scalar_type());
  const Pages pages(block_table, num_blocks, block_size);
  const LogitRule rule{static_cast<float>(softmax_scale), causal, -1, 0.0f};
  std::vector<Sequence> batch = read_batch(pages, seq_lens, cu_seqlens_q, max_seqlen_q, q_nope.size(0));
  std::tuple<Tensor, Tensor> result;
  with_dtype(q_nope, "q_nope", [&](auto zero) {
    using T = decltype(zero);
    const CacheArguments ckv{
        q_nope.scalar_type(), ckv_cache,      "ckv_cache", format_pair(kv_format).first, true, k_scale, "k_scale",
        k_scale_cache,        "k_scale_cache"};
    const LatentSource<T> source(q_nope, q_pe, ckv, plain_cache(q_nope, kpe_cache, "kpe_cache"));
    result = attend<T>(source, pages, rule, std::move(batch), q_nope, {}, return_lse);
  });
  return result;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_BF16(mla_attention)
