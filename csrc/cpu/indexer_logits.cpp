// The lightning indexer's scores of paged keys, as a matrix.
#include "indexer.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

// Writes scores where they belong.
class Matrix final : public Collector {
 public:
  Matrix(float* out, int64_t columns) : out_(out), columns_(columns) {}

  void begin(const IndexTask& task) override { first_token_ = task.first_token; }
  void take(int64_t query, const float* scores, int64_t count, int64_t first) override {
    std::copy_n(scores, count, out_ + (first_token_ + query) * columns_ + first);
  }
  void end(const IndexTask&) override {}

 private:
  float* out_;
  int64_t columns_, first_token_ = 0;
};

}  // namespace

Tensor indexer_logits(const Tensor& q, const Tensor& weights, const Tensor& key_cache, const Tensor& block_table,
                      const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t max_seqlen_q, int64_t compress_ratio,
                      const std::string& kv_format, int64_t block_size) {
  const IndexerCall call{
      q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, compress_ratio, kv_format, block_size};
  expect_indexer(call);
  const Pages pages = index_pages(call);
  const int64_t num_tokens = q.size(0), columns = pages.capacity();
  Tensor out = new_result(q, {num_tokens, columns}, ScalarType::Float);
  float* data = static_cast<float*>(out.mutable_data_ptr());
  const IndexRows rows(call, pages);
  torch::stable::parallel_for(0, num_tokens, grain(columns * 4), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      std::fill(data + row * columns + rows.visible[row], data + (row + 1) * columns, -kInfinity);
  });
  score_keys(
      call, rows, rows.tasks(kQueries, kTile),
      [&](const IndexTask& task) { return std::make_unique<RangeTiles>(pages, task); },
      [&] { return std::make_unique<Matrix>(data, columns); });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_BF16(indexer_logits)
