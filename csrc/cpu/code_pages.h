// Pages of codes and the scales that belong to them, as the cache ops' arguments name them.
#pragma once

#include "copy_rows.h"
#include "decode.h"
#include "encode.h"

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

// Refuses scales that are not those of a cache in a format, or nullptr for "auto".
inline void expect_side(const Tensor& cache, const char* name, const KVFormat* format, bool keys,
                        const std::optional<Tensor>& scale, const std::optional<Tensor>& scale_cache) {
  if (is_quantized(format)) CodePages(*format, keys, cache, name, scale, scale_cache);
}

// Rows in a format, or nullptr for "auto", to the slots of a cache.
inline void write_side(const Tensor& rows, const Tensor& cache, const char* name, const KVFormat* format, bool keys,
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
