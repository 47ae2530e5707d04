// Queries or keys, rotated by their positions.
#include "rope.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

// As it is, to the bit.
template <class T>
void copy_row(const T* row, int64_t stride, int64_t size, T* out) {
  if (stride == 1) {
    std::copy_n(row, size, out);
  } else {
    for (int64_t i = 0; i < size; ++i) out[i] = row[i * stride];
  }
}

}  // namespace

Tensor apply_rope(const Tensor& x, const Tensor& positions, const Tensor& cos_sin, bool interleaved, bool trailing,
                  bool inverse) {
  expect_rank(x, "x", 3);
  const int64_t num_tokens = x.size(0), num_heads = x.size(1), dim = x.size(2);
  expect_shape(positions, "positions", {num_tokens});
  const RotaryTable table(cos_sin, x.scalar_type(), inverse);
  const int64_t rotary_dim = table.rotary_dim();
  KVBACKEND_CHECK(rotary_dim <= dim, "cos_sin rotates ", rotary_dim, " dims but x has ", dim,
                  "; it must be at most that: pass the table of this model");
  const int64_t first = trailing ? dim - rotary_dim : 0;
  const Ids position_of(positions, "positions");
  const int64_t x_token = x.stride(0), x_head = x.stride(1), x_dim = x.stride(2);
  Tensor out = new_result(x, {num_tokens, num_heads, dim});

  with_dtype(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* rows = static_cast<const T*>(x.const_data_ptr());
    T* turned = static_cast<T*>(out.mutable_data_ptr());

    // Parallel over rows: tokens and their heads. The angles of a token stay in L1 for its heads.
    const int64_t grain_size = grain(2 * dim * static_cast<int64_t>(sizeof(T)));
    torch::stable::parallel_for(0, num_tokens * num_heads, grain_size, [&](int64_t begin, int64_t end) {
      std::vector<float> angles(rotary_dim), values(rotary_dim);
      int64_t loaded = -1;
      bool rotates = false;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t token = i / num_heads;
        if (token != loaded) {
          rotates = table.load(position_of[token], angles.data());
          loaded = token;
        }
        const T* row = rows + token * x_token + i % num_heads * x_head;
        copy_row(row, x_dim, dim, turned + i * dim);
        if (rotates) {
          load_row(row + first * x_dim, x_dim, rotary_dim, values.data());
          rotate(values.data(), angles.data(), rotary_dim, interleaved);
          store_row(values.data(), rotary_dim, turned + i * dim + first, 1);
        }
      }
    });
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(apply_rope)
