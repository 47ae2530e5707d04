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

void CachedCodes::load_factors(const Places& places, int64_t count, int64_t head, float* out) const {
  if (grouped()) return void(std::fill_n(out, count, global_));
  scales_->read_floats(places.scale, count, head, out);
}

void CachedCodes::load_scales(const Places& places, int64_t count, int64_t head, int64_t heads, float* out) const {
  constexpr int64_t kBytes = 4096;  // are copied at once: what is decoded may be read beyond its end
  const int64_t size = scales_->count(), of_head = scales_->of_head(head), row = heads * size;
  if (row == 0) return;
  const uint8_t* first = scales_->bytes_at(of_head);
  if (row > kBytes || !first) {
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t i = 0; i < heads; ++i)
        scales_->read(places.scale[n] + scales_->of_head(head + i), out + n * row + i * size, nullptr);
    }
    return;
  }
  uint8_t bytes[kBytes + kLanes];
  const int64_t step = scales_->of_head(1), together = step == size ? heads : 1, length = together * size;
  for (int64_t n = 0; n < count;) {
    const int64_t some = std::min(count - n, kBytes / row);
    uint8_t* to = bytes;
    for (const int64_t end = n + some; n < end; ++n) {
      for (int64_t i = 0; i < heads; i += together, to += length) {
        const uint8_t* from = first + places.scale[n] + i * step;
        if (length == 64) {
          std::memcpy(to, from, 64);
        } else if (length == 8) {
          std::memcpy(to, from, 8);
        } else {
          std::memcpy(to, from, length);
        }
      }
    }
    std::memset(to, 0, kLanes);
    scales_->decode_bytes(bytes, some * row, out + (n - some) * row);
  }
}

namespace {

constexpr int64_t kGroups = 8;  // whose scales change places at once

// Of two times kGroups rows of kGroups bytes: columns become rows.
void turn(const uint8_t (&rows)[kLanes][kGroups], uint8_t (&turned)[kGroups][kLanes]) {
#if defined(__AVX512VBMI__)
  static_assert(kLanes == 2 * kGroups);
  struct Order {
    alignas(kLine) uint8_t at[kGroups][kLanes];
    constexpr Order() : at() {
      for (int group = 0; group < kGroups; ++group) {
        for (int row = 0; row < kLanes; ++row) at[group][row] = static_cast<uint8_t>(row * kGroups + group);
      }
    }
  };
  static constexpr Order kOrder;
  const __m512i first = _mm512_loadu_si512(rows), second = _mm512_loadu_si512(rows + kGroups);
  for (int i = 0; i < kGroups; i += kGroups / 2)
    _mm512_storeu_si512(turned[i], _mm512_permutex2var_epi8(first, _mm512_load_si512(kOrder.at[i]), second));
#else
  for (int64_t row = 0; row < kLanes; ++row) {
    for (int64_t group = 0; group < kGroups; ++group) turned[group][row] = rows[row][group];
  }
#endif
}

}  // namespace

void CachedCodes::load_scales_across(const Places& places, int64_t count, int64_t first_head, int64_t heads,
                                     uint8_t* out) const {
  const int64_t groups = scales_->count(), times = scales_->span() / kLanes;
  for (int64_t head = first_head; head < first_head + heads; ++head) {
    const uint8_t* first = scales_->bytes_at(scales_->of_head(head));
    for (int64_t n = 0; n < 2 * kLanes; n += kLanes) {
      const int64_t some = std::clamp<int64_t>(count - n, 0, kLanes);
      for (int64_t group = 0; group < groups; group += kGroups) {
        alignas(kLine) uint8_t rows[kLanes][kGroups], turned[kGroups][kLanes];
        if (some < kLanes) std::memset(rows, 0, sizeof rows);
        const int64_t here = std::min(kGroups, groups - group);
        const auto from = [&](int64_t row) { return first + places.scale[n + row] + group; };
        if (here == kGroups) {
          for (int64_t row = 0; row < some; ++row) std::memcpy(rows[row], from(row), kGroups);
        } else {
          for (int64_t row = 0; row < some; ++row) std::memcpy(rows[row], from(row), here);
        }
        turn(rows, turned);
        for (int64_t i = 0; i < here; ++i) {
          for (int64_t time = 0; time < times; ++time, out += kLanes) std::memcpy(out, turned[i], kLanes);
        }
      }
    }
  }
}

void CachedCodes::read_scales(int64_t offset, RowBuffer& buffer) const {
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
void CachedCodes::load_codes(const Places& places, int64_t n, int64_t head, RowBuffer& buffer, E* out) const {
  with_codes(*format_, [&](auto zero) {
    constexpr bool exact = std::is_same_v<E, exact_bf16>;
    const auto* codes = dense_codes<decltype(zero)>(row(places.row[n], head), buffer);
    const bool bare = exact && factored();
    if (bare && !grouped()) return decode_span(codes, size_, 1.0f, 0.0f, 1.0f, out);
    read_scales(places.scale[n] + scales_->of_head(head), buffer);
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

template void CachedCodes::load_codes(const Places&, int64_t, int64_t, RowBuffer&, float*) const;
template void CachedCodes::load_codes(const Places&, int64_t, int64_t, RowBuffer&, exact_bf16*) const;

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_PART_BF16
