// Rotation of pairs by the angles of a position.
#pragma once

#include "kernel.h"

namespace kvbackend::KVBACKEND_ISA {

// cos_sin [P, rotary_dim]: cosines in the first half and sines in the second; float32 or the dtype of what is rotated.
class RotaryTable {
 public:
  RotaryTable(const Tensor& cos_sin, ScalarType dtype, bool inverse = false) : table_(cos_sin), inverse_(inverse) {
    expect_rank(cos_sin, "cos_sin", 2);
    KVBACKEND_CHECK(cos_sin.size(1) % 2 == 0, "cos_sin rotates ", cos_sin.size(1),
                    " dims; pairs are rotated, so it must be even: pass cos then sin");
    if (cos_sin.scalar_type() != ScalarType::Float) expect_dtype(cos_sin, "cos_sin", dtype);
  }

  int64_t rotary_dim() const { return table_.size(1); }

  // The angles of a position, as floats; false where the table has no such row.
  bool load(int64_t position, float* cos_sin) const {
    if (position < 0 || position >= table_.size(0)) return false;
    const int64_t dim = rotary_dim();
    with_dtype(table_, "cos_sin", [&](auto zero) {
      const auto* rows = static_cast<const decltype(zero)*>(table_.const_data_ptr());
      load_row(rows + position * table_.stride(0), table_.stride(1), dim, cos_sin);
    });
    if (inverse_)
      for (int64_t i = dim / 2; i < dim; ++i) cos_sin[i] = -cos_sin[i];
    return true;
  }

 private:
  Tensor table_;
  bool inverse_;
};

// Rotate the pairs of one row, in place.
inline void rotate(float* row, const float* cos_sin, int64_t rotary_dim, bool interleaved) {
  const int64_t half = rotary_dim / 2;
  const float* cos = cos_sin;
  const float* sin = cos_sin + half;
  if (interleaved) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const float first = row[2 * i], second = row[2 * i + 1];
      row[2 * i] = first * cos[i] - second * sin[i];
      row[2 * i + 1] = first * sin[i] + second * cos[i];
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const float first = row[i], second = row[half + i];
      row[i] = first * cos[i] - second * sin[i];
      row[half + i] = first * sin[i] + second * cos[i];
    }
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
