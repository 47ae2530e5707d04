// Rows of sequences out of a paged cache.
#include "box_copy.h"

namespace kvbackend::KVBACKEND_ISA {

Tensor gather_cache(const Tensor& cache, const Tensor& block_table, const Tensor& cu_seqlens, int64_t num_tokens,
                    const std::optional<Tensor>& seq_starts, const std::string& /*kv_format*/,
                    const std::optional<Tensor>& /*scale*/, const std::optional<Tensor>& /*scale_cache*/,
                    const std::string& /*out_format*/) {
  KVBACKEND_CHECK(cache.dim() > 1, "cache has ", cache.dim(), " dims; it must have blocks and slots: reshape it");
  KVBACKEND_CHECK(num_tokens >= 0, "num_tokens is ", num_tokens,
                  "; it must be at least 0: pass the rows of the output");
  expect_rank(block_table, "block_table", 2);
  const int64_t num_seqs = block_table.size(0), max_blocks = block_table.size(1);
  expect_shape(cu_seqlens, "cu_seqlens", {num_seqs + 1});
  expect_dtype(cu_seqlens, "cu_seqlens", ScalarType::Int);
  if (seq_starts) {
    expect_shape(*seq_starts, "seq_starts", {num_seqs});
    expect_dtype(*seq_starts, "seq_starts", ScalarType::Int);
  }
  const int64_t num_blocks = cache.size(0), block_size = cache.size(1);
  const Ids blocks(block_table, "block_table"), bounds(cu_seqlens, "cu_seqlens");
  const std::optional<Ids> starts = seq_starts ? std::make_optional<Ids>(*seq_starts, "seq_starts") : std::nullopt;
  KVBACKEND_CHECK(bounds[0] == 0, "cu_seqlens starts with ", bounds[0],
                  "; it is the running sum of lengths and must start with 0: prepend a 0");

  std::vector<int64_t> shape{num_tokens};
  for (int64_t dim = 2; dim < cache.dim(); ++dim) shape.push_back(cache.size(dim));
  Tensor out = torch::stable::new_empty(cache, shape);
  const BoxCopy row(cache, 2, out, 1);
  const int64_t element = static_cast<int64_t>(cache.element_size()), row_bytes = row.bytes();
  const int64_t block_bytes = cache.stride(0) * element, slot_bytes = cache.stride(1) * element;
  const bool dense = row.is_one_run() && slot_bytes == row_bytes;
  const char* from = static_cast<const char*>(cache.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());

  // Parallel over rows of the output; each step takes the rows up to the end of a block, a sequence or the range.
  torch::stable::parallel_for(0, num_tokens, grain(row_bytes), [&](int64_t token, int64_t end) {
    int64_t sequence = 0, count;
    for (; token < end; token += count) {
      char* rows = to + token * row_bytes;
      count = end - token;
      if (token < bounds[num_seqs]) {
        while (sequence + 1 < num_seqs && bounds[sequence + 1] <= token) ++sequence;
        const int64_t position = token - bounds[sequence] + (starts ? (*starts)[sequence] : 0);
        count = std::clamp<int64_t>(bounds[sequence + 1] - token, 1, count);
        if (position >= 0 && block_size > 0 && position / block_size < max_blocks) {
          const int64_t offset = position % block_size, block = blocks(sequence, position / block_size);
          count = std::min(count, block_size - offset);
          if (block >= 0 && block < num_blocks) {
            const char* slots = from + block * block_bytes + offset * slot_bytes;
            if (dense) {
              std::memcpy(rows, slots, count * row_bytes);
            } else {
              for (int64_t i = 0; i < count; ++i) row(slots + i * slot_bytes, rows + i * row_bytes);
            }
            continue;
          }
        } else {
          count = 1;  // the next position may be in the table
        }
      }
      std::memset(rows, 0, count * row_bytes);
    }
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(gather_cache)
