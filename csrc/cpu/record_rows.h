// The rows of records, read one at a time: where they lie in pages, their scales, their codes as numbers.
#pragma once

#include "codes.h"
#include "records.h"

namespace kvbackend::KVBACKEND_ISA {

// Pages [num_blocks, page_bytes] of a record.
class RecordPages {
 public:
  // A block_size that is not positive: as many rows as fit.
  RecordPages(const Tensor& pages, const char* name, const Record& record, int64_t block_size)
      : data_(static_cast<const uint8_t*>(pages.const_data_ptr())),
        num_blocks_(pages.size(0)),
        page_stride_(pages.stride(0)),
        block_size_(block_size),
        record_(record) {
    expect_rank(pages, name, 2);
    expect_dtype(pages, name, ScalarType::Byte);
    KVBACKEND_CHECK(pages.stride(1) == 1 || pages.size(1) <= 1, name, " has bytes ", pages.stride(1),
                    " apart; those of a page must follow each other: make it contiguous");
    const int64_t most = pages.size(1) / record.row_bytes();
    if (block_size <= 0) block_size_ = most;
    KVBACKEND_CHECK(block_size_ <= most, name, " has pages of ", pages.size(1), " bytes, for ", most, " rows of ",
                    record.name, "; block_size is ", block_size_, ": pass the rows of a page, or -1");
    KVBACKEND_CHECK(record.page_bytes(block_size_) == pages.size(1), name, " has pages of ", pages.size(1), " bytes; ",
                    block_size_, " rows of ", record.name, " take ", record.page_bytes(block_size_),
                    ": pass whole pages");
  }

  int64_t num_blocks() const { return num_blocks_; }
  int64_t block_size() const { return block_size_; }

  // Where a field of a row begins.
  const uint8_t* at(const Field& field, int64_t block, int64_t slot) const {
    return row(field.plane, block, slot) + field.offset;
  }

  // Where a row's part in a plane begins.
  const uint8_t* row(int64_t plane, int64_t block, int64_t slot) const {
    return data_ + block * page_stride_ + record_.start(block_size_, slot, plane);
  }

 private:
  const uint8_t* data_;
  int64_t num_blocks_, page_stride_, block_size_;
  const Record& record_;
};

// A row's scales as floats, whatever they are stored as. They need not be aligned.
class RecordScales {
 public:
  explicit RecordScales(const Field& field)
      : count_(field.count()),
        kind_(field.holds("float32")         ? Kind::float32
              : field.holds("float16")       ? Kind::float16
              : field.holds("float8_e4m3fn") ? Kind::e4m3
                                             : Kind::e8m0) {}

  int64_t count() const { return count_; }

  void read(const uint8_t* bytes, float* out) const {
    if (kind_ == Kind::float32) return static_cast<void>(std::memcpy(out, bytes, 4 * count_));
    for (int64_t i = 0; i < count_; ++i) {
      if (kind_ == Kind::float16) {
        fp16 half;
        std::memcpy(&half, bytes + 2 * i, sizeof half);
        out[i] = to_float(half);
      } else {
        out[i] = kind_ == Kind::e4m3 ? to_float(e4m3{bytes[i]}) : to_float(e8m0{bytes[i]});
      }
    }
  }

 private:
  enum class Kind { float32, float16, e4m3, e8m0 };

  int64_t count_;
  Kind kind_;
};

// Neighbouring codes that share a scale.
template <class Code, class E>
inline void expand(const Code* codes, int64_t size, float scale, E* out) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(codes + i / kPerByte<Code>) * scale);
  for (; i < size; ++i) {
    float code;
    if constexpr (kPerByte<Code> == 1) {
      code = to_float(codes[i]);
    } else {
      code = i % 2 ? odd(codes[i / 2]) : even(codes[i / 2]);
    }
    out[i] = from_float<E>(code * scale);
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
