// Attention over a window of recent rows and over compressed rows, each key and value of every head. What a query sees
// is a list of rows; to the loops of attention.h that is a sequence of its own, in blocks of one row.
#include "attention.h"
#include "codes.h"
#include "records.h"
#include "rope.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

// ---------------------------------------------------------------------------------------------------------------- rows

constexpr int64_t kMostScales = 64;  // of a row

// code * scale; the channels of a scale are a multiple of 16 in every record.
template <class Code, class E>
void decode_record(const uint8_t* codes, int64_t size, const float* scales, int64_t count, E* out) {
  const Code* code = reinterpret_cast<const Code*>(codes);
  for (int64_t i = 0; i < size; i += kLanes)
    store(out + i, load(code + i / kPerByte<Code>) * broadcast(scales[i * count / size]));
}

// Pages [nb, bs, D] of numbers, or [nb, page_bytes] of records, as one long list of rows.
template <class T>
class RowPages {
 public:
  RowPages(const Tensor& pages, const char* name, const std::string& format, int64_t dim, ScalarType dtype)
      : data_(static_cast<const uint8_t*>(pages.const_data_ptr())), dim_(dim), block_stride_(pages.stride(0)) {
    if (format == "auto") {
      expect_rank(pages, name, 3);
      expect_dtype(pages, name, dtype);
      block_size = pages.size(1);
      expect_shape(pages, name, {pages.size(0), block_size, dim});
      row_stride_ = pages.stride(1);
      stride_ = pages.stride(2);
    } else {
      record_ = &record_named(format, name);
      expect_rank(pages, name, 2);
      expect_dtype(pages, name, ScalarType::Byte);
      block_size = pages.size(1) / record_->row_bytes();
      codes_ = record_->field("codes"), scales_ = record_->field("scales"), rope_ = record_->field("rope");
      pairs_ = !std::strcmp(codes_->dtype, "uint8");
      coded_ = codes_->bytes * (pairs_ ? 2 : 1);
      const int64_t plain = rope_ ? rope_->bytes / static_cast<int64_t>(sizeof(bf16)) : 0;
      KVBACKEND_CHECK(coded_ + plain == dim && pages.size(1) == record_->page_bytes(block_size) && pages.stride(1) == 1,
                      name, " holds no dense pages of ", format, " for rows of ", dim, " numbers: pass such pages");
    }
    num_blocks = pages.size(0);
  }

  int64_t rows() const { return num_blocks * block_size; }

  // Row `index` of the blocks of a table's row; -1 where there is none.
  int64_t find(const Ids& table, int64_t columns, int64_t sequence, int64_t index) const {
    const int64_t column = index / block_size;
    if (column >= columns) return -1;
    const int64_t block = table(sequence, column);
    return block < 0 || block >= num_blocks ? -1 : block * block_size + index % block_size;
  }

  template <class E>
  void load(int64_t row, E* out) const {
    if (!record_) return load_row(plain(row), stride_, dim_, out);
    float scales[kMostScales];
    const int64_t count = read_scales(field(row, *scales_), scales);
    if (pairs_) {
      decode_record<e2m1x2>(field(row, *codes_), coded_, scales, count, out);
    } else {
      decode_record<e4m3>(field(row, *codes_), coded_, scales, count, out);
    }
    if (rope_) load_row(reinterpret_cast<const bf16*>(field(row, *rope_)), 1, dim_ - coded_, out + coded_);
  }

  void prefetch(int64_t row, Prefetcher& ahead) const {
    if (!record_) return ahead.add(plain(row), dim_ * sizeof(T));
    ahead.add(data_ + row / block_size * block_stride_ + record_->start(block_size, row % block_size, 0),
              record_->plane_bytes[0]);
  }

  int64_t num_blocks, block_size;

 private:
  const T* plain(int64_t row) const {
    return reinterpret_cast<const T*>(data_) + row / block_size * block_stride_ + row % block_size * row_stride_;
  }

  const uint8_t* field(int64_t row, const Field& field) const {
    const int64_t start = record_->start(block_size, row % block_size, field.plane);
    return data_ + row / block_size * block_stride_ + start + field.offset;
  }

  int64_t read_scales(const uint8_t* bytes, float* out) const {
    const auto read = [&](auto zero) {
      const int64_t count = scales_->bytes / static_cast<int64_t>(sizeof zero);
      load_row(reinterpret_cast<const decltype(zero)*>(bytes), 1, std::min(count, kMostScales), out);
      return count;
    };
    if (!std::strcmp(scales_->dtype, "float8_e8m0fnu")) return read(e8m0{});
    if (!std::strcmp(scales_->dtype, "float8_e4m3fn")) return read(e4m3{});
    if (!std::strcmp(scales_->dtype, "bfloat16")) return read(bf16{});
    return read(float{});
  }

  const uint8_t* data_;
  int64_t dim_, block_stride_, row_stride_ = 0, stride_ = 1, coded_ = 0;
  const Record* record_ = nullptr;
  const Field *codes_ = nullptr, *scales_ = nullptr, *rope_ = nullptr;
  bool pairs_ = false;
};

// The rows that a call can name: those of the window's pages, then those it brings, then compressed ones.
template <class T>
struct AllRows {
  RowPages<T> window;
  std::optional<RowPages<T>> entries;
  const T* kv;  // rows of the call's tokens, or none
  int64_t num_tokens, kv_token, kv_stride, dim;

  int64_t first_new() const { return window.rows(); }
  int64_t first_entry() const { return window.rows() + num_tokens; }
  int64_t count() const { return first_entry() + (entries ? entries->rows() : 0); }

  template <class E>
  void load(int64_t id, E* out) const {
    if (id < first_new()) return window.load(id, out);
    if (id < first_entry()) return load_row(kv + (id - first_new()) * kv_token, kv_stride, dim, out);
    entries->load(id - first_entry(), out);
  }

  void prefetch(int64_t id, Prefetcher& ahead) const {
    if (id < first_new()) return window.prefetch(id, ahead);
    if (id < first_entry()) return ahead.add(kv + (id - first_new()) * kv_token, dim * sizeof(T));
    entries->prefetch(id - first_entry(), ahead);
  }
};

template <class T>
class ListedSource {
 public:
  static constexpr bool kValuesAreKeys = true;
  static constexpr bool kInPlace = false;

  ListedSource(const Tensor& q, const AllRows<T>& rows)
      : rows_(rows),
        q_(static_cast<const T*>(q.const_data_ptr())),
        heads_(q.size(1)),
        dim_(q.size(2)),
        q_token_(q.stride(0)),
        q_head_(q.stride(1)),
        q_stride_(q.stride(2)) {}

  int64_t heads() const { return heads_; }
  int64_t kv_heads() const { return 1; }
  int64_t dim() const { return dim_; }
  int64_t value_dim() const { return dim_; }
  bool stored() const { return true; }  // or codes that are exact in bfloat16
  bool in_order() const { return true; }
  int64_t position(int64_t /*block*/, int64_t /*slot*/) const { return 0; }
  void locate(Keys&, int64_t, int64_t) const {}
  const CachedRows<T>& keys() const { return none_; }
  const CachedRows<T>& values() const { return none_; }

  template <class E>
  void load_query(int64_t token, int64_t head, E* out) const {
    load_row(q_ + token * q_token_ + head * q_head_, q_stride_, dim_, out);
  }
  template <class E>
  void load_key(const Keys& keys, int64_t n, int64_t /*head*/, RowBuffer&, E* out) const {
    if constexpr (std::is_same_v<E, exact_bf16>) {
      rows_.load(keys.block[n], reinterpret_cast<bf16*>(out));
    } else {
      rows_.load(keys.block[n], out);
    }
  }
  template <class E>
  void load_value(const Keys&, int64_t, int64_t, RowBuffer&, E*) const {}

  StoredRows<T> part(const Keys&, int) const { return {}; }

  void prefetch(const Keys& keys, const Wanted& wanted, Prefetcher& ahead) const {
    for (int64_t n = wanted.first; n < wanted.last; ++n) rows_.prefetch(keys.block[n], ahead);
  }
  bool bias(const Keys&, int64_t, float*) const { return false; }

 private:
  const AllRows<T>& rows_;
  CachedRows<T> none_;  // rows of several places are neither read in place nor have a factor
  const T* q_;
  int64_t heads_, dim_, q_token_, q_head_, q_stride_;
};

// -------------------------------------------------------------------------------------------------------- the queries

struct Query {
  int64_t sequence, position, start, length, first_token;  // start: position of the call's first token
};

std::vector<Query> read_queries(const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t max_seqlen_q,
                                int64_t num_tokens) {
  const Ids lengths(seq_lens, "seq_lens"), offsets(cu_seqlens_q, "cu_seqlens_q");
  KVBACKEND_CHECK(offsets[0] == 0, "cu_seqlens_q starts with ", offsets[0],
                  "; it is the running sum of lengths and must start with 0: prepend a 0");
  std::vector<Query> queries(num_tokens, Query{0, -1, 0, 0, 0});
  for (int64_t i = 0; i < seq_lens.size(0); ++i) {
    const int64_t first = std::clamp<int64_t>(offsets[i], 0, num_tokens);
    const int64_t count = std::max(offsets[i + 1], first) - first;  // more than q has, where it lacks some
    const int64_t length = std::max<int64_t>(lengths[i], 0), start = length - count;
    for (int64_t n = 0; n < std::min({count, num_tokens - first, max_seqlen_q}); ++n)
      queries[first + n] = {i, start + n, start, length, first};
  }
  return queries;
}

// Results are turned back before they are rounded.
template <class T>
class TurnedOutput final : public Results {
 public:
  TurnedOutput(const Output<T>& output, const std::vector<float>& angles, int64_t rotary_dim, int64_t dim)
      : output_(output), angles_(angles), rotary_dim_(rotary_dim), dim_(dim) {}

  void write(int64_t token, int64_t head, float peak, float total, float* values) const override {
    if (rotary_dim_) rotate(values + dim_ - rotary_dim_, angles_.data() + token * rotary_dim_, rotary_dim_, true);
    output_.write(token, head, peak, total, values);
  }

 private:
  const Output<T>& output_;
  const std::vector<float>& angles_;  // of each token, or none
  int64_t rotary_dim_, dim_;
};

}  // namespace

std::tuple<Tensor, Tensor> shared_kv_attention(const Tensor& q, const Tensor& window_cache, const Tensor& window_table,
                                               const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t max_seqlen_q,
                                               double softmax_scale, int64_t window, const std::optional<Tensor>& kv,
                                               const std::optional<Tensor>& compressed_cache,
                                               const std::optional<Tensor>& block_table,
                                               const std::optional<Tensor>& topk_indices, int64_t compress_ratio,
                                               const std::string& window_format, const std::string& kv_format,
                                               const std::optional<Tensor>& sinks, const std::optional<Tensor>& cos_sin,
                                               bool return_lse) {
  expect_rank(q, "q", 3);
  expect_rank(window_table, "window_table", 2);
  expect_rank(seq_lens, "seq_lens", 1);
  const int64_t num_tokens = q.size(0), heads = q.size(1), dim = q.size(2), num_seqs = seq_lens.size(0);
  expect_shape(window_table, "window_table", {num_seqs, window_table.size(1)});
  expect_shape(cu_seqlens_q, "cu_seqlens_q", {num_seqs + 1});
  KVBACKEND_CHECK(window >= 1 && compress_ratio >= 1, "window and compress_ratio must be 1 or more: pass the model's");
  if (kv) {
    expect_shape(*kv, "kv", {num_tokens, dim});
    expect_dtype(*kv, "kv", q.scalar_type());
  }
  KVBACKEND_CHECK(compressed_cache.has_value() == block_table.has_value(),
                  "compressed_cache and block_table come together: pass both, or neither");
  KVBACKEND_CHECK(!topk_indices || compressed_cache,
                  "topk_indices is given without compressed_cache; it chooses among "
                  "compressed entries: pass both");
  if (block_table) {
    expect_rank(*block_table, "block_table", 2);
    expect_shape(*block_table, "block_table", {num_seqs, block_table->size(1)});
  }
  if (topk_indices) {
    expect_rank(*topk_indices, "topk_indices", 2);
    expect_shape(*topk_indices, "topk_indices", {num_tokens, topk_indices->size(1)});
  }
  if (sinks) expect_shape(*sinks, "sinks", {heads});
  std::vector<float> sink(sinks ? heads : 0);
  if (sinks) {
    with_dtype(*sinks, "sinks", [&](auto zero) {
      load_row(static_cast<const decltype(zero)*>(sinks->const_data_ptr()), sinks->stride(0), heads, sink.data());
    });
  }
  const std::vector<Query> queries = read_queries(seq_lens, cu_seqlens_q, max_seqlen_q, num_tokens);
  std::optional<RotaryTable> table;
  if (cos_sin) table.emplace(*cos_sin, q.scalar_type(), true);
  const int64_t rotary_dim = table ? table->rotary_dim() : 0;
  KVBACKEND_CHECK(rotary_dim <= dim, "cos_sin rotates more dims than rows have: pass this model's table");
  std::vector<float> angles(num_tokens * rotary_dim);
  for (int64_t token = 0; table && token < num_tokens; ++token) {
    float* own = angles.data() + token * rotary_dim;
    if (!table->load(queries[token].position, own)) std::fill_n(own, rotary_dim / 2, 1.0f);
  }

  const Ids window_blocks(window_table, "window_table");
  std::optional<Ids> blocks, chosen;
  if (block_table) blocks.emplace(*block_table, "block_table");
  if (topk_indices) chosen.emplace(*topk_indices, "topk_indices");

  std::tuple<Tensor, Tensor> result;
  with_dtype(q, "q", [&](auto zero) {
    using T = decltype(zero);
    AllRows<T> rows{RowPages<T>(window_cache, "window_cache", window_format, dim, q.scalar_type()),
                    std::nullopt,
                    kv ? static_cast<const T*>(kv->const_data_ptr()) : nullptr,
                    num_tokens,
                    kv ? kv->stride(0) : 0,
                    kv ? kv->stride(1) : 0,
                    dim};
    if (compressed_cache) rows.entries.emplace(*compressed_cache, "compressed_cache", kv_format, dim, q.scalar_type());

    // The list of each query: [T, width] ids of rows, as the block table of sequences with blocks of one row.
    const int64_t ring = window_table.size(1) * rows.window.block_size;
    KVBACKEND_CHECK(ring >= window - 1, "window_table names ", ring, " rows; the window needs ", window - 1,
                    " earlier ones: give each sequence more blocks");
    int64_t longest = 0, most = 0;
    for (const Query& query : queries) {
      longest = std::max(longest, std::min(window, query.position + 1));
      if (rows.entries) most = std::max(most, (query.position + 1) / compress_ratio);
    }
    if (rows.entries) most = std::min(most, block_table->size(1) * rows.entries->block_size);
    const int64_t width = longest + (topk_indices ? topk_indices->size(1) : most);
    Tensor lists = new_result(q, {num_tokens, width}, ScalarType::Long);
    int64_t* ids = static_cast<int64_t*>(lists.mutable_data_ptr());
    std::vector<int64_t> counts(num_tokens);

    // Parallel over queries.
    torch::stable::parallel_for(0, num_tokens, grain(width * 16), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const Query& query = queries[token];
        int64_t *list = ids + token * width, count = 0;
        const auto add = [&](int64_t first, int64_t row) {
          if (row >= 0) list[count++] = first + row;
        };
        const int64_t written = kv ? std::max<int64_t>(query.start, 0) : query.length;
        for (int64_t p = std::max<int64_t>(query.position - window + 1, 0); p <= query.position; ++p) {
          if (p < written) {
            if (p >= written - ring)
              add(0, rows.window.find(window_blocks, window_table.size(1), query.sequence, p % ring));
          } else {
            add(rows.first_new(), query.first_token + p - query.start);
          }
        }
        const int64_t visible = rows.entries ? std::min((query.position + 1) / compress_ratio, most) : 0;
        const int64_t wanted = topk_indices ? topk_indices->size(1) : visible;
        for (int64_t i = 0; rows.entries && i < wanted; ++i) {
          const int64_t entry = chosen ? (*chosen)(token, i) : i;
          if (entry < 0 || entry >= visible) continue;
          add(rows.first_entry(), rows.entries->find(*blocks, block_table->size(1), query.sequence, entry));
        }
        counts[token] = count;
      }
    });

    std::vector<Sequence> batch;
    for (int64_t token = 0; token < num_tokens; ++token)
      if (counts[token]) batch.push_back({token, token, 1, counts[token], counts[token] - 1});
    const ListedSource<T> source(q, rows);
    const LogitRule rule{static_cast<float>(softmax_scale), false, -1, 0.0f};
    const Output<T> output(q, heads, dim, std::move(sink), return_lse);
    if (heads > 0 && !batch.empty()) {
      const TurnedOutput<T> turned{output, angles, rotary_dim, dim};
      attend_to<T>(source, Pages(lists, rows.count(), 1), rule, Plan(sizes_of(source), rule, std::move(batch)), turned);
    }
    result = {output.out, output.lse};
  });
  return result;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_BF16(shared_kv_attention)
