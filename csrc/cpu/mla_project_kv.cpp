// Hidden states to the normalized latent and the rotated key that MLA caches.
#include "copy_rows.h"
#include "few_tokens.h"
#include "rope.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

// Up to so many tokens our product is as fast as torch's (oneDNN) or faster. [T, 7168] x [7168, 576] on 2026-11-29, one
// core of an Intel Xeon with AMX, torch 2.13, ms (ours with all that follows): bfloat16 T=4 0.62 and 0.71, T=8 1.00 and
// 0.82, T=16 1.76 and 0.81; float32 T=8 1.28 and 2.23, T=16 2.01 and 2.47, T=32 3.67 and 3.40.
constexpr int64_t kFewTokens = 8, kFewTokensFloat32 = 16;

// Whether torch's bfloat16 product rounds sums of 128 terms to bfloat16, as torch 2.10 does there (oneDNN; seen under
// qemu-user, 2026-11-30): 0.007 of the largest value off for 1024 terms, where a rounding of the result is 0.004.
#ifdef __aarch64__
constexpr bool kRoundsSums = true;
#else
constexpr bool kRoundsSums = false;
#endif

// hidden [T, hidden_size] times the weights: [T, kva_dim] in float32. For many tokens in hidden's dtype, as torch's
// product comes: with 16 bits a rounding that the specification does not have, and a model's own linear layer has.
Tensor project(const Tensor& hidden, const Tensor& w_kva) {
  const int64_t few = hidden.scalar_type() == ScalarType::Float ? kFewTokensFloat32 : kFewTokens;
  if (hidden.size(0) > few) {
    const auto factor = [](const Tensor& x) {
      const torch::stable::Tensor& given = x.of_torch();
      return kRoundsSums && x.scalar_type() == ScalarType::BFloat16 ? torch::stable::to(given, ScalarType::Float)
                                                                    : given;
    };
    return torch::stable::matmul(factor(hidden), torch::stable::transpose(factor(w_kva), 0, 1));
  }
  Tensor out = new_result(hidden, {hidden.size(0), w_kva.size(0)}, ScalarType::Float);
  with_dtype(hidden, "hidden", [&](auto zero) {
    using T = decltype(zero);
    multiply_heads(torch::stable::unsqueeze(hidden.of_torch(), 1), static_cast<const T*>(w_kva.const_data_ptr()), 0,
                   w_kva.size(0), w_kva.stride(0), w_kva.stride(1), static_cast<float*>(out.mutable_data_ptr()));
  });
  return out;
}

// latent / root mean square * weight, in place
void normalize(float* latent, const float* weight, int64_t rank, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < rank; ++i) squares += latent[i] * latent[i];
  const float scale = 1 / std::sqrt(squares / static_cast<float>(rank) + eps);
  for (int64_t i = 0; i < rank; ++i) latent[i] *= scale * weight[i];
}

}  // namespace

std::tuple<Tensor, Tensor> mla_project_kv(const Tensor& hidden, const Tensor& w_kva, const Tensor& norm_weight,
                                          const Tensor& cos_sin, const Tensor& positions, double eps, bool interleaved,
                                          const std::optional<Tensor>& ckv_cache,
                                          const std::optional<Tensor>& kpe_cache,
                                          const std::optional<Tensor>& slot_mapping) {
  expect_rank(hidden, "hidden", 2);
  expect_rank(norm_weight, "norm_weight", 1);
  const RotaryTable table(cos_sin, hidden.scalar_type());
  const int64_t num_tokens = hidden.size(0), rank = norm_weight.size(0), rope = table.rotary_dim();
  expect_shape(w_kva, "w_kva", {rank + rope, hidden.size(1)});
  expect_shape(positions, "positions", {num_tokens});
  expect_dtype(w_kva, "w_kva", hidden.scalar_type());
  expect_dtype(norm_weight, "norm_weight", hidden.scalar_type());
  KVBACKEND_CHECK(ckv_cache.has_value() == kpe_cache.has_value() && ckv_cache.has_value() == slot_mapping.has_value(),
                  "only some of ckv_cache, kpe_cache and slot_mapping are given; they come together or not at all: "
                  "pass all three or none");

  Tensor ckv = new_result(hidden, {num_tokens, rank});
  Tensor kpe = new_result(hidden, {num_tokens, rope});
  std::optional<RowCopy> write_ckv, write_kpe;
  std::optional<Ids> slots;
  int64_t num_slots = 0, num_written = 0;
  if (ckv_cache) {
    expect_rank(*ckv_cache, "ckv_cache", 3);
    expect_rank(*slot_mapping, "slot_mapping", 1);
    KVBACKEND_CHECK(slot_mapping->size(0) <= num_tokens, "slot_mapping names ", slot_mapping->size(0), " slots for ",
                    num_tokens, " tokens; it must be at most one for each: pass the slots of these tokens");
    const int64_t num_blocks = ckv_cache->size(0), block_size = ckv_cache->size(1);
    expect_shape(*ckv_cache, "ckv_cache", {num_blocks, block_size, rank});
    expect_shape(*kpe_cache, "kpe_cache", {num_blocks, block_size, rope});
    expect_dtype(*ckv_cache, "ckv_cache", hidden.scalar_type());
    expect_dtype(*kpe_cache, "kpe_cache", hidden.scalar_type());
    num_slots = num_blocks * block_size;
    num_written = slot_mapping->size(0);
    write_ckv.emplace(ckv, *ckv_cache);
    write_kpe.emplace(kpe, *kpe_cache);
    slots.emplace(*slot_mapping, "slot_mapping");
  }

  const Tensor projected = project(hidden, w_kva);
  const Ids position_of(positions, "positions");
  with_dtype(hidden, "hidden", [&](auto hidden_zero) {
    using T = decltype(hidden_zero);
    T* latents = static_cast<T*>(ckv.mutable_data_ptr());
    T* rotaries = static_cast<T*>(kpe.mutable_data_ptr());
    std::vector<float> weight(rank);
    load_row(static_cast<const T*>(norm_weight.const_data_ptr()), norm_weight.stride(0), rank, weight.data());

    // Parallel over tokens; a token's row stays in L1 until it is written.
    with_dtype(projected, "projected", [&](auto projected_zero) {
      const auto* rows = static_cast<const decltype(projected_zero)*>(projected.const_data_ptr());
      const int64_t row_stride = projected.stride(0), stride = projected.stride(1);
      torch::stable::parallel_for(0, num_tokens, grain(8 * (rank + rope)), [&](int64_t begin, int64_t end) {
        std::vector<float> row(rank + rope), angles(rope);
        for (int64_t token = begin; token < end; ++token) {
          load_row(rows + token * row_stride, stride, rank + rope, row.data());
          normalize(row.data(), weight.data(), rank, static_cast<float>(eps));
          if (table.load(position_of[token], angles.data()))
            rotate(row.data() + rank, angles.data(), rope, interleaved);
          store_row(row.data(), rank, latents + token * rank, 1);
          store_row(row.data() + rank, rope, rotaries + token * rope, 1);
          const int64_t slot = token < num_written ? (*slots)[token] : -1;
          if (slot < 0 || slot >= num_slots) continue;
          (*write_ckv)(token, slot);
          (*write_kpe)(token, slot);
        }
      });
    });
  });
  return {ckv, kpe};
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(mla_project_kv)
