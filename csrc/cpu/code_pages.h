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
        scales(format, keys, scales_of(format, keys, cache, name, scale, scale_cache), 2, dim, cache.dim() == 4),
        data_(static_cast<char*>(const_cast<void*>(cache.const_data_ptr()))),
        block_(cache.stride(0)),
        slot_(cache.stride(1)),
        head_(cache.dim() == 4 ? cache.stride(2) : cache.size(2)),
        stride_(cache.stride(cache.dim() - 1)) {}

  // Whether a slot's heads follow each other.
  bool dense() const { return stride_ == 1 && head_ * format.per_byte() == dim; }
  int64_t stride() const { return stride_; }

  template <class Code>
  Code* at(int64_t block, int64_t slot, int64_t head) const {
    return reinterpret_cast<Code*>(data_) + block * block_ + slot * slot_ + head * head_;
  }

  const KVFormat& format;
  const float global;
  const int64_t heads, dim;
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

// Rows in a format, or nullptr for "auto", to the slots of a cache: write_side.cpp.
extern void write_side(const Tensor& rows, const Tensor& cache, const char* name, const KVFormat* format, bool keys,
                       const std::optional<Tensor>& scale, const std::optional<Tensor>& scale_cache,
                       const Tensor& slot_mapping);

}  // namespace kvbackend::KVBACKEND_ISA
