// Rows of one vector each into their slots, as they are or packed as records.
#include "copy_rows.h"
#include "encode.h"
#include "record_rows.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

constexpr int64_t kMostScales = 64;  // of a row, and a multiple of every vector

bool is(const char* text, const char* wanted) { return !std::strcmp(text, wanted); }

// How a row is packed into pages of a record: codecs/records.py, to the bit.
class RecordWriter {
 public:
  RecordWriter(const Tensor& cache, const Record& record, int64_t block_size)
      : record_(record),
        pages_(cache, "cache", record, block_size),
        codes_(*record.field("codes")),
        scales_(*record.field("scales")),
        rope_(record.field("rope")),
        pairs_(is(codes_.dtype, "uint8")),
        held_by_scale_(std::string(record.name).rfind("v32_fp8", 0) == 0),
        nan_scales_(std::string(record.name).rfind("v41_fp4_288", 0) == 0),
        permuted_(is(record.name, "v32_nvfp4_352")) {}

  int64_t coded() const { return codes_.bytes * (pairs_ ? 2 : 1); }
  int64_t width() const {
    const int64_t size = rope_ && is(rope_->dtype, "bfloat16") ? 2 : 1;
    return coded() + (rope_ ? rope_->bytes / size : 0);
  }

  // x [width] is overwritten where it is NaN.
  void write(int64_t slot, float* x) const {
    for (int64_t plane = 0; plane < 2; ++plane)
      if (record_.plane_bytes[plane]) std::memset(at(slot, plane), 0, record_.plane_bytes[plane]);
    if (pairs_) {
      pack<e2m1x2>(slot, x);
    } else if (is(codes_.dtype, "int8")) {
      pack<int8_t>(slot, x);
    } else {
      pack<e4m3>(slot, x);
    }
    if (!rope_) return;
    float* rotary = x + coded();
    if (is(rope_->dtype, "bfloat16")) {
      store_row(rotary, rope_->bytes / 2, reinterpret_cast<bf16*>(at(slot, *rope_)), 1);
    } else {
      remove_nan(rotary, rope_->bytes);
      encode_span<By::scale>(rotary, rope_->bytes, 1.0f, 0.0f, reinterpret_cast<e4m3*>(at(slot, *rope_)));
    }
  }

 private:
  uint8_t* at(int64_t slot, int64_t plane) const {
    return const_cast<uint8_t*>(pages_.row(plane, slot / pages_.block_size(), slot % pages_.block_size()));
  }
  uint8_t* at(int64_t slot, const Field& field) const { return at(slot, field.plane) + field.offset; }

  static void remove_nan(float* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) x[i] = without_nan(x[i]);
  }

  template <class Code>
  void pack(int64_t slot, float* x) const {
    const int64_t count = scales_.bytes / bytes_per_scale(), group = coded() / count;
    float scales[kMostScales] = {};
    uint64_t broken = 0;  // spans with a NaN, of records that mark them
    for (int64_t i = 0; i < count; ++i) {
      float* span = x + i * group;
      if (nan_scales_ && std::any_of(span, span + group, [](float value) { return std::isnan(value); })) {
        std::fill_n(span, group, 0.0f);
        broken |= uint64_t{1} << i;
      }
      remove_nan(span, group);
      scales[i] = largest_magnitude(span, group);
    }
    write_scales<Code>(scales, count, broken, at(slot, scales_));
    Code* codes = reinterpret_cast<Code*>(at(slot, codes_));
    for (int64_t i = 0; i < count; ++i) {
      float* span = x + i * group;
      if constexpr (std::is_same_v<Code, int8_t>) {  // ties to even, unlike the format int8
        for (int64_t n = 0; n < group; ++n) span[n] = std::nearbyint(span[n] / scales[i]);
        encode_span<By::scale>(span, group, 1.0f, 0.0f, codes + i * group);
      } else {
        encode_span<By::scale>(span, group, scales[i], 0.0f, codes + i * group / kPerByte<Code>);
      }
    }
  }

  // From largest magnitudes to the scales that codes are made with, in place and as they are stored.
  template <class Code>
  void write_scales(float* scales, int64_t count, uint64_t broken, uint8_t* out) const {
    alignas(kLine) uint8_t stored[kMostScales * sizeof(float)];
    if (is(scales_.dtype, "float8_e4m3fn")) {
      make_scales<Code>(Rule::e4m3, scales, count, stored);
      for (int64_t i = 0; i < count; ++i)
        out[permuted_ ? 8 * (i & 3) + (i >> 2) : i] = broken >> i & 1 ? 0x7f : stored[i];
    } else if (is(scales_.dtype, "float16")) {
      make_scales<Code>(Rule::amax, scales, count, stored);
      for (int64_t i = 0; i < count; ++i) {
        const fp16 half = from_float<fp16>(std::min(scales[i], kLargestFloat16));
        scales[i] = to_float(half);
        std::memcpy(out + i * sizeof half, &half, sizeof half);
      }
    } else {
      for (int64_t i = 0; i < count && held_by_scale_; ++i) scales[i] = std::max(scales[i], 0.0448f);
      make_scales<Code>(Rule::pow2_ceil, scales, count, stored);
      if (is(scales_.dtype, "float8_e8m0fnu")) {
        std::memcpy(out, stored, count);
      } else if (is(scales_.dtype, "bfloat16")) {
        store_row(scales, count, reinterpret_cast<bf16*>(out), 1);
      } else {
        std::memcpy(out, scales, count * sizeof(float));
      }
    }
  }

  int64_t bytes_per_scale() const {
    if (is(scales_.dtype, "float32")) return 4;
    return is(scales_.dtype, "float16") || is(scales_.dtype, "bfloat16") ? 2 : 1;
  }

  static constexpr int64_t kLine = 64;

  const Record& record_;
  const RecordPages pages_;
  const Field &codes_, &scales_;
  const Field* rope_;
  bool pairs_, held_by_scale_, nan_scales_, permuted_;
};

}  // namespace

void store_rows(const Tensor& rows, const Tensor& cache, const Tensor& slot_mapping, const std::string& kv_format,
                int64_t block_size) {
  expect_rank(rows, "rows", 2);
  expect_rank(slot_mapping, "slot_mapping", 1);
  const int64_t width = rows.size(1), num_slots = slot_mapping.size(0);
  KVBACKEND_CHECK(num_slots <= rows.size(0), "slot_mapping has ", num_slots, " slots for ", rows.size(0),
                  " rows; it must have at most one a row: cut it");
  if (kv_format == "auto") {
    expect_rank(cache, "cache", 3);
    expect_dtype(cache, "cache", rows.scalar_type());
    expect_shape(cache, "cache", {cache.size(0), cache.size(1), width});
    return write_slots(slot_mapping, cache.size(0) * cache.size(1), RowCopy(rows, cache));
  }
  const Record& record = record_named(kv_format, "kv_format");
  expect_rank(cache, "cache", 2);
  expect_dtype(cache, "cache", ScalarType::Byte);
  if (block_size < 1) block_size = cache.size(1) / record.row_bytes();
  const RecordWriter pages(cache, record, block_size);
  KVBACKEND_CHECK(cache.size(1) == record.page_bytes(block_size) && cache.stride(1) == 1 && pages.width() == width,
                  "cache holds no dense pages of ", kv_format, " for rows of ", width, " numbers: pass such pages");
  const Ids slots(slot_mapping, "slot_mapping");
  const int64_t limit = cache.size(0) * block_size;
  with_dtype(rows, "rows", [&](auto zero) {
    const auto* data = static_cast<const decltype(zero)*>(rows.const_data_ptr());
    // Parallel over rows; one stays in L1 until it is written.
    torch::stable::parallel_for(0, num_slots, grain(width * 8), [&](int64_t begin, int64_t end) {
      std::vector<float> row(width);
      for (int64_t i = begin; i < end; ++i) {
        if (slots[i] < 0 || slots[i] >= limit) continue;
        load_row(data + i * rows.stride(0), rows.stride(1), width, row.data());
        pages.write(slots[i], row.data());
      }
    });
  });
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(store_rows)
