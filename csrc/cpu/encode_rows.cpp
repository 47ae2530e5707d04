// Rows to codes: a part of quantize_kv, and of what writes to caches.
#include "code_pages.h"
#include "encode.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

// Parallel over tokens. A row is read twice where its scales are its own, the second time from L1.
template <class T, class Code>
void encode(const Tensor& x, CodePages pages, const Ids* slots, int64_t count) {
  Rows<T> rows(x);
  if (pages.dense()) rows.merge_heads(pages.scales);
  const int64_t row_codes = rows.row / kPerByte<Code>;
  torch::stable::parallel_for(0, count, grain(rows.row_bytes()), [&](int64_t begin, int64_t end) {
    RowEncoder<T, Code> encoder(pages.format, pages.global, pages.scales.span(), pages.scales.count());
    std::vector<float> given(round_up(pages.scales.count(), kLanes));
    std::vector<Code> scattered(pages.stride() == 1 ? 0 : row_codes);
    std::vector<T> room;
    int64_t read = -1;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = slots ? (*slots)[token] : token;
      if (slot < 0 || slot >= pages.num_slots()) continue;
      const int64_t block = slot / pages.block_size, offset = slot % pages.block_size;
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

}  // namespace

void encode_rows(const Tensor& x, const char* name, const CodePages& pages, const Ids* slots, int64_t count) {
  with_dtype(x, name, [&](auto number) {
    with_codes(pages.format, [&](auto code) { encode<decltype(number), decltype(code)>(x, pages, slots, count); });
  });
}

}  // namespace kvbackend::KVBACKEND_ISA
