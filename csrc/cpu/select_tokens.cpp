// Which tokens eviction keeps: pooled scores as ordered integers, and the least of the chosen found without sorting.
#include "kernel.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

constexpr float kLast = -std::numeric_limits<float>::infinity();

enum class Pooling { none, avg, max };

// What is asked of one set of scores.
struct Choice {
  int64_t length;  // tokens that have a score
  int64_t sinks;   // the first tokens, kept
  int64_t recent;  // index from which on tokens are kept
  int64_t total;   // tokens to keep
  int64_t half;    // tokens of the neighbourhood on either side
  Pooling pooling;
};

// Integers that are ordered as scores are: NaN, which a sum of infinities may be, above all, and -0 like 0.
inline uint32_t ordered(float score) {
  if (score != score) return 0xffffffff;
  const uint32_t bits = float_to_bits(score + 0.0f);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// pooled[i] over the wanted scores within `half` of i, in the order of their positions. scores [length + 2 * half]
// start `half` before the first token, and where none is wanted hold what leaves sum or maximum as it is.
inline void pool(const float* scores, int64_t length, int64_t half, Pooling pooling, float* pooled) {
  std::copy_n(scores, length, pooled);
  for (int64_t shift = 1; shift <= 2 * half; ++shift) {
    if (pooling == Pooling::avg) {
      for (int64_t i = 0; i < length; ++i) pooled[i] += scores[i + shift];
    } else {
      for (int64_t i = 0; i < length; ++i) pooled[i] = std::max(pooled[i], scores[i + shift]);
    }
  }
}

// One set at a time.
class Selector {
 public:
  // scores [length] -> positions kept, ascending, at most budget; the rest of out becomes -1.
  void select(const float* scores, const Choice& choice, int64_t budget, int32_t* out) {
    const int64_t earlier = std::min(choice.recent, choice.length);
    rank(scores, earlier, choice);
    const int64_t first = std::min(choice.sinks, earlier);
    const int64_t open = choice.total - first - (choice.length - earlier);
    auto [least, ties] = threshold(open);
    int64_t count = 0;
    for (int64_t i = 0; i < choice.length && count < budget; ++i) {
      bool keep = i < first || i >= earlier;
      if (i < earlier) {
        const bool tied = keys_[i] == least && ties > 0;
        ties -= tied;
        keep |= wanted_[i] && (keys_[i] > least || tied);
      }
      if (keep) out[count++] = static_cast<int32_t>(i);
    }
    std::fill(out + count, out + budget, -1);
  }

 private:
  // keys_ and wanted_ of the tokens before the recent ones. What is not wanted, or kept anyway, ranks last.
  void rank(const float* scores, int64_t earlier, const Choice& choice) {
    const float empty = choice.pooling == Pooling::avg ? 0.0f : kLast;
    const int64_t half = choice.pooling == Pooling::none ? 0 : std::min(choice.half, earlier);
    padded_.assign(earlier + 2 * half, empty);
    wanted_.resize(earlier);
    for (int64_t i = 0; i < earlier; ++i) {
      wanted_[i] = scores[i] > kLast;  // not NaN
      if (wanted_[i]) padded_[half + i] = scores[i];
    }
    pooled_.resize(earlier);
    pool(padded_.data(), earlier, half, choice.pooling, pooled_.data());
    keys_.resize(earlier);
    for (int64_t i = 0; i < earlier; ++i) keys_[i] = ordered(wanted_[i] && i >= choice.sinks ? pooled_[i] : kLast);
  }

  // The least key among the `open` greatest, and how many of that key are among them.
  std::pair<uint32_t, int64_t> threshold(int64_t open) {
    if (open <= 0) return {0xffffffff, 0};
    if (open >= static_cast<int64_t>(keys_.size())) return {0, 0};
    order_ = keys_;
    std::nth_element(order_.begin(), order_.begin() + (open - 1), order_.end(), std::greater<uint32_t>());
    const uint32_t least = order_[open - 1];
    return {least, std::count(order_.begin(), order_.begin() + open, least)};
  }

  std::vector<float> padded_, pooled_;
  std::vector<uint8_t> wanted_;
  std::vector<uint32_t> keys_, order_;
};

}  // namespace

Tensor select_tokens(const Tensor& scores, const Tensor& seq_lens, int64_t budget, int64_t num_sinks,
                     int64_t num_recent, const std::string& pooling, int64_t kernel,
                     const std::optional<Tensor>& budgets) {
  expect_rank(scores, "scores", 3);
  const int64_t num_seqs = scores.size(0), num_sets = scores.size(1), width = scores.size(2);
  expect_shape(seq_lens, "seq_lens", {num_seqs});
  if (budgets) expect_shape(*budgets, "budgets", {num_seqs});
  KVBACKEND_CHECK(budget >= 0 && num_sinks >= 0 && num_recent >= 0 && kernel >= 1, "budget is ", budget, ", num_sinks ",
                  num_sinks, ", num_recent ", num_recent, " and kernel ", kernel,
                  "; none may be negative, and kernel is at least 1: pass counts of tokens");
  const Ids lengths(seq_lens, "seq_lens");
  const std::optional<Ids> totals = budgets ? std::make_optional<Ids>(*budgets, "budgets") : std::nullopt;
  Choice rule{};
  rule.half = kernel / 2;
  rule.pooling = pooling == "avg" ? Pooling::avg : pooling == "max" ? Pooling::max : Pooling::none;
  rule.sinks = num_sinks;
  Tensor out = new_result(scores, {num_seqs, num_sets, budget}, ScalarType::Int);
  int32_t* positions = static_cast<int32_t*>(out.mutable_data_ptr());
  with_dtype(scores, "scores", [&](auto zero) {
    const auto* data = static_cast<const decltype(zero)*>(scores.const_data_ptr());
    // Parallel over sets.
    torch::stable::parallel_for(0, num_seqs * num_sets, grain(width * 16), [&](int64_t begin, int64_t end) {
      Selector selector;
      std::vector<float> row(width);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t sequence = i / num_sets, set = i % num_sets, length = std::max<int64_t>(lengths[sequence], 0);
        Choice choice = rule;
        choice.length = std::min(length, width);
        choice.recent = std::max<int64_t>(length - num_recent, 0);
        choice.total = totals ? std::min((*totals)[sequence], budget) : budget;
        load_row(data + sequence * scores.stride(0) + set * scores.stride(1), scores.stride(2), choice.length,
                 row.data());
        selector.select(row.data(), choice, budget, positions + i * budget);
      }
    });
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(select_tokens)
