// Dense attention over a paged K/V cache.
#include "paged_source.h"

namespace kvbackend::KVBACKEND_ISA {

template void attend_to<float>(const PagedSource<float>&, const Pages&, const LogitRule&, const Plan&, const Results&);
template void attend_to<bf16>(const PagedSource<bf16>&, const Pages&, const LogitRule&, const Plan&, const Results&);
template void attend_to<fp16>(const PagedSource<fp16>&, const Pages&, const LogitRule&, const Plan&, const Results&);

std::tuple<Tensor, Tensor> paged_attention(
    const Tensor& q, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
    const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t max_seqlen_q, double softmax_scale, bool causal,
    int64_t window, double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale, const std::optional<Tensor>& k_scale_cache,
    const std::optional<Tensor>& v_scale_cache, const std::string& kv_format,
    const std::optional<Tensor>& key_positions, const std::optional<Tensor>& rope_cos_sin, bool rope_interleaved,
    const std::optional<Tensor>& key_bias, bool return_lse) {
  expect_rank(q, "q", 3);
  expect_rank(key_cache, "key_cache", 4);
  expect_rank(value_cache, "value_cache", 4);
  expect_rank(block_table, "block_table", 2);
  const Pages pages(block_table, key_cache.size(0), key_cache.size(1));
  const LogitRule rule{static_cast<float>(softmax_scale), causal, window, static_cast<float>(softcap)};
  std::vector<Sequence> batch = read_batch(pages, seq_lens, cu_seqlens_q, max_seqlen_q, q.size(0));
  std::tuple<Tensor, Tensor> result;
  with_dtype(q, "q", [&](auto zero) {
    using T = decltype(zero);
    const auto [key_format, value_format] = format_pair(kv_format);
    const CacheArguments keys{q.scalar_type(), key_cache, "key_cache",   key_format,     true,
                              k_scale,         "k_scale", k_scale_cache, "k_scale_cache"};
    const CacheArguments values{q.scalar_type(), value_cache, "value_cache", value_format,   false,
                                v_scale,         "v_scale",   v_scale_cache, "v_scale_cache"};
    const PagedSource<T> source(q, keys, values, {key_positions, rope_cos_sin, rope_interleaved, key_bias});
    result = attend<T>(source, pages, rule, std::move(batch), q, read_sinks(sinks, q.size(1)), return_lse);
  });
  return result;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_BF16(paged_attention)
