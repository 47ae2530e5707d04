// Codes of caches as numbers: a part of all attention.
#include "cached_rows.h"
#include "decode.h"

namespace kvbackend::KVBACKEND_ISA {

CachedCodes::CachedCodes(const CacheArguments& given)
    : data_(static_cast<const char*>(given.cache.const_data_ptr())),
      format_(given.format && given.format->quantized() ? given.format : nullptr),
      element_(given.cache.element_size()),
      block_(given.cache.stride(0) * element_),
      slot_(given.cache.stride(1) * element_),
      head_(given.cache.dim() == 4 ? given.cache.stride(2) * element_ : 0),
      step_(given.cache.stride(given.cache.dim() - 1)),
      size_(given.cache.size(given.cache.dim() - 1) * (format_ ? format_->per_byte() : 1)) {
  expect_dtype(given.cache, given.name, format_ ? format_->storage : given.dtype);
  if (!format_) return;
  const bool pages = !format_->is_static(), has_heads = given.cache.dim() == 4;
  const auto& scales = pages ? given.scale_cache : given.scale;
  const char* name = pages ? given.scale_cache_name : given.scale_name;
  KVBACKEND_CHECK(scales.has_value(), name, " is None; kv_format '", format_->name, "' has scales: pass them");
  KVBACKEND_CHECK(
      format_->group == 0 || (format_->across_tokens(given.keys) ? given.cache.size(1) : size_) % format_->group == 0,
      given.name, " has rows of ", size_, " numbers in blocks of ", given.cache.size(1), "; scales of '", format_->name,
      "' cover ", format_->group, ": choose a format whose groups divide them");
  std::vector<int64_t> shape =
      scales_shape(*format_, given.keys, given.cache.size(1), has_heads ? given.cache.size(2) : 1, size_);
  if (pages) {
    shape.insert(shape.begin(), given.cache.size(0));
    if (!has_heads) shape.erase(shape.begin() + 2);
  }
  expect_scales(*scales, name, *format_, shape);
  scales_.emplace(*format_, given.keys, *scales, 2, size_, has_heads);
  global_ = global_scale_of(*format_, given.scale, given.scale_name);
}

void CachedCodes::load_factors(const Keys& keys, int64_t head, float* out) const {
  if (grouped()) return void(std::fill_n(out, keys.count, global_));
  scales_->read_floats(keys.block, keys.slot, keys.count, head, out);
}

void CachedCodes::load_scales(const Keys& keys, int64_t head, float* out) const {
  constexpr int64_t kBytes = 32;  // of a row's scales: 512 channels in groups of 16
  const int64_t count = scales_->count();
  const auto offset = [&](int64_t n) { return scales_->offset(keys.block[n], keys.slot[n], head); };
  if (count > kBytes || !scales_->bytes_at(offset(0))) {
    for (int64_t n = 0; n < keys.count; ++n) scales_->read(offset(n), out + n * count, nullptr);
    return;
  }
  uint8_t bytes[kTile * kBytes + kLanes] = {};
  for (int64_t n = 0; n < keys.count; ++n) {
    const uint8_t* from = scales_->bytes_at(offset(n));
    count == 8 ? std::memcpy(bytes + n * 8, from, 8) : std::memcpy(bytes + n * count, from, count);
  }
  scales_->decode_bytes(bytes, keys.count * count, out);
}

void CachedCodes::read_scales(int64_t block, int64_t slot, int64_t head, RowBuffer& buffer) const {
  const int64_t offset = scales_->offset(block, slot, head);
  if (offset == buffer.offset) return;
  buffer.scales.resize(scales_->count());
  buffer.lows.resize(scales_->count());
  scales_->read(offset, buffer.scales.data(), buffer.lows.data());
  buffer.offset = offset;
}

template <class Code>
const Code* CachedCodes::dense_codes(const char* from, RowBuffer& buffer) const {
  const Code* codes = reinterpret_cast<const Code*>(from);
  if (step_ == 1) return codes;
  const int64_t stored = size_ / kPerByte<Code>;
  buffer.codes.resize(stored * sizeof(Code));
  Code* dense = reinterpret_cast<Code*>(buffer.codes.data());
  for (int64_t i = 0; i < stored; ++i) dense[i] = codes[i * step_];
  return dense;
}

template <class E>
void CachedCodes::load_codes(int64_t offset, int64_t block, int64_t slot, int64_t head, RowBuffer& buffer,
                             E* out) const {
  with_codes(*format_, [&](auto zero) {
    constexpr bool exact = std::is_same_v<E, exact_bf16>;
    const auto* codes = dense_codes<decltype(zero)>(row(offset, head), buffer);
    const bool bare = exact && factored();
    if (bare && !grouped()) return decode_span(codes, size_, 1.0f, 0.0f, 1.0f, out);
    read_scales(block, slot, head, buffer);
    const auto decode = [&](auto* to, float global) {
      decode_row(codes, scales_->span(), scales_->count(), buffer.scales.data(), buffer.lows.data(), global, to);
    };
    if constexpr (exact) {
      bare ? decode(out, 1.0f) : decode(reinterpret_cast<bf16*>(out), global_);
    } else {
      decode(out, global_);
    }
  });
}

template void CachedCodes::load_codes(int64_t, int64_t, int64_t, int64_t, RowBuffer&, float*) const;
template void CachedCodes::load_codes(int64_t, int64_t, int64_t, int64_t, RowBuffer&, exact_bf16*) const;

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_PART_BF16
