// Attention over the tokens that each query's kv heads chose, the first ones and the last ones, where they lie.
#include "middle.h"
#include "paged_source.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

// A pair's keys: the first tokens, what was chosen of the middle, and the last tokens.
class TokensInUse : public Choices {
 public:
  TokensInUse(const Tensor& topk_indices, const Middle& middle, const Tensor& block_table, int64_t num_blocks,
              int64_t block_size)
      : Choices(topk_indices, "topk_indices", middle, block_table, num_blocks, block_size),
        topk_(topk_indices.size(2)) {}

  int64_t first(int64_t token) const { return std::min(middle_.num_sinks, position(token) + 1); }
  int64_t last(int64_t token) const { return std::max(middle_.end(position(token)), first(token)); }  // from here on
  int64_t count(int64_t token) const { return first(token) + topk_ + position(token) + 1 - last(token); }

  // function(index, count, block, slot) for keys that exist among those of index [begin, end).
  template <class F>
  void visit_runs(int64_t pair, int64_t begin, int64_t end, F&& function) const {
    const int64_t token = pair / kv_heads_, sinks = first(token), recent = last(token), chosen_end = sinks + topk_;
    if (begin < sinks) visit_tokens(token, begin, std::min(end, sinks) - begin, begin, function);
    for (int64_t index = std::max(begin, sinks); index < std::min(end, chosen_end); ++index) {
      const int64_t at = chosen(pair, index - sinks);
      if (at >= sinks && at < recent) visit_tokens(token, at, 1, index, function);
    }
    const int64_t from = std::max(begin, chosen_end);
    if (from < end) visit_tokens(token, recent + from - chosen_end, end - from, from, function);
  }

 private:
  int64_t topk_;
};

}  // namespace

std::tuple<Tensor, Tensor> sparse_attention(
    const Tensor& q, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
    const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t max_seqlen_q, const Tensor& topk_indices,
    double softmax_scale, int64_t page_size, int64_t num_sinks, int64_t num_recent, double softcap,
    const std::optional<Tensor>& sinks, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    const std::optional<Tensor>& k_scale_cache, const std::optional<Tensor>& v_scale_cache,
    const std::string& kv_format, bool return_lse) {
  expect_rank(q, "q", 3);
  expect_rank(key_cache, "key_cache", 4);
  expect_rank(value_cache, "value_cache", 4);
  expect_rank(block_table, "block_table", 2);
  expect_rank(topk_indices, "topk_indices", 3);
  const int64_t num_tokens = q.size(0), kv_heads = key_cache.size(2), block_size = key_cache.size(1);
  expect_shape(topk_indices, "topk_indices", {num_tokens, kv_heads, topk_indices.size(2)});
  const Middle middle(page_size, num_sinks, num_recent);
  TokensInUse tokens(topk_indices, middle, block_table, key_cache.size(0), block_size);
  const Pages in_table(block_table, key_cache.size(0), block_size);
  std::vector<Sequence> pairs;
  int64_t keys_in_all = 0;
  for (const Sequence& sequence : read_batch(in_table, seq_lens, cu_seqlens_q, max_seqlen_q, num_tokens)) {
    tokens.add(sequence);
    for (int64_t token = sequence.first_token; token < sequence.first_token + sequence.queries; ++token) {
      if (tokens.position(token) < 0) continue;
      for (int64_t head = 0; head < kv_heads; ++head) {
        pairs.push_back({token * kv_heads + head, token, 1, tokens.count(token), 0});
        keys_in_all += pairs.back().length;
      }
    }
  }
  std::tuple<Tensor, Tensor> result;
  with_dtype(q, "q", [&](auto zero) {
    using T = decltype(zero);
    const auto [key_format, value_format] = format_pair(kv_format);
    const CacheArguments keys{q.scalar_type(), key_cache, "key_cache",   key_format,     true,
                              k_scale,         "k_scale", k_scale_cache, "k_scale_cache"};
    const CacheArguments values{q.scalar_type(), value_cache, "value_cache", value_format,   false,
                                v_scale,         "v_scale",   v_scale_cache, "v_scale_cache"};
    const PagedSource<T> source(q, keys, values, {{}, {}, false, {}});
    const Output<T> output(q, source.heads(), source.value_dim(), read_sinks(sinks, q.size(1)), return_lse);
    // Parallel over pairs, whose query heads read its keys once, kRows at a time.
    const int64_t group = source.heads() / kv_heads, units = static_cast<int64_t>(pairs.size());
    const int64_t work = keys_in_all * (source.dim() + source.value_dim()) * std::max<int64_t>(8, group);
    const int64_t threads = std::min<int64_t>({torch::stable::get_num_threads(), units, work / kThreadWork + 1});
    const LogitRule rule{static_cast<float>(softmax_scale), false, -1, static_cast<float>(softcap)};
    const auto task_of = [&](int64_t unit, int64_t member) {
      const int64_t head = pairs[unit].index % kv_heads, members = std::min(kRows, group - member);
      return Task{unit, 0, 1, head, 1, member, members, 0, pairs[unit].length, -1};
    };
    share_out<T>(source, tokens, rule, threads, units, [&](auto& worker, int64_t unit, Turns& turns) {
      for (int64_t member = 0; member < group; member += kRows) {
        const auto upcoming = [&]() -> Upcoming {
          if (member + kRows < group) return {};  // the keys at hand once more
          const auto next = static_cast<int64_t>(turns.upcoming());
          if (next == units) return {};
          return {task_of(next, 0), &pairs[next]};
        };
        worker.run(task_of(unit, member), pairs[unit], upcoming,
                   [&](int64_t token, int64_t head, float peak, float total, float* out) {
                     output.write(token, head, peak, total, out);
                   });
      }
    });
    result = {output.out, output.lse};
  });
  return result;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_BF16(sparse_attention)
