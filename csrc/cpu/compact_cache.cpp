// The kept rows of sequences to the front of their blocks, in place.
#include "box_copy.h"

namespace kvbackend::KVBACKEND_ISA {

void compact_cache(const Tensor& cache, const Tensor& block_table, const Tensor& kept) {
  KVBACKEND_CHECK(cache.dim() > 1, "cache has ", cache.dim(), " dims; it must have blocks and slots: reshape it");
  expect_rank(block_table, "block_table", 2);
  expect_rank(kept, "kept", 3);
  const int64_t num_seqs = kept.size(0), num_sets = kept.size(1), count = kept.size(2);
  const int64_t num_blocks = cache.size(0), block_size = cache.size(1), max_blocks = block_table.size(1);
  expect_shape(block_table, "block_table", {num_seqs, max_blocks});
  const int64_t heads = cache.dim() > 2 ? cache.size(2) : 1;
  KVBACKEND_CHECK(num_sets == 1 || num_sets == heads, "kept has ", num_sets, " sets of rows and cache ", heads,
                  " heads; it must have one set, or one for each head: pass select_tokens' result");
  if (block_size == 0) return;
  const Ids blocks(block_table, "block_table"), rows(kept, "kept");
  const int64_t element = static_cast<int64_t>(cache.element_size());
  const int64_t block_bytes = cache.stride(0) * element, slot_bytes = cache.stride(1) * element;
  const int64_t head_bytes = num_sets > 1 ? cache.stride(2) * element : 0;
  const int64_t kept_stride = kept.stride(2), kept_set = kept.stride(1), kept_sequence = kept.stride(0);
  const BoxCopy row(cache, num_sets > 1 ? 3 : 2, cache, num_sets > 1 ? 3 : 2);
  char* data = static_cast<char*>(cache.mutable_data_ptr());

  // Where a row of a sequence lies, or null.
  const auto find = [&](int64_t sequence, int64_t position) -> char* {
    if (position < 0 || position / block_size >= max_blocks) return nullptr;
    const int64_t block = blocks(sequence, position / block_size);
    if (block < 0 || block >= num_blocks) return nullptr;
    return data + block * block_bytes + position % block_size * slot_bytes;
  };
  // Parallel over sequences and their sets: within one, a row is read before a later one takes its place.
  torch::stable::parallel_for(0, num_seqs * num_sets, grain(count * row.bytes()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = i / num_sets, set = i % num_sets;
      for (int64_t target = 0; target < count; ++target) {
        const int64_t source = rows.at(sequence * kept_sequence + set * kept_set + target * kept_stride);
        const char* from = find(sequence, source);
        char* to = find(sequence, target);
        if (from && to && from != to) row(from + set * head_bytes, to + set * head_bytes);
      }
    }
  });
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(compact_cache)
