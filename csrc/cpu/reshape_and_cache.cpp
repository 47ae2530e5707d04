// Key and value rows into their slots.
#include "code_pages.h"

namespace kvbackend::KVBACKEND_ISA {

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& slot_mapping, const std::string& kv_format, const std::optional<Tensor>& k_scale,
                       const std::optional<Tensor>& v_scale, const std::optional<Tensor>& k_scale_cache,
                       const std::optional<Tensor>& v_scale_cache) {
  expect_rank(key, "key", 3);
  expect_rank(value, "value", 3);
  expect_shape(value, "value", {key.size(0), key.size(1), value.size(2)});
  expect_rank(key_cache, "key_cache", 4);
  expect_rank(slot_mapping, "slot_mapping", 1);
  const auto [key_format, value_format] = format_pair(kv_format);
  const int64_t num_blocks = key_cache.size(0), block_size = key_cache.size(1);
  const int64_t kv_heads = key.size(1);
  expect_rows(key_cache, "key_cache", key_format, {num_blocks, block_size, kv_heads, key.size(2)}, key);
  expect_rows(value_cache, "value_cache", value_format, {num_blocks, block_size, kv_heads, value.size(2)}, value);
  KVBACKEND_CHECK(slot_mapping.size(0) <= key.size(0), "slot_mapping has ", slot_mapping.size(0), " slots for ",
                  key.size(0), " tokens; it must have at most one a token: cut it");
  if (!is_quantized(key_format) && !is_quantized(value_format)) {
    return write_slots(slot_mapping, num_blocks * block_size, RowCopy(key, key_cache), RowCopy(value, value_cache));
  }
  // Both sides are looked at before one is written.
  expect_side(key_cache, "key_cache", key_format, true, k_scale, k_scale_cache);
  expect_side(value_cache, "value_cache", value_format, false, v_scale, v_scale_cache);
  write_side(key, key_cache, "key_cache", key_format, true, k_scale, k_scale_cache, slot_mapping);
  write_side(value, value_cache, "value_cache", value_format, false, v_scale, v_scale_cache, slot_mapping);
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(reshape_and_cache)
