// The lightning indexer: scores of paged keys, of which only the best are kept.
#include "selection.h"

namespace kvbackend::KVBACKEND_ISA {

Tensor lightning_indexer(const Tensor& q, const Tensor& weights, const Tensor& key_cache, const Tensor& block_table,
                         const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t max_seqlen_q, int64_t k,
                         int64_t compress_ratio, const std::optional<Tensor>& candidates, int64_t candidate_block_size,
                         const std::string& order, const std::string& kv_format, int64_t block_size) {
  const IndexerCall call{
      q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, compress_ratio, kv_format, block_size};
  expect_indexer(call);
  KVBACKEND_CHECK(k >= 1 && candidate_block_size >= 1, "k is ", k, " and candidate_block_size is ",
                  candidate_block_size, "; both must be at least 1: pass how many to select, and keys of a block");
  const Pages pages = index_pages(call);
  const IndexRows rows(call, pages);
  Tensor out = new_result(q, {q.size(0), k}, ScalarType::Int);
  int32_t* selected = static_cast<int32_t*>(out.mutable_data_ptr());
  const bool by_score = order == "score";
  if (!candidates) {
    const auto tiles_of = [&](const IndexTask& task) { return std::make_unique<RangeTiles>(pages, task); };
    select_keys(call, rows, rows.tasks(kQueries, kTile), tiles_of, k, by_score, 0, selected);
    return out;
  }
  expect_rank(*candidates, "candidates", 2);
  expect_shape(*candidates, "candidates", {q.size(0), candidates->size(1)});
  const Ids ids(*candidates, "candidates");
  const int64_t count = candidates->size(1);
  const int64_t covered = pages.capacity() / candidate_block_size + (pages.capacity() % candidate_block_size != 0);
  KVBACKEND_CHECK(count <= covered, "candidates lists ", count, " blocks of ", candidate_block_size,
                  " keys, more than block_table covers with its ", pages.capacity(),
                  " keys: pass candidate_blocks' result for this block_table");
  const auto tiles_of = [&](const IndexTask& task) {
    std::vector<int64_t> blocks(count);
    for (int64_t i = 0; i < count; ++i) blocks[i] = ids(task.first_token, i);
    return std::make_unique<CandidateTiles>(pages, task, std::move(blocks), candidate_block_size);
  };
  select_keys(call, rows, rows.tasks(1, pages.capacity() + kTile), tiles_of, k, by_score, 0, selected);
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_BF16(lightning_indexer)
