// Key and value rows into their slots.
#include "copy_rows.h"

namespace kvbackend::KVBACKEND_ISA {

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& slot_mapping, const std::string& /*kv_format*/,
                       const std::optional<Tensor>& /*k_scale*/, const std::optional<Tensor>& /*v_scale*/,
                       const std::optional<Tensor>& /*k_scale_cache*/, const std::optional<Tensor>& /*v_scale_cache*/) {
  expect_rank(key, "key", 3);
  expect_rank(value, "value", 3);
  expect_rank(key_cache, "key_cache", 4);
  expect_rank(slot_mapping, "slot_mapping", 1);
  const int64_t num_blocks = key_cache.size(0), block_size = key_cache.size(1);
  const int64_t kv_heads = key.size(1);
  expect_shape(key_cache, "key_cache", {num_blocks, block_size, kv_heads, key.size(2)});
  expect_shape(value_cache, "value_cache", {num_blocks, block_size, kv_heads, value.size(2)});
  KVBACKEND_CHECK(slot_mapping.size(0) <= std::min(key.size(0), value.size(0)), "slot_mapping has ",
                  slot_mapping.size(0), " slots for ", std::min(key.size(0), value.size(0)),
                  " tokens; it must have at most one a token: cut it");
  expect_dtype(key_cache, "key_cache", key.scalar_type());
  expect_dtype(value_cache, "value_cache", value.scalar_type());
  write_slots(RowCopy(key, key_cache), RowCopy(value, value_cache), slot_mapping, num_blocks * block_size);
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(reshape_and_cache)
