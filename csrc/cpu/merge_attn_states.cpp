// Partial attention results over disjoint keys into one.
#include "kernel.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What each part of one row counts; returns the row's lse. A part of lse -inf or +inf is empty, its weight 0.
float merge_weights(const float* lses, int64_t num_parts, float* weights) {
  float largest = -kInfinity;
  for (int64_t n = 0; n < num_parts; ++n) {
    weights[n] = std::isinf(lses[n]) ? -kInfinity : lses[n];
    if (weights[n] > largest || std::isnan(weights[n])) largest = weights[n];  // NaN, once there, stays
  }
  float total = 0;
  for (int64_t n = 0; n < num_parts; ++n) {
    weights[n] = std::exp(weights[n] - (largest == -kInfinity ? 0 : largest));
    total += weights[n];
  }
  for (int64_t n = 0; n < num_parts; ++n) weights[n] /= total == 0 ? 1 : total;
  return largest + std::log(total);
}

// How much of a row its sink leaves.
float keep(float lse, float sink) { return lse == -kInfinity ? 0 : 1 / (1 + std::exp(sink - lse)); }

}  // namespace

std::tuple<Tensor, Tensor> merge_attn_states(const Tensor& outs, const Tensor& lses,
                                             const std::optional<Tensor>& sinks) {
  expect_rank(outs, "outs", 4);
  const int64_t num_parts = outs.size(0), num_tokens = outs.size(1), num_heads = outs.size(2), dim = outs.size(3);
  expect_shape(lses, "lses", {num_parts, num_tokens, num_heads});
  expect_dtype(lses, "lses", ScalarType::Float);
  if (sinks) {
    expect_shape(*sinks, "sinks", {num_heads});
    expect_dtype(*sinks, "sinks", ScalarType::Float);
  }
  Tensor out = new_result(outs, {num_tokens, num_heads, dim});
  Tensor lse = new_result(lses, {num_tokens, num_heads});
  float* merged_lses = static_cast<float*>(lse.mutable_data_ptr());
  const float* part_lses = static_cast<const float*>(lses.const_data_ptr());
  const float* sink = sinks ? static_cast<const float*>(sinks->const_data_ptr()) : nullptr;
  const int64_t lse_part = lses.stride(0), lse_token = lses.stride(1), lse_head = lses.stride(2);
  const int64_t sink_head = sinks ? sinks->stride(0) : 0;
  const int64_t out_part = outs.stride(0), out_token = outs.stride(1), out_head = outs.stride(2);
  const int64_t out_dim = outs.stride(3);

  with_dtype(outs, "outs", [&](auto zero) {
    using T = decltype(zero);
    const T* parts = static_cast<const T*>(outs.const_data_ptr());
    T* merged = static_cast<T*>(out.mutable_data_ptr());
    const int64_t row_bytes = (num_parts + 1) * (dim * static_cast<int64_t>(sizeof(T)) + 4);

    // Parallel over rows: tokens and their heads. One merged row stays in L1.
    torch::stable::parallel_for(0, num_tokens * num_heads, grain(row_bytes), [&](int64_t begin, int64_t end) {
      std::vector<float> weights(num_parts), values(dim), sums(dim);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t token = row / num_heads, head = row % num_heads;
        for (int64_t n = 0; n < num_parts; ++n)
          weights[n] = part_lses[n * lse_part + token * lse_token + head * lse_head];
        std::fill(sums.begin(), sums.end(), 0.0f);
        merged_lses[row] = merge_weights(weights.data(), num_parts, weights.data());
        for (int64_t n = 0; n < num_parts; ++n) {
          if (std::isinf(part_lses[n * lse_part + token * lse_token + head * lse_head])) continue;
          load_row(parts + n * out_part + token * out_token + head * out_head, out_dim, dim, values.data());
          for (int64_t i = 0; i < dim; ++i) sums[i] += weights[n] * values[i];
        }
        if (sink) {
          const float kept = keep(merged_lses[row], sink[head * sink_head]);
          for (int64_t i = 0; i < dim; ++i) sums[i] *= kept;
        }
        store_row(sums.data(), dim, merged + row * dim, 1);
      }
    });
  });
  return {out, lse};
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(merge_attn_states)
