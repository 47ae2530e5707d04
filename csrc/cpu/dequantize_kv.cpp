// Codes and scales back to numbers.
#include "code_pairs.h"
#include "decode.h"

namespace kvbackend::KVBACKEND_ISA {

// Even and odd numbers, rounded to bfloat16, in turn. NaN is that of codes, whose lower half is 0.
KVBACKEND_INLINE void store_turns(bf16* to, Vec even, Vec odd) {
  const auto rounded = [](Vec value) { return (BitVec)value + 0x7fff + ((BitVec)value >> 16 & 1); };
  const HalfPair both = upper_halves(rounded(even), rounded(odd));
  std::memcpy(to, &both, sizeof both);
}

// How rows are decoded kPair numbers at a time.
template <class Code, class Out>
struct PairDecoder {
  static constexpr bool kServes = kEvensFirst<Code> && std::is_same_v<Out, bf16>;

  static bool serves(int64_t span, int64_t count) {
    return kServes && (span % kPair == 0 || (2 * span == kPair && count % 2 == 0) || (span == 1 && count % kPair == 0));
  }

  // Scales or minimums of channels, even ones first as numbers are.
  static void prepare(int64_t span, std::vector<float>& row) {
    if (span != 1) return;
    for (size_t i = 0; i < row.size(); i += kPair) split(&row[i], &row[i], std::make_integer_sequence<int, kLanes>{});
  }

  // As decode_row.
  static void decode(const Code* codes, int64_t span, int64_t count, const float* scales, const float* lows,
                     float global, Out* out) {
    const Vec globals = broadcast(global);
    const auto store_pair = [&](int64_t i, Vec scale, Vec next_scale, Vec low, Vec next_low) {
      Vec even, odd;
      load_pair(codes + i / kPerByte<Code>, even, odd);
      store_turns(out + i, decoded<Code>(even, scale, low, globals), decoded<Code>(odd, next_scale, next_low, globals));
    };
    const auto low = [&](auto&& function, int64_t i) { return kHasMinimum<Code> ? function(lows + i) : Vec{}; };
    const auto one = [](const float* number) { return broadcast(*number); };
    const auto each = [](const float* numbers) { return load(numbers); };
    if (span == 1) {
      for (int64_t i = 0; i < count; i += kPair)
        store_pair(i, each(scales + i), each(scales + i + kLanes), low(each, i), low(each, i + kLanes));
    } else if (span < kPair) {
      for (int64_t i = 0; i < count; i += 2) {
        const Vec both = halves(scales + i), lowest = low(halves, i);
        store_pair(i * span, both, both, lowest, lowest);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const Vec all = one(scales + i), lowest = low(one, i);
        for (int64_t j = i * span; j < (i + 1) * span; j += kPair) store_pair(j, all, all, lowest, lowest);
      }
    }
  }
};

// Parallel over tokens. The scales of a row are floats in L1; those that the next row shares are kept.
template <class Code, class Out>
void dequantize_rows(const Tensor& codes, const KVFormat& format, bool keys, const Tensor& scales, float global,
                     Out* out) {
  const int64_t num_tokens = codes.size(0), stored = codes.size(2), dim = stored * kPerByte<Code>;
  const int64_t token_stride = codes.stride(0), head_stride = codes.stride(1), code_stride = codes.stride(2);
  const Code* data = static_cast<const Code*>(codes.const_data_ptr());
  Scales found(format, keys, scales, 1, dim);
  int64_t heads = codes.size(1), row = dim;
  if (code_stride == 1 && head_stride == stored && found.merge_heads(heads)) {
    row = heads * dim;
    heads = 1;
  }
  const int64_t row_codes = row / kPerByte<Code>;
  const bool in_pairs = PairDecoder<Code, Out>::serves(found.span(), found.count());
  torch::stable::parallel_for(0, num_tokens, grain(heads * row * 4), [&](int64_t begin, int64_t end) {
    std::vector<float> values(found.count()), lows(kHasMinimum<Code> ? found.count() : 0);
    std::vector<Code> dense(code_stride == 1 ? 0 : row_codes);
    int64_t read = -1;
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t offset = found.offset(0, token, head);
        if (offset != read) {
          found.read(offset, values.data(), lows.data());
          if (in_pairs) {
            PairDecoder<Code, Out>::prepare(found.span(), values);
            PairDecoder<Code, Out>::prepare(found.span(), lows);
          }
        }
        read = offset;
        const Code* from = data + token * token_stride + head * head_stride;
        if (code_stride != 1) {
          for (int64_t i = 0; i < row_codes; ++i) dense[i] = from[i * code_stride];
          from = dense.data();
        }
        Out* to = out + (token * heads + head) * row;
        if constexpr (PairDecoder<Code, Out>::kServes) {
          if (in_pairs) {
            PairDecoder<Code, Out>::decode(from, found.span(), found.count(), values.data(), lows.data(), global, to);
            continue;
          }
        }
        decode_row(from, found.span(), found.count(), values.data(), lows.data(), global, to);
      }
    }
  });
}

// Formats without scales: numbers to numbers.
template <class T, class Out>
void convert_rows(const Tensor& rows, Out* out) {
  const int64_t num_tokens = rows.size(0), heads = rows.size(1), dim = rows.size(2);
  const T* data = static_cast<const T*>(rows.const_data_ptr());
  torch::stable::parallel_for(0, num_tokens, grain(heads * dim * 4), [&](int64_t begin, int64_t end) {
    std::vector<float> row(dim);
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < heads; ++head) {
        load_row(data + token * rows.stride(0) + head * rows.stride(1), rows.stride(2), dim, row.data());
        store_row(row.data(), dim, out + (token * heads + head) * dim, 1);
      }
    }
  });
}

Tensor dequantize_kv(const Tensor& codes, const Tensor& scales, const std::string& kv_format,
                     const std::optional<Tensor>& global_scale, const std::string& role, const std::string& out_dtype) {
  const KVFormat& format = format_named(kv_format);
  const bool keys = role == "key";
  expect_rank(codes, "codes", 3);
  expect_dtype(codes, "codes", format.storage);
  const int64_t num_tokens = codes.size(0), heads = codes.size(1), dim = codes.size(2) * format.per_byte();
  KVBACKEND_CHECK(!format.group || (format.across_tokens(keys) ? num_tokens : dim) % format.group == 0, "codes are of ",
                  num_tokens, " tokens and ", dim, " dims a head; ", kv_format, " has whole groups of ", format.group,
                  ": pass all codes of each group");
  expect_scales(scales, "scales", format, scales_shape(format, keys, num_tokens, heads, dim));
  const float global = global_scale_of(format, global_scale, "global_scale");
  const ScalarType dtype = out_dtype == "fp32"   ? ScalarType::Float
                           : out_dtype == "bf16" ? ScalarType::BFloat16
                                                 : ScalarType::Half;
  Tensor out = new_result(codes, {num_tokens, heads, dim}, dtype);
  with_dtype(out, "out", [&](auto number) {
    using Out = decltype(number);
    Out* data = static_cast<Out*>(out.mutable_data_ptr());
    if (!format.quantized()) {
      return with_dtype(codes, "codes", [&](auto code) { convert_rows<decltype(code)>(codes, data); });
    }
    with_codes(format, [&](auto code) { dequantize_rows<decltype(code)>(codes, format, keys, scales, global, data); });
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(dequantize_kv)
