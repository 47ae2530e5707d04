// Logits of the tokens in pages that were chosen: attention's loops score them where they lie, in any format.
#include "middle.h"
#include "paged_source.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

// Which rows the pages of each query and kv head name.
class TokensOfPages : public Choices {
 public:
  using Choices::Choices;

  // function(index, count, block, slot) for tokens that exist and are scored among those of index [begin, end).
  template <class F>
  void visit_runs(int64_t pair, int64_t begin, int64_t end, F&& function) const {
    const int64_t token = pair / kv_heads_, size = middle_.page_size, pages = middle_.end(position(token)) / size;
    for (int64_t index = begin, stop; index < end; index = stop) {
      const int64_t at = index / size, page = chosen(pair, at);
      stop = std::min(end, (at + 1) * size);
      if (page < 0 || page >= pages) continue;
      const int64_t first = std::max(page * size + index - at * size, middle_.num_sinks);
      const int64_t skipped = first - (page * size + index - at * size);
      visit_tokens(token, first, stop - index - skipped, index + skipped, function);
    }
  }
};

// row [columns] becomes the largest of what it is and of the scores of the task's query heads.
template <class Worker>
void keep_largest(Worker& worker, const Task& task, const Sequence& query, float* row) {
  worker.begin(task, query);
  worker.walk([&](const Keys& keys, int64_t) {
    for (int64_t n = 0; n < keys.count; ++n) {
      float largest = row[keys.index[n]];
      for (int64_t member = 0; member < task.members; ++member) largest = larger(largest, worker.score_at(n, member));
      row[keys.index[n]] = largest;
    }
  });
}

}  // namespace

Tensor token_logits(const Tensor& q, const Tensor& key_cache, const Tensor& block_table, const Tensor& seq_lens,
                    const Tensor& cu_seqlens_q, int64_t max_seqlen_q, const Tensor& pages, int64_t page_size,
                    int64_t num_sinks, int64_t num_recent, const std::optional<Tensor>& k_scale,
                    const std::optional<Tensor>& k_scale_cache, const std::string& kv_format) {
  expect_rank(q, "q", 3);
  expect_rank(key_cache, "key_cache", 4);
  expect_rank(block_table, "block_table", 2);
  expect_rank(pages, "pages", 3);
  const int64_t num_tokens = q.size(0), kv_heads = key_cache.size(2), block_size = key_cache.size(1);
  expect_shape(pages, "pages", {num_tokens, kv_heads, pages.size(2)});
  const Middle middle(page_size, num_sinks, num_recent);
  const int64_t columns = pages.size(2) * page_size;
  Tensor out = new_result(q, {num_tokens, kv_heads, columns}, ScalarType::Float);
  float* scores = static_cast<float*>(out.mutable_data_ptr());
  std::fill_n(scores, num_tokens * kv_heads * columns, -kInfinity);
  TokensOfPages tokens(pages, "pages", middle, block_table, key_cache.size(0), block_size);
  const Pages in_table(block_table, key_cache.size(0), block_size);
  std::vector<Sequence> pairs;
  for (const Sequence& sequence : read_batch(in_table, seq_lens, cu_seqlens_q, max_seqlen_q, num_tokens)) {
    tokens.add(sequence);
    for (int64_t token = sequence.first_token; token < sequence.first_token + sequence.queries; ++token) {
      for (int64_t head = 0; head < kv_heads && middle.end(tokens.position(token)) > num_sinks; ++head)
        pairs.push_back({token * kv_heads + head, token, 1, columns, 0});
    }
  }
  with_dtype(q, "q", [&](auto zero) {
    using T = decltype(zero);
    const CacheArguments keys{
        q.scalar_type(), key_cache,     "key_cache",    format_pair(kv_format).first, true, k_scale,
        "k_scale",       k_scale_cache, "k_scale_cache"};
    const PagedSource<T> source(q, keys, std::nullopt, {{}, {}, false, {}});
    // Parallel over pairs and ranges of up to kSplit of their tokens, which meet all query heads, kRows at a time.
    const int64_t group = source.heads() / kv_heads, parts = (columns + kSplit - 1) / kSplit;
    const int64_t units = static_cast<int64_t>(pairs.size()) * parts;
    const int64_t work = units * std::min(columns, kSplit) * q.size(2) * std::max<int64_t>(8, group);
    const int64_t threads = std::min<int64_t>({torch::stable::get_num_threads(), units, work / kThreadWork + 1});
    share_out<T>(source, tokens, {1.0f, false, -1, 0.0f}, threads, units, [&](auto& worker, int64_t unit, Turns&) {
      const Sequence& pair = pairs[unit / parts];
      const int64_t begin = unit % parts * kSplit, end = std::min(begin + kSplit, columns);
      for (int64_t member = 0; member < group; member += kRows) {
        const int64_t members = std::min(kRows, group - member);
        const Task task{unit / parts, 0, 1, pair.index % kv_heads, 1, member, members, begin, end, -1};
        keep_largest(worker, task, pair, scores + pair.index * columns);
      }
    });
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_BF16(token_logits)
