// Bounds of the logits inside pages of tokens, from the smallest and largest number of each channel.
#include "attention_loops.h"
#include "middle.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

constexpr int64_t kMembers = 4;  // query heads that meet a page's bounds at once
constexpr int64_t kAhead = 4;    // pages that are fetched before they are scored

// What a call reads bounds from.
template <class T>
struct Bounds {
  explicit Bounds(const Tensor& cache)
      : data(static_cast<const T*>(cache.const_data_ptr())),
        block(cache.stride(0)),
        slot(cache.stride(1)),
        head(cache.stride(2)),
        step(cache.stride(3)) {}

  const T* row(int64_t in_block, int64_t in_slot, int64_t kv_head) const {
    return data + in_block * block + in_slot * slot + kv_head * head;
  }

  const T* data;
  int64_t block, slot, head, step;
};

// Of kMembers query heads q [kMembers, dim], the sums over dims of q * high, or of q * low where q is negative; the
// largest of the first `count`. dim is a multiple of kLanes.
template <class E>
inline float bound(const E* low, const E* high, const float* q, int64_t dim, int64_t count) {
  Vec sums[kMembers] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec most = load(high + d), least = load(low + d);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kMembers; ++i) {
      const Vec factor = load(q + i * dim + d);
      sums[i] += factor * (factor < 0.0f ? least : most);
    }
  }
  const Quad sum = sum_lanes(sums[0], sums[1], sums[2], sums[3]);
  float largest = sum[0];
  for (int64_t i = 1; i < count; ++i) largest = larger(largest, sum[i]);
  return largest;
}

// A thread's own: one query's heads, and bounds that cannot be read where they lie.
template <class T>
class PageScorer {
 public:
  PageScorer(const Tensor& q, const Tensor& low_cache, const Tensor& high_cache)
      : q_(q),
        low_(low_cache),
        high_(high_cache),
        kv_heads_(low_cache.size(2)),
        group_(q.size(1) / kv_heads_),
        rows_(round_up(group_, kMembers)),
        size_(q.size(2)),
        dim_(round_up(size_, kLanes)),
        in_place_(low_.step == 1 && high_.step == 1 && size_ == dim_),
        queries_(kv_heads_ * rows_ * dim_),
        low_row_(dim_),
        high_row_(dim_) {}

  void start(int64_t token) {
    const T* data = static_cast<const T*>(q_.const_data_ptr()) + token * q_.stride(0);
    for (int64_t head = 0; head < q_.size(1); ++head) {
      const int64_t row = (head / group_ * rows_ + head % group_) * dim_;
      load_row(data + head * q_.stride(1), q_.stride(2), size_, &queries_[row]);
    }
  }

  void prefetch(int64_t block, int64_t slot, int64_t head) const {
    const char *low = reinterpret_cast<const char*>(low_.row(block, slot, head)),
               *high = reinterpret_cast<const char*>(high_.row(block, slot, head));
    for (int64_t at = 0; at < size_ * static_cast<int64_t>(sizeof(T)); at += kLine) {
      __builtin_prefetch(low + at);
      __builtin_prefetch(high + at);
    }
  }

  float score(int64_t block, int64_t slot, int64_t head) {
    const T *low = low_.row(block, slot, head), *high = high_.row(block, slot, head);
    if (in_place_) return score(low, high, head);
    load_row(low, low_.step, size_, low_row_.data());
    load_row(high, high_.step, size_, high_row_.data());
    return score(low_row_.data(), high_row_.data(), head);
  }

 private:
  template <class E>
  float score(const E* low, const E* high, int64_t head) const {
    float largest = -kInfinity;
    for (int64_t member = 0; member < group_; member += kMembers) {
      const int64_t row = (head * rows_ + member) * dim_, count = std::min(kMembers, group_ - member);
      largest = larger(largest, bound(low, high, &queries_[row], dim_, count));
    }
    return largest;
  }

  const Tensor& q_;
  const Bounds<T> low_, high_;
  const int64_t kv_heads_, group_, rows_, size_, dim_;  // query heads and dims, rounded up too
  const bool in_place_;
  std::vector<float> queries_;  // [kv_heads, rows, dim]
  std::vector<float> low_row_, high_row_;
};

struct Place {  // of a page's bounds
  int64_t page, block, slot;
};

struct Stretch {  // of a sequence's pages
  int64_t sequence, begin, end;
};

}  // namespace

Tensor page_logits(const Tensor& q, const Tensor& low_cache, const Tensor& high_cache, const Tensor& block_table,
                   const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t max_seqlen_q, int64_t page_size,
                   int64_t num_sinks, int64_t num_recent) {
  expect_rank(q, "q", 3);
  expect_rank(low_cache, "low_cache", 4);
  expect_rank(block_table, "block_table", 2);
  const int64_t num_tokens = q.size(0), kv_heads = low_cache.size(2);
  expect_shape(low_cache, "low_cache", {low_cache.size(0), low_cache.size(1), kv_heads, q.size(2)});
  expect_shape(high_cache, "high_cache", {low_cache.size(0), low_cache.size(1), kv_heads, q.size(2)});
  expect_dtype(low_cache, "low_cache", q.scalar_type());
  expect_dtype(high_cache, "high_cache", q.scalar_type());
  KVBACKEND_CHECK(kv_heads > 0 && q.size(1) % kv_heads == 0, "q has ", q.size(1), " heads and low_cache ", kv_heads,
                  "; the first must be a multiple of the second: pass the heads of one rank together");
  const Middle middle(page_size, num_sinks, num_recent);
  const Pages pages(block_table, low_cache.size(0), low_cache.size(1));
  const int64_t columns = pages.capacity();
  Tensor out = new_result(q, {num_tokens, kv_heads, columns}, ScalarType::Float);
  float* scores = static_cast<float*>(out.mutable_data_ptr());
  std::fill_n(scores, num_tokens * kv_heads * columns, -kInfinity);
  const auto batch = read_batch(pages, seq_lens, cu_seqlens_q, max_seqlen_q, num_tokens, page_size);
  std::vector<Stretch> stretches;
  for (int64_t i = 0; i < static_cast<int64_t>(batch.size()); ++i) {
    const int64_t end = middle.end(batch[i].length - 1) / page_size;  // of the last query
    for (int64_t begin = num_sinks / page_size; begin < end; begin += kTile)
      stretches.push_back({i, begin, std::min(begin + kTile, end)});
  }
  with_dtype(q, "q", [&](auto zero) {
    // Parallel over stretches of pages, whose bounds stay in L2 for all queries of their sequence.
    const int64_t bytes = kTile * kv_heads * q.size(2) * 4;
    torch::stable::parallel_for(0, stretches.size(), grain(bytes), [&](int64_t from, int64_t to) {
      PageScorer<decltype(zero)> scorer(q, low_cache, high_cache);
      Place places[kTile];
      for (int64_t i = from; i < to; ++i) {
        const Stretch& stretch = stretches[i];
        const Sequence& sequence = batch[stretch.sequence];
        for (int64_t query = 0; query < sequence.queries; ++query) {
          const int64_t token = sequence.first_token + query;
          const int64_t end = std::min(stretch.end, middle.end(sequence.start + query) / page_size);
          if (stretch.begin >= end) continue;
          scorer.start(token);
          int64_t count = 0;
          pages.visit(sequence.index, stretch.begin, end,
                      [&](int64_t page, int64_t block, int64_t slot) { places[count++] = {page, block, slot}; });
          for (int64_t n = 0; n < count; ++n) {
            const Place &place = places[n], &next = places[std::min(n + kAhead, count - 1)];
            for (int64_t head = 0; head < kv_heads; ++head) {
              scorer.prefetch(next.block, next.slot, head);
              scores[(token * kv_heads + head) * columns + place.page] = scorer.score(place.block, place.slot, head);
            }
          }
        }
      }
    });
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(page_logits)
