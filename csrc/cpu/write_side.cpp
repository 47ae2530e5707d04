// Rows to the slots of a cache in any format: a part of reshape_and_cache and of concat_and_cache_mla.
#include "code_pages.h"
#include "encode.h"

namespace kvbackend::KVBACKEND_ISA {

// Write rows [T, Hk, D] or [T, D] to their slots. Parallel over tokens; a slot outside the cache, -1 among them, is
// skipped.
template <class T, class Code>
void write_codes(const Tensor& x, CodePages pages, const Tensor& slot_mapping, int64_t num_blocks, int64_t block_size) {
  const Ids slots(slot_mapping, "slot_mapping");
  Rows<T> rows(x);
  if (pages.dense()) rows.merge_heads(pages.scales);
  const int64_t row_codes = rows.row / kPerByte<Code>;
  torch::stable::parallel_for(0, slot_mapping.size(0), grain(rows.row_bytes()), [&](int64_t begin, int64_t end) {
    RowEncoder<T, Code> encoder(pages.format, pages.global, pages.scales.span(), pages.scales.count());
    std::vector<float> given(round_up(pages.scales.count(), kLanes));
    std::vector<Code> scattered(pages.stride() == 1 ? 0 : row_codes);
    std::vector<T> room;
    int64_t read = -1;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = slots[token];
      if (slot < 0 || slot >= num_blocks * block_size) continue;
      const int64_t block = slot / block_size, offset = slot % block_size;
      for (int64_t head = 0; head < rows.heads; ++head) {
        const T* from = rows.at(token, head, room);
        Code* to = pages.at<Code>(block, offset, head);
        Code* codes = pages.stride() == 1 ? to : scattered.data();
        const int64_t scale = pages.scales.offset(block, offset, head);
        if (pages.format.is_static()) {
          if (scale != read) {
            pages.scales.read(scale, given.data(), nullptr);
            encoder.take(given.data());
          }
          read = scale;
          encoder.encode_taken(from, codes);
        } else {
          encoder.encode(from, codes);
          encoder.write(pages.scales, scale);
        }
        if (codes != to) {
          for (int64_t i = 0; i < row_codes; ++i) to[i * pages.stride()] = codes[i];
        }
      }
    }
  });
}

void write_side(const Tensor& rows, const Tensor& cache, const char* name, const KVFormat* format, bool keys,
                const std::optional<Tensor>& scale, const std::optional<Tensor>& scale_cache,
                const Tensor& slot_mapping) {
  const int64_t num_blocks = cache.size(0), block_size = cache.size(1);
  if (!is_quantized(format)) {
    return write_slots(slot_mapping, num_blocks * block_size, RowCopy(rows, cache));
  }
  const CodePages pages(*format, keys, cache, name, scale, scale_cache);
  with_dtype(rows, name, [&](auto number) {
    with_codes(*format, [&](auto code) {
      write_codes<decltype(number), decltype(code)>(rows, pages, slot_mapping, num_blocks, block_size);
    });
  });
}

}  // namespace kvbackend::KVBACKEND_ISA
