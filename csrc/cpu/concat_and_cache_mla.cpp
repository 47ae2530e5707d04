// Latent and rotary rows into their slots.
#include "copy_rows.h"

namespace kvbackend::KVBACKEND_ISA {

void concat_and_cache_mla(const Tensor& ckv, const Tensor& kpe, const Tensor& ckv_cache, const Tensor& kpe_cache,
                          const Tensor& slot_mapping, const std::string& /*kv_format*/,
                          const std::optional<Tensor>& /*k_scale*/, const std::optional<Tensor>& /*k_scale_cache*/) {
  expect_rank(ckv, "ckv", 2);
  expect_rank(kpe, "kpe", 2);
  expect_rank(ckv_cache, "ckv_cache", 3);
  expect_rank(slot_mapping, "slot_mapping", 1);
  const int64_t num_blocks = ckv_cache.size(0), block_size = ckv_cache.size(1);
  expect_shape(ckv_cache, "ckv_cache", {num_blocks, block_size, ckv.size(1)});
  expect_shape(kpe_cache, "kpe_cache", {num_blocks, block_size, kpe.size(1)});
  KVBACKEND_CHECK(slot_mapping.size(0) <= std::min(ckv.size(0), kpe.size(0)), "slot_mapping has ", slot_mapping.size(0),
                  " slots for ", std::min(ckv.size(0), kpe.size(0)),
                  " tokens; it must have at most one a token: cut it");
  expect_dtype(ckv_cache, "ckv_cache", ckv.scalar_type());
  expect_dtype(kpe_cache, "kpe_cache", kpe.scalar_type());
  write_slots(RowCopy(ckv, ckv_cache), RowCopy(kpe, kpe_cache), slot_mapping, num_blocks * block_size);
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(concat_and_cache_mla)
