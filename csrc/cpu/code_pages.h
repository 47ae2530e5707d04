// Pages of codes and the scales that belong to them, as the cache ops' arguments name them.
#pragma once

#include "copy_rows.h"
#include "kv_format.h"

namespace kvbackend::KVBACKEND_ISA {

inline bool is_quantized(const KVFormat* format) { return format && format->quantized(); }

// A cache for rows of a shape, in a format (nullptr: "auto"): codes, or numbers of the rows' dtype.
inline void expect_rows(const Tensor& cache, const char* name, const KVFormat* format, std::vector<int64_t> shape,
                        const Tensor& rows) {
  expect_dtype(cache, name, is_quantized(format) ? format->storage : rows.scalar_type());
  if (is_quantized(format)) {
    KVBACKEND_CHECK(shape.back() % format->per_byte() == 0, name, " is for rows of ", shape.back(), " numbers; ",
                    format->name, " packs two codes into a byte, so that must be even: pad them");
    shape.back() /= format->per_byte();
  }
  expect_sizes(cache, name, shape);
}

// cache [nb, bs, Hk, width], or [nb, bs, width] where all heads share a row. scale is static, per tensor, head or
// channel, or the global one; scale_cache has those of tokens, as many dims of it before a row's as the cache.
class CodePages {
 public:
  CodePages(const KVFormat& format, bool keys, const Tensor& cache, const char* name,
            const std::optional<Tensor>& scale, const std::optional<Tensor>& scale_cache)
      : format(format),
        global(global_scale_of(format, scale, "scale")),
        heads(cache.dim() == 4 ? cache.size(2) : 1),
        dim(cache.size(cache.dim() - 1) * format.per_byte()),
        num_blocks(cache.size(0)),
        block_size(cache.size(1)),
        scales(format, keys, scales_of(format, keys, cache, name, scale, scale_cache), 2, dim, cache.dim() == 4),
        data_(static_cast<char*>(const_cast<void*>(cache.const_data_ptr()))),
        block_(cache.stride(0)),
        slot_(cache.stride(1)),
        head_(cache.dim() == 4 ? cache.stride(2) : cache.size(2)),
        stride_(cache.stride(cache.dim() - 1)) {}

  // One page of fresh codes [T, H, width], with scales as quantize_kv returns them for values.
  CodePages(const KVFormat& format, float global, const Tensor& codes, const Tensor& scales)
      : format(format),
        global(global),
        heads(codes.size(1)),
        dim(codes.size(2) * format.per_byte()),
        num_blocks(1),
        block_size(codes.size(0)),
        scales(format, false, scales, 1, dim),
        data_(static_cast<char*>(codes.mutable_data_ptr())),
        block_(0),
        slot_(codes.stride(0)),
        head_(codes.stride(1)),
        stride_(1) {}

  int64_t num_slots() const { return num_blocks * block_size; }
  // Whether a slot's heads follow each other.
  bool dense() const { return stride_ == 1 && head_ * format.per_byte() == dim; }
  int64_t stride() const { return stride_; }

  template <class Code>
  Code* at(int64_t block, int64_t slot, int64_t head) const {
    return reinterpret_cast<Code*>(data_) + block * block_ + slot * slot_ + head * head_;
  }

  const KVFormat& format;
  const float global;
  const int64_t heads, dim, num_blocks, block_size;
  Scales scales;

 private:
  static const Tensor& scales_of(const KVFormat& format, bool keys, const Tensor& cache, const char* name,
                                 const std::optional<Tensor>& scale, const std::optional<Tensor>& scale_cache) {
    expect_dtype(cache, name, format.storage);
    const int64_t heads = cache.dim() == 4 ? cache.size(2) : 1;
    const int64_t dim = cache.size(cache.dim() - 1) * format.per_byte();
    KVBACKEND_CHECK(!format.group || (format.across_tokens(keys) ? cache.size(1) : dim) % format.group == 0, name,
                    " has blocks of ", cache.size(1), " rows of ", dim, "; ", format.name,
                    " takes whole groups: choose another group");
    const std::optional<Tensor>& found = format.is_static() ? scale : scale_cache;
    KVBACKEND_CHECK(found.has_value(), "the scales of ", name, " are None; kv_format '", format.name,
                    "' has scales: pass them");
    std::vector<int64_t> shape = scales_shape(format, keys, cache.size(1), heads, dim);
    if (!format.is_static()) {
      if (cache.dim() == 3) shape.erase(shape.begin() + 1);
      shape.insert(shape.begin(), cache.size(0));
    }
    expect_scales(*found, "scale", format, shape);
    return *found;
  }

  char* data_;
  int64_t block_, slot_, head_, stride_;
};

// Refuses scales that are not those of a cache in a format, or nullptr for "auto".
inline void expect_side(const Tensor& cache, const char* name, const KVFormat* format, bool keys,
                        const std::optional<Tensor>& scale, const std::optional<Tensor>& scale_cache) {
  if (is_quantized(format)) CodePages(*format, keys, cache, name, scale, scale_cache);
}

// Codes of the first `count` rows [T, H, D] or [T, D] to the slots of pages, or to the slots 0, 1, ...; a slot outside,
// -1 among them, is skipped. encode_rows.cpp.
extern void encode_rows(const Tensor& x, const char* name, const CodePages& pages, const Ids* slots, int64_t count);

// Rows in a format, or nullptr for "auto", to the slots of a cache.
inline void write_side(const Tensor& rows, const Tensor& cache, const char* name, const KVFormat* format, bool keys,
                       const std::optional<Tensor>& scale, const std::optional<Tensor>& scale_cache,
                       const Tensor& slot_mapping) {
  if (!is_quantized(format)) {
    return write_slots(slot_mapping, cache.size(0) * cache.size(1), RowCopy(rows, cache));
  }
  const Ids slots(slot_mapping, "slot_mapping");
  encode_rows(rows, name, CodePages(*format, keys, cache, name, scale, scale_cache), &slots, slot_mapping.size(0));
}

}  // namespace kvbackend::KVBACKEND_ISA
