// Latent and rotary rows into their slots.
#include "code_pages.h"

namespace kvbackend::KVBACKEND_ISA {

void concat_and_cache_mla(const Tensor& ckv, const Tensor& kpe, const Tensor& ckv_cache, const Tensor& kpe_cache,
                          const Tensor& slot_mapping, const std::string& kv_format,
                          const std::optional<Tensor>& k_scale, const std::optional<Tensor>& k_scale_cache) {
  expect_rank(ckv, "ckv", 2);
  expect_rank(kpe, "kpe", 2);
  expect_rank(ckv_cache, "ckv_cache", 3);
  expect_rank(slot_mapping, "slot_mapping", 1);
  expect_shape(kpe, "kpe", {ckv.size(0), kpe.size(1)});
  const KVFormat* format = format_pair(kv_format).first;
  const int64_t num_blocks = ckv_cache.size(0), block_size = ckv_cache.size(1);
  expect_rows(ckv_cache, "ckv_cache", format, {num_blocks, block_size, ckv.size(1)}, ckv);
  expect_rows(kpe_cache, "kpe_cache", nullptr, {num_blocks, block_size, kpe.size(1)}, kpe);
  KVBACKEND_CHECK(slot_mapping.size(0) <= ckv.size(0), "slot_mapping has ", slot_mapping.size(0), " slots for ",
                  ckv.size(0), " tokens; it must have at most one a token: cut it");
  const RowCopy write_kpe(kpe, kpe_cache);
  if (!is_quantized(format)) {
    return write_slots(slot_mapping, num_blocks * block_size, RowCopy(ckv, ckv_cache), write_kpe);
  }
  write_side(ckv, ckv_cache, "ckv_cache", format, true, k_scale, k_scale_cache, slot_mapping);
  write_slots(slot_mapping, num_blocks * block_size, write_kpe);
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(concat_and_cache_mla)
