// The blocks of paged index keys that hold the highest scores.
#include "selection.h"

namespace kvbackend::KVBACKEND_ISA {

Tensor candidate_blocks(const Tensor& q, const Tensor& weights, const Tensor& key_cache, const Tensor& block_table,
                        const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t max_seqlen_q,
                        int64_t num_candidates, int64_t candidate_block_size, int64_t compress_ratio,
                        const std::string& kv_format, int64_t block_size) {
  const IndexerCall call{
      q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, compress_ratio, kv_format, block_size};
  expect_indexer(call);
  KVBACKEND_CHECK(num_candidates >= 1 && candidate_block_size >= 1, "num_candidates is ", num_candidates,
                  " and candidate_block_size is ", candidate_block_size,
                  "; both must be at least 1: pass how many to choose, and keys of a block");
  const Pages pages = index_pages(call);
  const IndexRows rows(call, pages);
  const int64_t blocks = (pages.capacity() + candidate_block_size - 1) / candidate_block_size;
  const int64_t k = std::min(num_candidates, blocks);
  Tensor out = new_result(q, {q.size(0), k}, ScalarType::Int);
  const auto tiles_of = [&](const IndexTask& task) { return std::make_unique<RangeTiles>(pages, task); };
  select_keys(call, rows, rows.tasks(kQueries, kTile * candidate_block_size), tiles_of, k, false, candidate_block_size,
              static_cast<int32_t*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_BF16(candidate_blocks)
