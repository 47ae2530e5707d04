// How much attention cached tokens get. Two passes over the keys: the first finds what makes each query's logits
// probabilities, as attention without values does; the second makes the logits of a tile again, the same to the bit,
// and sums the probabilities of each key. A key belongs to one task, which takes the queries in order.
#include "paged_source.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

// A logit's probability is e^(logit - peak) * inverse; inverse is 0 for rows that see no key.
class Norms final : public Results {
 public:
  Norms(int64_t tokens, int64_t heads, std::vector<float> sinks)
      : heads_(heads),
        sinks_(std::move(sinks)),
        peaks_(new float[tokens * heads]()),
        inverses_(new float[tokens * heads]()) {}

  void write(int64_t token, int64_t head, float peak, float total, float* /*values*/) const override {
    if (peak == -kInfinity && total == 0) return;
    if (!sinks_.empty()) total += sinks_[head] == peak ? 1.0f : std::exp(sinks_[head] - peak);  // also if both are +inf
    peaks_[token * heads_ + head] = peak;
    inverses_[token * heads_ + head] = 1.0f / total;
  }

  float peak(int64_t token, int64_t head) const { return peaks_[token * heads_ + head]; }
  float inverse(int64_t token, int64_t head) const { return inverses_[token * heads_ + head]; }

 private:
  int64_t heads_;
  std::vector<float> sinks_;
  std::unique_ptr<float[]> peaks_, inverses_;
};

// Scores [count, width] become probabilities. peak and inverse have `width` floats, or kLanes where width is less: then
// they are repeated.
void make_probabilities(float* scores, int64_t count, int64_t width, const float* peak, const float* inverse) {
  const int64_t step = std::max<int64_t>(width, kLanes), size = count * width;
  std::fill(scores + size, scores + round_up(size, kLanes), -kInfinity);
  for (int64_t row = 0; row < step; row += kLanes) {
    for (int64_t i = row; i < size; i += step) {
      const Vec score = load(scores + i);
      const Vec probability = exp_small(score - load(peak + row)) * load(inverse + row);
      store(scores + i, score == -kInfinity ? Vec{} : probability);  // masked, also where the row is NaN
    }
  }
}

// Some keys and kv heads of a sequence: at most kSplit keys.
struct Share {
  int64_t sequence, begin, end, first_head, heads;
};

std::vector<Share> make_shares(const Plan& plan, int64_t kv_heads) {
  std::vector<Share> shares;
  const int64_t threads = torch::stable::get_num_threads();
  for (int64_t i = 0; i < static_cast<int64_t>(plan.batch.size()); ++i) {
    const std::vector<Task> ranges = plan.ranges(i);
    if (ranges.empty()) continue;
    const int64_t parts = (plan.batch[i].length + kSplit - 1) / kSplit, fair = parts * kv_heads / (2 * threads);
    const int64_t heads = std::clamp<int64_t>(std::min(kRows / width_of(ranges.front().rows()), fair), 1, kv_heads);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * kSplit, end = std::min(begin + kSplit, plan.batch[i].length);
      for (int64_t head = 0; head < kv_heads; head += heads)
        shares.push_back({i, begin, end, head, std::min(heads, kv_heads - head)});
    }
  }
  return shares;
}

// mass [heads, kSplit] += the probabilities that all queries of the sequence give to the keys of a share.
template <class Worker>
void add_up(Worker& worker, const Plan& plan, const Share& share, const Norms& norms, float* mass) {
  for (Task task : plan.ranges(share.sequence)) {
    task.begin = std::max(task.begin, share.begin);
    task.end = std::min(task.end, share.end);
    task.first_head = share.first_head;
    task.heads = share.heads;
    if (task.begin >= task.end) continue;
    worker.begin(task, plan.batch[share.sequence]);
    const int64_t width = worker.width(), rows = task.rows(), state = worker.state_width();
    std::vector<float> peak(task.heads * state), inverse(task.heads * state);
    std::vector<int64_t> nans;  // of those, rows whose probabilities are all NaN
    for (int64_t i = 0; i < task.heads * state; ++i) {
      const int64_t row = i % state % width, head = worker.query_head(i / state, row);
      if (row >= rows) continue;
      peak[i] = norms.peak(worker.token(row), head);
      inverse[i] = norms.inverse(worker.token(row), head);
      if (std::isnan(inverse[i]) && i % state < width) nans.push_back(i);
    }
    worker.walk([&](const Keys& keys, int64_t head) {
      worker.strips([&](float* scores, int64_t columns, int64_t first) {
        const int64_t row = head * state + first;
        make_probabilities(scores, keys.count, columns, peak.data() + row, inverse.data() + row);
      });
      for (int64_t i : nans) {  // a logit of -inf among them, too, which looked like a key that is not seen
        for (int64_t n = 0; i / state == head && n < keys.count; ++n) {
          if (worker.sees(keys, n, i % state)) worker.score_at(n, i % state) = inverse[i];
        }
      }
      for (int64_t n = 0; n < keys.count; ++n) {
        float sum = 0;
        for (int64_t row = 0; row < rows; ++row) sum += worker.score_at(n, row);
        mass[head * kSplit + keys.index[n] - share.begin] += sum;
      }
    });
  }
}

// The sequences with the counted queries only.
void keep_last(std::vector<Sequence>& batch, int64_t last_queries) {
  if (last_queries < 0) return;
  for (Sequence& sequence : batch) {
    const int64_t dropped = std::clamp<int64_t>(sequence.length - last_queries - sequence.start, 0, sequence.queries);
    sequence.first_token += dropped;
    sequence.start += dropped;
    sequence.queries -= dropped;
  }
}

// Where the sums go: scores [B, Hk, S], or score_cache [nb, bs, Hk].
struct Target {
  float* data;
  bool paged;
  int64_t first, second, third, columns;

  void add(const Pages& pages, int64_t sequence, const Share& share, const float* mass, float factor) const {
    for (int64_t head = 0; head < share.heads; ++head) {
      pages.visit(sequence, share.begin, share.end, [&](int64_t index, int64_t block, int64_t slot) {
        const float sum = factor * mass[head * kSplit + index - share.begin];
        const int64_t own = share.first_head + head;
        if (paged) {
          data[block * first + slot * second + own * third] += sum;
        } else if (index < columns) {
          data[sequence * first + own * second + index * third] += sum;
        }
      });
    }
  }
};

}  // namespace

void accumulate_scores(const Tensor& q, const Tensor& key_cache, const Tensor& block_table, const Tensor& seq_lens,
                       const Tensor& cu_seqlens_q, int64_t max_seqlen_q, double softmax_scale,
                       const std::optional<Tensor>& scores, const std::optional<Tensor>& score_cache,
                       int64_t last_queries, int64_t window, double softcap, const std::optional<Tensor>& sinks,
                       const std::optional<Tensor>& k_scale, const std::optional<Tensor>& k_scale_cache,
                       const std::string& kv_format, const std::optional<Tensor>& key_positions,
                       const std::optional<Tensor>& rope_cos_sin, bool rope_interleaved,
                       const std::optional<Tensor>& key_bias) {
  expect_rank(q, "q", 3);
  expect_rank(key_cache, "key_cache", 4);
  expect_rank(block_table, "block_table", 2);
  const int64_t num_heads = q.size(1), num_sequences = block_table.size(0);
  KVBACKEND_CHECK(scores.has_value() != score_cache.has_value(),
                  "scores and score_cache are both given, or neither; one of them takes the sums: pass one");
  with_dtype(q, "q", [&](auto zero) {
    using T = decltype(zero);
    const CacheArguments keys{
        q.scalar_type(), key_cache,     "key_cache",    format_pair(kv_format).first, true, k_scale,
        "k_scale",       k_scale_cache, "k_scale_cache"};
    const PagedSource<T> source(q, keys, std::nullopt, {key_positions, rope_cos_sin, rope_interleaved, key_bias});
    const int64_t num_blocks = key_cache.size(0), block_size = key_cache.size(1), kv_heads = source.kv_heads();
    const Tensor& sums = scores ? *scores : *score_cache;
    expect_dtype(sums, scores ? "scores" : "score_cache", ScalarType::Float);
    if (scores) {
      expect_rank(sums, "scores", 3);
      expect_shape(sums, "scores", {num_sequences, kv_heads, sums.size(2)});
    } else {
      expect_shape(sums, "score_cache", {num_blocks, block_size, kv_heads});
    }
    const Pages pages(block_table, num_blocks, block_size);
    const LogitRule rule{static_cast<float>(softmax_scale), true, window, static_cast<float>(softcap)};
    std::vector<Sequence> batch = read_batch(pages, seq_lens, cu_seqlens_q, max_seqlen_q, q.size(0));
    keep_last(batch, last_queries);
    if (num_heads == 0 || batch.empty()) return;
    const Plan plan(sizes_of(source), rule, std::move(batch));
    const Norms norms(q.size(0), num_heads, read_sinks(sinks, num_heads));
    attend_to<T>(source, pages, rule, plan, norms);

    const Target target{static_cast<float*>(sums.mutable_data_ptr()),
                        score_cache.has_value(),
                        sums.stride(0),
                        sums.stride(1),
                        sums.stride(2),
                        sums.size(2)};
    const std::vector<Share> shares = make_shares(plan, kv_heads);
    const float factor = static_cast<float>(kv_heads) / static_cast<float>(num_heads);
    share_out<T>(source, pages, rule, std::min<int64_t>(plan.threads, shares.size()), shares.size(),
                 [&](auto& worker, size_t i, Turns&) {
                   std::vector<float> mass(shares[i].heads * kSplit);
                   add_up(worker, plan, shares[i], norms, mass.data());
                   target.add(pages, plan.batch[shares[i].sequence].index, shares[i], mass.data(), factor);
                 });
  });
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_BF16(accumulate_scores)
