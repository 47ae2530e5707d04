// The k highest scores of each row. A sample tells which scores need not be kept at all.
#include "topk.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

constexpr int64_t kSample = 1024;

// A floor that more than k of the scores exceed, in all likelihood, and not many more; found from some of them. The
// rank in the sample is four standard deviations beyond k's.
float guess_floor(const float* scores, int64_t size, int64_t k, std::vector<float>& sample) {
  const int64_t step = size / kSample;
  const double share = static_cast<double>(k) / static_cast<double>(step);
  const int64_t rank = static_cast<int64_t>(share + 4 * std::sqrt(share) + 4);
  if (step < 2 || 2 * rank > kSample) return kNever;
  sample.resize(kSample);
  for (int64_t i = 0; i < kSample; ++i) sample[i] = scores[i * step];
  Best best(rank);
  best.start();
  best.add(sample.data(), kSample, 0);
  if (best.finish() < rank) return kNever;
  return std::nextafter(best.least(), kNever);  // not to lose what equals it
}

// One row: all that is above the guess, or, should that be too few, all.
void select(const float* scores, int64_t size, Best& best, int64_t k, std::vector<float>& sample) {
  const float floor = guess_floor(scores, size, k, sample);
  best.start(floor);
  best.add(scores, size, 0);
  if (best.finish() == k || floor == kNever) return;
  best.start();
  best.add(scores, size, 0);
  best.finish();
}

}  // namespace

Tensor topk_indices(const Tensor& scores, int64_t k, const std::optional<Tensor>& lengths, const std::string& order) {
  expect_rank(scores, "scores", 2);
  const int64_t rows = scores.size(0), columns = scores.size(1);
  if (lengths) expect_shape(*lengths, "lengths", {rows});
  KVBACKEND_CHECK(k >= 1, "k is ", k, "; it must be at least 1: pass how many to select");
  const std::optional<Ids> sizes = lengths ? std::make_optional<Ids>(*lengths, "lengths") : std::nullopt;
  Tensor out = new_result(scores, {rows, k}, ScalarType::Int);
  int32_t* positions = static_cast<int32_t*>(out.mutable_data_ptr());
  with_dtype(scores, "scores", [&](auto zero) {
    using T = decltype(zero);
    const T* data = static_cast<const T*>(scores.const_data_ptr());
    const int64_t row_stride = scores.stride(0), column_stride = scores.stride(1);
    const bool in_place = std::is_same_v<T, float> && column_stride == 1;
    // Parallel over rows.
    torch::stable::parallel_for(0, rows, grain(columns * 4 + k * 16), [&](int64_t begin, int64_t end) {
      Best best(k);
      std::vector<float> row(in_place ? 0 : columns), sample;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t size = sizes ? std::clamp<int64_t>((*sizes)[i], 0, columns) : columns;
        const T* from = data + i * row_stride;
        if (!in_place) load_row(from, column_stride, size, row.data());
        select(in_place ? reinterpret_cast<const float*>(from) : row.data(), size, best, k, sample);
        best.write(order == "score", positions + i * k);
      }
    });
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(topk_indices)
