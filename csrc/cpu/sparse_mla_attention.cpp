// Absorbed MLA over the tokens that were selected for each query. A query is a sequence of its own here, and what was
// selected for it are its keys: the next tile's rows, wherever they lie, are fetched while one is attended to.
#include "latent.h"
#include "record_rows.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

// Which rows each query has selected.
class Selected {
 public:
  Selected(const Tensor& topk_indices, const Tensor& block_table, int64_t num_blocks, int64_t block_size)
      : positions_(topk_indices, "topk_indices"),
        table_(block_table, "block_table"),
        num_blocks_(num_blocks),
        block_size_(block_size),
        sequence_(topk_indices.size(0), -1),
        last_(topk_indices.size(0), -1) {}

  // Queries of a sequence, at the end of its `length` tokens: as sequences of `topk` keys each.
  void add(const Sequence& sequence, bool causal, int64_t topk, std::vector<Sequence>& queries) {
    for (int64_t i = 0; i < sequence.queries; ++i) {
      const int64_t token = sequence.first_token + i, own = sequence.start + i;
      if (own < 0) continue;
      sequence_[token] = sequence.index;
      last_[token] = causal ? own : sequence.length - 1;
      queries.push_back({token, token, 1, topk, 0});
    }
  }

  // function(index, 1, block, slot) for each selected token that exists among those of index [begin, end).
  template <class F>
  void visit_runs(int64_t query, int64_t begin, int64_t end, F&& function) const {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t position = positions_(query, index);
      if (position < 0 || position > last_[query]) continue;
      const int64_t column = position / block_size_, block = table_(sequence_[query], column);
      if (block >= 0 && block < num_blocks_) function(index, 1, block, position - column * block_size_);
    }
  }

 private:
  Ids positions_, table_;
  int64_t num_blocks_, block_size_;
  std::vector<int64_t> sequence_, last_;  // of each query: row of block_table, and the last position that it sees
};

// Latent rows packed as records with codes of 8 bits, a scale for each group of them, and a bfloat16 rotary part.
template <class T>
class RecordSource {
 public:
  static constexpr bool kValuesAreKeys = true;
  static constexpr bool kInPlace = false;

  RecordSource(const Tensor& q_nope, const Tensor& q_pe, const RecordPages& pages, const Record& record)
      : heads_(q_nope.size(1)),
        q_nope_(q_nope),
        q_pe_(q_pe),
        pages_(pages),
        codes_(*record.field("codes")),
        scales_(*record.field("scales")),
        rope_(*record.field("rope")),
        scale_values_(scales_),
        span_(codes_.count() / scale_values_.count()),
        bytes_(record.plane_bytes[0]) {}

  int64_t heads() const { return heads_; }
  int64_t kv_heads() const { return 1; }
  int64_t dim() const { return q_nope_.size + q_pe_.size; }
  int64_t value_dim() const { return q_nope_.size; }
  bool stored() const { return true; }

  template <class E>
  void load_query(int64_t token, int64_t head, E* out) const {
    q_nope_.load(token * q_nope_.first + head * q_nope_.second, out);
    q_pe_.load(token * q_pe_.first + head * q_pe_.second, out + q_nope_.size);
  }

  bool in_order() const { return true; }
  int64_t position(int64_t /*block*/, int64_t /*slot*/) const { return 0; }
  void locate(Keys&, int64_t, int64_t) const {}
  const CachedRows<T>& keys() const { return none_; }
  const CachedRows<T>& values() const { return none_; }

  // With T's tiles, numbers are rounded to bfloat16; exact where scales are powers of two.
  template <class E>
  void load_key(const Keys& keys, int64_t n, int64_t /*head*/, RowBuffer&, E* out) const {
    if constexpr (std::is_same_v<E, exact_bf16>) {
      read(keys, n, reinterpret_cast<bf16*>(out));
    } else {
      read(keys, n, out);
    }
  }
  template <class E>
  void load_value(const Keys&, int64_t, int64_t, RowBuffer&, E*) const {}

  StoredRows<T> part(const Keys&, int) const { return {}; }

  void prefetch(const Keys& keys, const Wanted& wanted, Prefetcher& ahead) const {
    for (int64_t n = wanted.first; n < wanted.last; ++n) ahead.add(pages_.row(0, keys.block[n], keys.slot[n]), bytes_);
  }

  bool bias(const Keys&, int64_t, float*) const { return false; }

  static constexpr int64_t kMostSpans = 16;

 private:
  template <class E>
  void read(const Keys& keys, int64_t n, E* out) const {
    const auto field = [&](const Field& at) { return pages_.at(at, keys.block[n], keys.slot[n]); };
    const e4m3* codes = reinterpret_cast<const e4m3*>(field(codes_));
    float scales[kMostSpans];
    scale_values_.read(field(scales_), scales);
    for (int64_t i = 0; i < scale_values_.count(); ++i) expand(codes + i * span_, span_, scales[i], out + i * span_);
    load_row(reinterpret_cast<const bf16*>(field(rope_)), 1, q_pe_.size, out + q_nope_.size);
  }

  int64_t heads_;
  QueryRows<T> q_nope_, q_pe_;
  CachedRows<T> none_;  // records are neither read in place nor have a factor
  const RecordPages& pages_;
  const Field &codes_, &scales_, &rope_;
  const RecordScales scale_values_;
  const int64_t span_, bytes_;
};

void expect_record(const Record& record, const Tensor& q_nope, const Tensor& q_pe) {
  const Field& codes = *record.field("codes");
  const Field* rope = record.field("rope");
  KVBACKEND_CHECK(
      codes.holds("float8_e4m3fn") && rope && rope->holds("bfloat16") && record.plane_bytes[1] == 0 &&
          record.field("scales")->count() <= RecordSource<float>::kMostSpans,
      "kv_format is '", record.name,
      "'; the CPU kernel reads records of one plane with E4M3 codes and a bfloat16 rotary part: choose one");
  KVBACKEND_CHECK(codes.count() == q_nope.size(2) && rope->count() == q_pe.size(2), "kv_format is '", record.name,
                  "' with rows of ", codes.count(), " and ", rope->count(), " numbers; q_nope and q_pe have ",
                  q_nope.size(2), " and ", q_pe.size(2), ": pass queries of that model");
}

}  // namespace

std::tuple<Tensor, Tensor> sparse_mla_attention(const Tensor& q_nope, const Tensor& q_pe, const Tensor& ckv_cache,
                                                const std::optional<Tensor>& kpe_cache, const Tensor& block_table,
                                                const Tensor& seq_lens, const Tensor& cu_seqlens_q,
                                                int64_t max_seqlen_q, const Tensor& topk_indices, double softmax_scale,
                                                bool causal, const std::string& kv_format, int64_t block_size,
                                                bool return_lse) {
  expect_rank(q_nope, "q_nope", 3);
  expect_rank(q_pe, "q_pe", 3);
  expect_rank(block_table, "block_table", 2);
  expect_rank(topk_indices, "topk_indices", 2);
  const int64_t num_tokens = q_nope.size(0), topk = topk_indices.size(1), num_blocks = ckv_cache.size(0);
  expect_shape(q_pe, "q_pe", {num_tokens, q_nope.size(1), q_pe.size(2)});
  expect_shape(topk_indices, "topk_indices", {num_tokens, topk});
  expect_dtype(q_pe, "q_pe", q_nope.scalar_type());
  std::optional<RecordPages> records;
  if (kv_format != "auto") {
    const Record& record = record_named(kv_format, "kv_format");
    expect_record(record, q_nope, q_pe);
    records.emplace(ckv_cache, "ckv_cache", record, block_size);
    block_size = records->block_size();
  } else {
    expect_rank(ckv_cache, "ckv_cache", 3);
    block_size = ckv_cache.size(1);
    KVBACKEND_CHECK(kpe_cache.has_value(), "kpe_cache is None; kv_format 'auto' has it apart: pass it");
    expect_shape(ckv_cache, "ckv_cache", {num_blocks, block_size, q_nope.size(2)});
    expect_shape(*kpe_cache, "kpe_cache", {num_blocks, block_size, q_pe.size(2)});
    expect_dtype(ckv_cache, "ckv_cache", q_nope.scalar_type());
    expect_dtype(*kpe_cache, "kpe_cache", q_nope.scalar_type());
  }
  Selected selected(topk_indices, block_table, num_blocks, block_size);
  std::vector<Sequence> queries;
  const Pages pages(block_table, num_blocks, block_size);
  for (const Sequence& sequence : read_batch(pages, seq_lens, cu_seqlens_q, max_seqlen_q, num_tokens)) {
    if (topk > 0) selected.add(sequence, causal, topk, queries);
  }
  const LogitRule rule{static_cast<float>(softmax_scale), false, -1, 0.0f};
  std::tuple<Tensor, Tensor> result;
  with_dtype(q_nope, "q_nope", [&](auto zero) {
    using T = decltype(zero);
    if (records) {
      const RecordSource<T> source(q_nope, q_pe, *records, record_named(kv_format, "kv_format"));
      result = attend<T>(source, selected, rule, std::move(queries), q_nope, {}, return_lse);
    } else {
      const LatentSource<T> source(q_nope, q_pe, plain_cache(q_nope, ckv_cache, "ckv_cache"),
                                   plain_cache(q_nope, *kpe_cache, "kpe_cache"));
      result = attend<T>(source, selected, rule, std::move(queries), q_nope, {}, return_lse);
    }
  });
  return result;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_BF16(sparse_mla_attention)
