// Rows to codes and scales.
#include "code_pages.h"
#include "encode.h"

namespace kvbackend::KVBACKEND_ISA {

// The largest magnitudes of each channel of rows begin .. end of a head. False where they mean nothing: one is not
// finite, or channels are no whole pairs.
template <class T>
bool channel_magnitudes(const Rows<T>& rows, int64_t begin, int64_t end, int64_t head, float* top) {
  if (rows.stride != 1 || rows.row % kPair) return false;
  std::vector<SignedHalfPair> largest(rows.row / kPair);
  for (int64_t row = begin; row < end; ++row) {
    const T* from = rows.data + row * rows.token_stride + head * rows.head_stride;
    for (SignedHalfPair& most : largest) {
      SignedHalfPair bits;
      std::memcpy(&bits, from, sizeof bits);
      most = greatest(most, bits & 0x7fff);
      from += kPair;
    }
  }
  IntVec beyond{};
  for (size_t i = 0; i < largest.size(); ++i) {
    beyond |= (IntVec)(largest[i] >= static_cast<int16_t>(Bits<T>::kInfinity));
    T numbers[kPair];
    std::memcpy(numbers, &largest[i], sizeof numbers);
    store(top + i * kPair, load(numbers));
    store(top + i * kPair + kLanes, load(numbers + kLanes));
  }
  return !any(beyond);
}

// The largest magnitudes under scales that all tokens share [heads * count]. Parallel over stretches of tokens; which
// thread has which changes nothing about a maximum.
template <class T>
std::vector<float> magnitudes(const Rows<T>& rows, int64_t span, int64_t count) {
  const int64_t size = round_up(rows.heads * count, kLanes);
  const int64_t wanted = std::max<int64_t>(1, rows.tokens * rows.row_bytes() >> 18);
  const int64_t stretches = std::min<int64_t>({wanted, rows.tokens, 64});
  std::vector<float> found(std::max<int64_t>(1, stretches) * size);
  torch::stable::parallel_for(0, stretches, 1, [&](int64_t first, int64_t last) {
    std::vector<T> room;
    for (int64_t part = first; part < last; ++part) {
      const int64_t begin = part * rows.tokens / stretches, end = (part + 1) * rows.tokens / stretches;
      for (int64_t head = 0; head < rows.heads; ++head) {
        float* top = found.data() + part * size + head * count;
        if (span == 1) {
          if constexpr (sizeof(T) == sizeof(uint16_t)) {
            if (channel_magnitudes(rows, begin, end, head, top)) continue;
          }
          std::fill_n(top, count, 0.0f);
        }
        for (int64_t token = begin; token < end; ++token) {
          const T* x = rows.at(token, head, room);
          int64_t i = 0;
          if (span == 1) {
            for (; i + kLanes <= count; i += kLanes) store(top + i, maximum(magnitude(load(x + i)), load(top + i)));
            for (; i < count; ++i) top[i] = std::max(magnitude(to_float(x[i])), top[i]);
          }
          for (; i < count; ++i) top[i] = std::max(largest_magnitude(x + i * span, span), top[i]);
        }
      }
    }
  });
  for (int64_t part = 1; part < stretches; ++part) {
    for (int64_t i = 0; i < size; ++i) found[i] = std::max(found[i], found[part * size + i]);
  }
  found.resize(size);
  return found;
}

// Scales that all tokens share: computed and stored.
template <class T, class Code>
void make_static_scales(const Tensor& x, const KVFormat& format, const Tensor& scales) {
  Scales found(format, true, scales, 1, x.size(2));
  Rows<T> rows(x);
  rows.merge_heads(found);
  std::vector<float> top = magnitudes(rows, found.span(), found.count());
  if (format.per == Per::tensor) top[0] = *std::max_element(top.begin(), top.end());
  std::vector<float> stored(top.size());
  make_scales<Code>(format.rule, top.data(), scales.numel(), stored.data());
  std::copy_n(stored.begin(), scales.numel(), static_cast<float*>(scales.mutable_data_ptr()));
}

// KIVI's keys: a scale for each channel of a group of tokens. Parallel over groups, and over heads where groups are
// few; the rows of an item stay in L2.
template <class T>
void quantize_groups(const Tensor& x, const KVFormat& format, uint4x2* codes, const Tensor& scales) {
  constexpr int64_t kManyGroups = 64;
  const int64_t group = format.group, groups = x.size(0) / group;
  int64_t heads = x.size(1), dim = x.size(2);
  Scales found(format, true, scales, 1, dim);
  if (groups >= kManyGroups && x.stride(2) == 1 && x.stride(1) == dim && found.merge_heads(heads)) {
    dim *= heads;
    heads = 1;
  }
  torch::stable::parallel_for(0, groups * heads, grain(group * dim * 4), [&](int64_t begin, int64_t end) {
    RowEncoder<T, uint4x2> encoder(format, 1.0f, 1, dim);
    std::vector<T> room(x.stride(2) == 1 ? 0 : group * dim);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / heads * group, head = item % heads;
      const T* from = static_cast<const T*>(x.const_data_ptr()) + first * x.stride(0) + head * x.stride(1);
      int64_t stride = x.stride(0);
      if (x.stride(2) != 1) {
        for (int64_t row = 0; row < group; ++row) {
          for (int64_t i = 0; i < dim; ++i) room[row * dim + i] = from[row * stride + i * x.stride(2)];
        }
        from = room.data();
        stride = dim;
      }
      encoder.encode_group(from, group, stride, codes + (first * heads + head) * dim / 2, heads * dim / 2);
      encoder.write(found, found.offset(0, first, head));
    }
  });
}

std::tuple<Tensor, Tensor> quantize_kv(const Tensor& x, const std::string& kv_format,
                                       const std::optional<Tensor>& scale, const std::optional<Tensor>& global_scale,
                                       const std::string& role) {
  const KVFormat& format = format_named(kv_format);
  const bool keys = role == "key";
  expect_rank(x, "x", 3);
  const int64_t num_tokens = x.size(0), heads = x.size(1), dim = x.size(2);
  KVBACKEND_CHECK(dim % format.per_byte() == 0, "x has ", dim, " dims a head; ", kv_format,
                  " packs two codes into a byte, so it must be even: pad it");
  const bool by_tokens = format.across_tokens(keys);
  KVBACKEND_CHECK(!format.group || (by_tokens ? num_tokens : dim) % format.group == 0, "x has ", num_tokens,
                  " tokens and ", dim, " dims a head; ", kv_format, " takes whole groups of ", format.group,
                  ": choose another group");
  const std::vector<int64_t> shape = scales_shape(format, keys, num_tokens, heads, dim);
  const float global = global_scale_of(format, global_scale, "global_scale");
  Tensor codes = new_result(x, {num_tokens, heads, dim / format.per_byte()}, format.storage);
  Tensor scales = new_result(x, shape, format.scale_dtype);
  if (scale) {
    expect_scales(*scale, "scale", format, shape);
    torch::stable::Tensor made = scales.of_torch();
    torch::stable::copy_(made, scale->of_torch());
  }
  with_dtype(x, "x", [&](auto number) {
    using T = decltype(number);
    with_codes(format, [&](auto code) {
      using Code = decltype(code);
      if constexpr (std::is_same_v<Code, uint4x2>) {
        if (by_tokens) quantize_groups<T>(x, format, static_cast<Code*>(codes.mutable_data_ptr()), scales);
      } else {
        if (format.is_static() && !scale) make_static_scales<T, Code>(x, format, scales);
      }
    });
  });
  if (!by_tokens) encode_rows(x, "x", CodePages(format, global, codes, scales), nullptr, num_tokens);
  return {codes, scales};
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(quantize_kv)
