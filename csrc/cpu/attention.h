// Attention over a paged cache: what paged_attention and mla_attention share.
//
// The work is cut into tasks: some queries of one sequence x some kv heads x a range of keys. A task walks its keys in
// tiles of kTile and keeps, for each row (a query and a head), a running maximum, a sum of weights and a weighted sum
// of values. All query heads of a kv head are rows of one task, so a cached row is read once for all of them. Where a
// sequence has few queries, its keys are cut into parts, which are merged in order. What a row comes to depends on its
// own sequence alone, neither on the batch nor on the number of threads: the length decides where keys are cut.
//
// An op brings a Source, which knows what a query, a key and a value are:
//
//   int64_t heads(), kv_heads(), dim(), value_dim();
//   static constexpr bool kValuesAreKeys;            a value is the first value_dim numbers of its key
//   bool in_place();                                 rows can be read where they lie: key_row and value_row
//   bool stored();                                   keys are as the cache holds them
//   void load_query(token, head, E* out);            E is float, or T
//   void load_key(keys, n, head, E* out), load_value(keys, n, head, E* out);
//   const T* key_row(keys, n, head), *value_row(keys, n, head);
//   void locate(Keys&, int64_t n);                   from key n's block and slot: where its rows are
//   bool in_order();                                 positions are indices within the sequence
//   int64_t position(block, slot);                   where they are not
//   void prefetch(keys, head, Prefetcher&);          names the rows that will be wanted next
//   bool bias(keys, head, float* out);               what is added to the logits of each key; false: nothing
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernel.h"
#include "simd.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t kTile = 64;             // keys attended to at once
constexpr int64_t kRows = 64;             // rows of a task
constexpr int64_t kPanel = 128;           // dims of keys and queries that are kept in L1
constexpr int64_t kSplit = 512;           // where a sequence's keys may be cut: multiples of it
constexpr int64_t kMostParts = 32;        // of one sequence
constexpr int64_t kThreadWork = 1 << 20;  // multiplications that are worth another thread
constexpr int64_t kLine = 64;             // bytes of a cache line
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ------------------------------------------------------------------------------------------------------- the batch

// Which blocks hold a sequence. A block that the pool lacks, -1 among them, holds nothing.
class Pages {
 public:
  Pages(const Tensor& block_table, int64_t num_blocks, int64_t block_size)
      : table_(block_table, "block_table"),
        sequences_(block_table.size(0)),
        columns_(block_table.size(1)),
        num_blocks_(num_blocks),
        block_size_(block_size) {}

  int64_t sequences() const { return sequences_; }
  int64_t capacity() const { return columns_ * block_size_; }

  // function(index, block, slot) for each key that exists among those of index [begin, end).
  template <class F>
  void visit(int64_t sequence, int64_t begin, int64_t end, F&& function) const {
    while (begin < end) {
      const int64_t column = begin / block_size_;
      const int64_t stop = std::min(end, (column + 1) * block_size_);
      const int64_t block = table_(sequence, column);
      if (block >= 0 && block < num_blocks_) {
        for (int64_t index = begin; index < stop; ++index) function(index, block, index - column * block_size_);
      }
      begin = stop;
    }
  }

 private:
  Ids table_;
  int64_t sequences_, columns_, num_blocks_, block_size_;
};

struct Sequence {
  int64_t index;        // row of block_table
  int64_t first_token;  // row of q
  int64_t queries;
  int64_t length;  // keys
  int64_t start;   // index of its first query; negative where it has more queries than tokens
  int64_t split = 0, first_part = 0, parts = 1;  // where its keys are cut, and what is left to be merged
};

// The sequences that have queries and keys, whatever the numbers say: nothing outside the table nor q is named.
inline std::vector<Sequence> read_batch(const Pages& pages, const Tensor& seq_lens, const Tensor& cu_seqlens_q,
                                        int64_t max_seqlen_q, int64_t num_tokens) {
  expect_shape(seq_lens, "seq_lens", {pages.sequences()});
  expect_shape(cu_seqlens_q, "cu_seqlens_q", {pages.sequences() + 1});
  const Ids lengths(seq_lens, "seq_lens"), offsets(cu_seqlens_q, "cu_seqlens_q");
  KVBACKEND_CHECK(offsets[0] == 0, "cu_seqlens_q starts with ", offsets[0],
                  "; it is the running sum of lengths and must start with 0: prepend a 0");
  std::vector<Sequence> batch;
  for (int64_t i = 0; i < pages.sequences(); ++i) {
    const int64_t first = std::clamp<int64_t>(offsets[i], 0, num_tokens);
    const int64_t queries = std::clamp<int64_t>(offsets[i + 1], first, num_tokens) - first;
    const int64_t length = std::clamp<int64_t>(lengths[i], 0, pages.capacity());
    const int64_t wanted = std::min(queries, std::max<int64_t>(max_seqlen_q, 0));
    if (wanted > 0 && length > 0) batch.push_back({i, first, wanted, length, length - queries});
  }
  return batch;
}

// ------------------------------------------------------------------------------------------------------- the pieces

// The keys of a tile: those that exist, so fewer than kTile where blocks are missing.
struct Keys {
  int64_t count = 0;
  int64_t lowest, highest;  // position
  int64_t block[kTile], slot[kTile], position[kTile];
  int64_t key[kTile], value[kTile];  // offsets of their rows, at kv head 0; the source's own
};

// A query attends to positions in (after, last].
struct Bound {
  int64_t after, last;
};

struct Rule {
  float scale;
  bool causal;
  int64_t window;  // -1: none
  float softcap;   // 0: none

  Bound bound(int64_t position) const {
    constexpr int64_t kFirst = std::numeric_limits<int64_t>::min(), kLast = std::numeric_limits<int64_t>::max();
    if (position < 0) return {kLast, kFirst};
    return {window > 0 ? position - window : kFirst, causal ? position : kLast};
  }
};

struct Task {
  int64_t sequence;  // index into the batch
  int64_t first_query, queries;
  int64_t first_head, heads;      // kv heads
  int64_t first_member, members;  // which query heads of each kv head
  int64_t begin, end;             // keys
  int64_t part;                   // -1: the result is final

  int64_t rows() const { return queries * members; }
};

// Rows wanted next, fetched a few cache lines at a time while others are worked on. One line of each of four rows a
// step: a core needs several streams in flight to get its share of the memory's bandwidth.
class Prefetcher {
 public:
  void clear() { count_ = next_ = line_ = total_ = 0, pace_ = 1; }

  void add(const void* row, int64_t bytes) {
    rows_[count_] = static_cast<const char*>(row);
    bytes_[count_++] = bytes;
    total_ += bytes;
  }

  // All of it in that many steps.
  void finish_within(int64_t steps) { pace_ = total_ / (4 * kLine * steps) + 1; }

  void step() {
    for (int64_t turn = 0; turn < pace_ && next_ < count_; ++turn) {
      for (int64_t i = next_; i < next_ + 4; ++i) __builtin_prefetch(rows_[i] + line_, 0, 2);
      line_ += kLine;
      if (line_ >= bytes_[next_]) {
        line_ = 0;
        next_ += 4;
      }
    }
  }

 private:
  int64_t count_ = 0, next_ = 0, line_ = 0, total_ = 0, pace_ = 1;
  const char* rows_[2 * kTile + 4] = {};  // the last group of four may be short: then old rows fill it
  int64_t bytes_[2 * kTile + 4] = {};
};

// Floats of a thread's own, aligned to cache lines. Made when first wanted, since untouched memory costs nothing.
class Floats {
 public:
  float* data() const { return data_.get(); }
  operator float*() const { return data_.get(); }

  void want(int64_t size) {
    if (data_) return;
    data_.reset(static_cast<float*>(std::aligned_alloc(kLine, round_up(size * sizeof(float) + 1, kLine))));
    if (!data_) throw std::bad_alloc();
  }

  void want_zeros(int64_t size) {
    if (data_) return;
    want(size);
    std::fill_n(data_.get(), size, 0.0f);
  }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float[], Free> data_;
};

// --------------------------------------------------------------------------------------------------------- the loops
//
// Scores of a tile lie key by key, `width` rows each: scores[n * width + row]. `width` is the number of rows, rounded
// up to a power of two below kLanes and to a multiple of kLanes above.

inline int64_t width_of(int64_t rows) {
  if (rows > kLanes / 2) return round_up(rows, kLanes);
  int64_t width = 1;
  while (width < rows) width *= 2;
  return width;
}

// Few rows: lanes run over dims. R rows x kAccumulators / R keys in registers; a key is read once for R rows. The
// queries [R, dim] stay in L1. `keys` may be read up to the next multiple of kAccumulators / R.
template <int R, class E>
void score_few(const float* queries, int64_t dim, const E* const* keys, int64_t count, float* scores, int64_t width,
               Prefetcher& ahead) {
  constexpr int kKeys = kAccumulators / R;
  for (int64_t n = 0; n < count; n += kKeys) {
    Vec sum[kAccumulators] = {};
    for (int64_t d = 0; d < dim; d += kPair) {
      ahead.step();
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        Vec first, second;
        load_pair(keys[n + k] + d, first, second);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sum[k * R + r] += first * load(queries + r * dim + d);
          sum[k * R + r] += second * load(queries + r * dim + d + kLanes);
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kAccumulators; i += 4) {  // four neighbours among the sums are neighbours among the scores
      const Quad quad = sum_lanes(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
      std::memcpy(scores + (n + i / R) * width + i % R, &quad, sizeof quad);
    }
  }
}

// Many rows: lanes run over rows. V vectors of rows x up to 8 keys in registers; a number of a key meets all of them.
// Adds the products of `dims` dims, a panel of the keys [count, key_row] and of the queries [dims, width] that stays in
// L1. Keys may be read up to a multiple of 8.
template <int V>
void score_many(const float* queries, int64_t dims, const float* keys, int64_t key_row, int64_t count, float* scores,
                int64_t width, Prefetcher& ahead) {
  constexpr int kKeys = std::min(8, kAccumulators / V);
  for (int64_t n = 0; n < count; n += kKeys) {
    Vec sum[kKeys * V] = {};
    const float* key = keys + n * key_row;
    ahead.step();
    for (int64_t d = 0; d < dims; ++d) {
#pragma GCC unroll 8
      for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[k * V + v] += key[k * key_row + d] * load(queries + d * width + v * kLanes);
      }
    }
    ahead.step();
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        float* score = scores + (n + k) * width + v * kLanes;
        store(score, load(score) + sum[k * V + v]);
      }
    }
  }
}

// score_many for all rows and dims. Panels of kPanel dims: shorter sums also round less.
inline void score_many_rows(const float* queries, int64_t dim, const float* keys, int64_t key_row, int64_t count,
                            float* scores, int64_t width, Prefetcher& ahead) {
  constexpr int kMost = kAccumulators / 4;
  std::fill_n(scores, round_up(count, 8) * width, 0.0f);
  for (int64_t d = 0; d < dim; d += kPanel) {
    const int64_t dims = std::min(kPanel, dim - d);
    const float* panel = queries + d * width;
    int64_t row = 0;
    for (; row + kMost * kLanes <= width; row += kMost * kLanes)
      score_many<kMost>(panel + row, dims, keys + d, key_row, count, scores + row, width, ahead);
    for (; row < width; row += kLanes)
      score_many<1>(panel + row, dims, keys + d, key_row, count, scores + row, width, ahead);
  }
}

// out[row] = decay[row] * out[row] + sum over keys of weights[n, row] * value n, for R rows and V vectors of dims,
// which stay in registers while the keys go by.
template <int R, int V, class E>
void weigh(const float* weights, int64_t width, const E* const* values, int64_t count, int64_t dim, const float* decay,
           float* out, int64_t out_row, Prefetcher& ahead) {
  Vec sum[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = decay[r] * load(out + r * out_row + v * kLanes);
  }
  for (int64_t n = 0; n < count; ++n) {
    if (n % 2 == 0) ahead.step();
    const E* value = values[n] + dim;
    Vec numbers[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v += 2) load_pair(value + v * kLanes, numbers[v], numbers[v + 1]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float weight = weights[n * width + r];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r][v] += weight * numbers[v];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(out + r * out_row + v * kLanes, sum[r][v]);
  }
}

// weigh, for all rows and dims. Dims in the outer loop: their part of the values stays in L1 for all rows.
template <int R, class E>
void weigh_all(const float* weights, int64_t width, const E* const* values, int64_t count, int64_t rows, int64_t dims,
               const float* decay, float* out, Prefetcher& ahead) {
  constexpr int kVectors = std::max(2, kAccumulators / R);
  int64_t d = 0;
  for (; d + kVectors * kLanes <= dims; d += kVectors * kLanes) {
    for (int64_t row = 0; row < rows; row += R)
      weigh<R, kVectors>(weights + row, width, values, count, d, decay + row, out + row * dims + d, dims, ahead);
  }
  for (; d < dims; d += kPair) {
    for (int64_t row = 0; row < rows; row += R)
      weigh<R, 2>(weights + row, width, values, count, d, decay + row, out + row * dims + d, dims, ahead);
  }
}

// Scores of `count` keys become weights; peak and total of each row are brought up to date, and decay is what the row's
// earlier total and values are worth now. All three have `width` floats, or kLanes where width is less: then lanes
// repeat the rows, and total is spread over the repeats.
inline void soften(float* scores, int64_t count, int64_t width, float* peak, float* total, float* decay) {
  const int64_t step = std::max<int64_t>(width, kLanes), size = count * width;
  std::fill(scores + size, scores + round_up(size, kLanes), -kInfinity);
  for (int64_t row = 0; row < step; row += kLanes) {
    const Vec before = load(peak + row);
    Vec top = before;
    for (int64_t i = row; i < size; i += step) top = maximum(load(scores + i), top);
    for (int64_t shift = width; shift < kLanes; shift *= 2) {
      float twice[2 * kLanes];
      store(twice, top);
      store(twice + kLanes, top);
      top = maximum(load(twice + shift), top);
    }
    const Vec base = top > -kInfinity ? top : Vec{};  // nothing seen yet: all weights shall be 0, not NaN
    const Vec worth = exp_negative(before - base);
    Vec sum = load(total + row) * worth;
    for (int64_t i = row; i < size; i += step) {
      const Vec weight = exp_negative(load(scores + i) - base);
      store(scores + i, weight);
      sum += weight;
    }
    store(peak + row, top);
    store(total + row, sum);
    store(decay + row, worth);
  }
}

// ----------------------------------------------------------------------------------------------------------- a task

#if defined(__AMX_BF16__)
template <class T>
constexpr bool kTiles = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool kTiles = false;
#endif

// What a thread needs to work on tasks, one after the other.
template <class T, class Source>
class Worker {
 public:
  Worker(const Source& source, const Pages& pages, const Rule& rule)
      : source_(source),
        pages_(pages),
        rule_(rule),
        dim_(round_up(source.dim(), kPair)),
        value_dim_(round_up(source.value_dim(), kPair)) {
    queries_.want(kRows * dim_);
    sums_.want(kRows * value_dim_);
    peak_.want(kRows * kLanes);
    total_.want(kRows * kLanes);
    decay_.want(kRows);
    scores_.want(kTile * kRows);
    bias_.want(kTile);
    row_.want(std::max(dim_, value_dim_));
  }

  // Calls finish(token, head, peak, total, values) for every row.
  template <class F>
  void run(const Task& task, const Sequence& sequence, F&& finish) {
    task_ = &task;
    sequence_ = &sequence;
    width_ = width_of(task.rows());
    in_place_ = source_.in_place() && width_ < kLanes;
    tiled_ = kTiles<T> && source_.stored() && width_ >= kLanes;
    want_rows();
    start();
    Keys found[2];
    locate(task.begin, found[0]);
    // Keys, then heads: one tile's rows of all heads lie side by side in memory. Meanwhile the next rows are fetched.
    for (int64_t begin = task.begin, turn = 0; begin < task.end; begin += kTile, turn ^= 1) {
      const Keys &keys = found[turn], &next = found[turn ^ 1];
      locate(begin + kTile, found[turn ^ 1]);
      if (keys.count == 0) continue;
      for (int64_t head = 0; head < task.heads; ++head) {
        ahead_.clear();
        const bool last = head + 1 == task.heads;
        source_.prefetch(last ? next : keys, task.first_head + (last ? 0 : head + 1), ahead_);
        tiled_ ? attend_tiled(keys, head) : in_place_ ? attend_in_place(keys, head) : attend_loaded(keys, head);
      }
    }
    for (int64_t head = 0; head < task.heads; ++head) finish_head(head, finish);
  }

 private:
  int64_t state_width() const { return std::max<int64_t>(width_, kLanes); }

  // Where keys and values go that are not read in place. What rounding up adds to their rows stays 0.
  void want_rows() {
    if (tiled_) {  // bf16, two in a float
      tile_keys_.want_zeros(kTile * dim_ / 2);
      packed_values_.want(kTile * value_dim_ / 2);
      packed_weights_.want(kTile * kRows / 2);
      if (!Source::kValuesAreKeys) tile_values_.want_zeros(kTile * value_dim_ / 2);
    } else if (!in_place_) {
      key_rows_.want_zeros(kTile * dim_);
      if (!Source::kValuesAreKeys) value_rows_.want_zeros(kTile * value_dim_);
    }
  }

  // Nothing seen yet.
  void start() {
    const Task& task = *task_;
    bounds_.clear();
    all_ = {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
    for (int64_t i = 0; i < task.queries; ++i) {
      bounds_.push_back(rule_.bound(position(task.first_query + i)));
      all_ = {std::max(all_.after, bounds_.back().after), std::min(all_.last, bounds_.back().last)};
    }
    std::fill_n(sums_.data(), task.heads * width_ * value_dim_, 0.0f);
    std::fill_n(total_.data(), task.heads * state_width(), 0.0f);
    std::fill_n(peak_.data(), task.heads * state_width(), -kInfinity);
    std::fill_n(queries_.data(), task.heads * width_ * dim_, 0.0f);
    for (int64_t head = 0; head < task.heads; ++head) tiled_ ? start_tiled(head) : start_queries(head);
  }

  // Queries of one kv head into the order that the loops want, scaled.
  void start_queries(int64_t head) {
    float* queries = queries_ + head * width_ * dim_;
    for (int64_t row = 0; row < task_->rows(); ++row) {
      source_.load_query(token(row), query_head(head, row), row_.data());
      for (int64_t d = 0; d < source_.dim(); ++d) row_[d] *= rule_.scale;
      std::fill(row_ + source_.dim(), row_ + dim_, 0.0f);
      if (width_ >= kLanes) {
        for (int64_t d = 0; d < source_.dim(); ++d) queries[d * width_ + row] = row_[d];
      } else {
        const auto arrange = in_place_ ? to_pairs<T> : to_pairs<float>;
        arrange(row_, dim_, queries + row * dim_);
      }
    }
  }

  int64_t token(int64_t row) const { return sequence_->first_token + task_->first_query + row / task_->members; }

  int64_t query_head(int64_t head, int64_t row) const {
    const int64_t group = source_.heads() / source_.kv_heads();
    return (task_->first_head + head) * group + task_->first_member + row % task_->members;
  }

  int64_t position(int64_t query) const {
    const int64_t index = sequence_->start + query;
    if (index < 0 || source_.in_order()) return index;
    int64_t own = 0;
    pages_.visit(sequence_->index, index, index + 1,
                 [&](int64_t, int64_t block, int64_t slot) { own = source_.position(block, slot); });
    return own;
  }

  void locate(int64_t begin, Keys& keys) const {
    keys.count = 0;
    keys.lowest = std::numeric_limits<int64_t>::max();
    keys.highest = std::numeric_limits<int64_t>::min();
    const int64_t end = std::min(begin + kTile, task_->end);
    pages_.visit(sequence_->index, begin, end, [&](int64_t index, int64_t block, int64_t slot) {
      const int64_t n = keys.count++;
      keys.block[n] = block;
      keys.slot[n] = slot;
      keys.position[n] = source_.in_order() ? index : source_.position(block, slot);
      keys.lowest = std::min(keys.lowest, keys.position[n]);
      keys.highest = std::max(keys.highest, keys.position[n]);
      source_.locate(keys, n);
    });
  }

  void attend_in_place(const Keys& keys, int64_t head) {
    const T *key[kTile], *value[kTile];
    for (int64_t n = 0; n < kTile; ++n) {
      const int64_t real = std::min(n, keys.count - 1);
      key[n] = source_.key_row(keys, real, task_->first_head + head);
      value[n] = source_.value_row(keys, real, task_->first_head + head);
    }
    attend(keys, head, key, value);
  }

  void attend_loaded(const Keys& keys, int64_t head) {
    const float *key[kTile], *value[kTile];
    for (int64_t n = 0; n < kTile; ++n) {
      const int64_t real = std::min(n, keys.count - 1);
      key[n] = key_rows_ + real * dim_;
      value[n] = Source::kValuesAreKeys ? key[n] : value_rows_ + real * value_dim_;
      if (n >= keys.count) continue;
      source_.load_key(keys, n, task_->first_head + head, key_rows_ + n * dim_);
      if (!Source::kValuesAreKeys) source_.load_value(keys, n, task_->first_head + head, value_rows_ + n * value_dim_);
    }
    attend(keys, head, key, value);
  }

#if defined(__AMX_BF16__)
  static bf16* as_bf16(float* data) { return reinterpret_cast<bf16*>(data); }

  // Queries of one kv head as tiles, not scaled: so they are exact. The rows of keys serve as scratch.
  void start_tiled(int64_t head) {
    static_assert(kRows <= kTile);
    bf16* rows = as_bf16(tile_keys_);
    for (int64_t row = 0; row < task_->rows(); ++row) {
      if constexpr (kTiles<T>) source_.load_query(token(row), query_head(head, row), rows + row * dim_);
    }
    for (int64_t row = 0; row < width_; row += kSide)
      pack_queries(rows + row * dim_, dim_, as_bf16(queries_ + head * width_ * dim_) + row * dim_);
  }

  // As attend, in tiles. Weights are rounded to bf16.
  void attend_tiled(const Keys& keys, int64_t head) {
    if constexpr (kTiles<T>) {
      const TileScope scope;
      bf16* key = as_bf16(tile_keys_);
      bf16* value = Source::kValuesAreKeys ? key : as_bf16(tile_values_);
      for (int64_t n = 0; n < keys.count; ++n) {
        source_.load_key(keys, n, task_->first_head + head, key + n * dim_);
        if (!Source::kValuesAreKeys) source_.load_value(keys, n, task_->first_head + head, value + n * value_dim_);
      }
      const int64_t count = keys.count, row_tiles = width_ / kSide, key_tiles = kTile / kDepth;
      bf16 *weights = as_bf16(packed_weights_), *values = as_bf16(packed_values_);
      ahead_.finish_within(dim_ / 16 + value_dim_ / 16 + row_tiles * value_dim_ / 32);
      score_tiles(as_bf16(queries_ + head * width_ * dim_), dim_, key, count, scores_, width_, ahead_);
      adjust(keys, head);
      soften(scores_, count, width_, peak_ + head * width_, total_ + head * width_, decay_);
      float* sums = sums_ + head * width_ * value_dim_;
      for (int64_t row = 0; row < width_; ++row) {
        if (decay_[row] == 1.0f) continue;
        for (int64_t d = 0; d < value_dim_; ++d) sums[row * value_dim_ + d] *= decay_[row];
      }
      pack_weights(scores_, width_, count, key_tiles, weights);
      pack_values(value, Source::kValuesAreKeys ? dim_ : value_dim_, value_dim_, count, values, ahead_);
      weigh_tiles(weights, key_tiles, width_, values, count, value_dim_, sums, ahead_);
    }
  }

  static constexpr auto kFromTiles = from_tiles;
#else
  static constexpr auto kFromTiles = from_pairs<float>;
  void start_tiled(int64_t) {}
  void attend_tiled(const Keys&, int64_t) {}
#endif

  // A tile of keys and one kv head: scores, weights, values.
  template <class E>
  void attend(const Keys& keys, int64_t head, const E* const* key, const E* const* value) {
    const float* queries = queries_ + head * width_ * dim_;
    if (width_ >= kLanes) {
      score_many_rows(queries, source_.dim(), key_rows_, dim_, keys.count, scores_, width_, ahead_);
    } else if (width_ >= 4) {
      for (int64_t row = 0; row < width_; row += 4)
        score_few<4>(queries + row * dim_, dim_, key, keys.count, scores_ + row, width_, ahead_);
    } else if (width_ == 2) {
      score_few<2>(queries, dim_, key, keys.count, scores_, width_, ahead_);
    } else {
      score_few<1>(queries, dim_, key, keys.count, scores_, width_, ahead_);
    }
    adjust(keys, head);
    soften(scores_, keys.count, width_, peak_ + head * state_width(), total_ + head * state_width(), decay_);
    float* sums = sums_ + head * width_ * value_dim_;
    const auto weigh_rows = width_ >= 4 ? weigh_all<4, E> : width_ == 2 ? weigh_all<2, E> : weigh_all<1, E>;
    weigh_rows(scores_, width_, value, keys.count, task_->rows(), value_dim_, decay_, sums, ahead_);
  }

  // Scale, softcap, bias and mask, where there are any.
  void adjust(const Keys& keys, int64_t head) {
    if (tiled_) {
      for (int64_t i = 0; i < keys.count * width_; i += kLanes) store(scores_ + i, rule_.scale * load(scores_ + i));
    }
    if (rule_.softcap > 0) {
      const float inverse = 1.0f / rule_.softcap;
      for (int64_t i = 0; i < keys.count * width_; i += kLanes)
        store(scores_ + i, rule_.softcap * tanh(inverse * load(scores_ + i)));
    }
    if (source_.bias(keys, task_->first_head + head, bias_)) {
      for (int64_t n = 0; n < keys.count; ++n) {
        for (int64_t row = 0; row < width_; ++row) scores_[n * width_ + row] += bias_[n];
      }
    }
    if (keys.lowest > all_.after && keys.highest <= all_.last) return;
    for (int64_t query = 0; query < task_->queries; ++query) {
      const Bound bound = bounds_[query];
      for (int64_t n = 0; n < keys.count; ++n) {
        if (keys.position[n] > bound.after && keys.position[n] <= bound.last) continue;
        std::fill_n(scores_ + n * width_ + query * task_->members, task_->members, -kInfinity);
      }
    }
  }

  template <class F>
  void finish_head(int64_t head, F&& finish) {
    const float *peak = peak_ + head * state_width(), *total = total_ + head * state_width();
    for (int64_t row = 0; row < task_->rows(); ++row) {
      float sum = 0;
      for (int64_t i = row; i < state_width(); i += width_) sum += total[i];
      const float* values = sums_ + (head * width_ + row) * value_dim_;
      const auto arrange = tiled_ ? kFromTiles : in_place_ ? from_pairs<T> : from_pairs<float>;
      arrange(values, value_dim_, row_);
      finish(token(row), query_head(head, row), peak[row], sum, row_);
    }
  }

  const Source& source_;
  const Pages& pages_;
  const Rule rule_;
  const int64_t dim_, value_dim_;  // rounded up to whole pairs of vectors
  Floats queries_;                 // [heads, width, dim], or [heads, dim, width] for many rows
  Floats sums_;                    // [heads, width, value_dim]
  Floats peak_, total_;            // [heads, max(width, kLanes)]
  Floats decay_, scores_, bias_, row_;
  Floats key_rows_, value_rows_;
  Floats tile_keys_, tile_values_, packed_values_, packed_weights_;
  std::vector<Bound> bounds_;  // of each query
  Bound all_{};                // what all queries attend to
  Prefetcher ahead_;
  const Task* task_ = nullptr;
  const Sequence* sequence_ = nullptr;
  int64_t width_ = 0;
  bool in_place_ = false, tiled_ = false;
};

// ------------------------------------------------------------------------------------------------------ the results

// A row's attention, or a part of it: the greatest logit, the sum of e^(logit - peak), and the values weighed alike.
template <class T>
class Output {
 public:
  Output(const Tensor& q, int64_t heads, int64_t value_dim, std::vector<float> sinks, bool return_lse)
      : out(torch::stable::new_empty(q, {q.size(0), heads, value_dim})),
        lse(torch::stable::new_empty(q, return_lse ? std::vector<int64_t>{q.size(0), heads} : std::vector<int64_t>{0},
                                     ScalarType::Float)),
        heads_(heads),
        value_dim_(value_dim),
        sinks_(std::move(sinks)),
        out_(static_cast<T*>(out.mutable_data_ptr())),
        lse_(return_lse ? static_cast<float*>(lse.mutable_data_ptr()) : nullptr) {
    std::memset(static_cast<void*>(out_), 0, q.size(0) * heads * value_dim * sizeof(T));  // rows of no sequence
    if (lse_) std::fill_n(lse_, q.size(0) * heads, -kInfinity);
  }

  void write(int64_t token, int64_t head, float peak, float total, float* values) const {
    const int64_t row = token * heads_ + head;
    if (peak == -kInfinity && total == 0) return;
    if (lse_) lse_[row] = peak + std::log(total);
    if (!sinks_.empty()) total += std::exp(sinks_[head] - peak);
    const float scale = 1.0f / total;
    for (int64_t d = 0; d < value_dim_; ++d) values[d] *= scale;
    store_row(values, value_dim_, out_ + row * value_dim_, 1);
  }

  Tensor out, lse;

 private:
  int64_t heads_, value_dim_;
  std::vector<float> sinks_;
  T* out_;
  float* lse_;
};

// ---------------------------------------------------------------------------------------------------------- the plan

struct Merge {  // a row that several tasks leave parts of
  int64_t sequence, token, head;
};

struct Sizes {
  int64_t heads, kv_heads, dim, value_dim;
  bool in_order;  // positions are indices
};

class Plan {
 public:
  Plan(const Sizes& sizes, const Rule& rule, std::vector<Sequence> sequences)
      : batch(std::move(sequences)), sizes_(sizes), rule_(rule) {
    const int64_t members = sizes.heads / sizes.kv_heads;
    const int64_t queries = std::max<int64_t>(1, kRows / members);  // of a task
    std::vector<Task> ranges;                                       // tasks of all kv heads
    for (int64_t i = 0; i < static_cast<int64_t>(batch.size()); ++i) {
      for (int64_t query = 0; query < batch[i].queries; query += queries) {
        Task task{i, query, std::min(queries, batch[i].queries - query)};
        reach(task);
        if (task.begin >= task.end) continue;
        if (batch[i].queries <= queries) plan_parts(task);
        for (int64_t member = 0; member < members; member += kRows) {
          task.first_member = member;
          task.members = std::min(kRows, members - member);
          cut(task, ranges);
        }
      }
    }
    share(ranges);
  }

  int64_t part_index(const Sequence& sequence, int64_t token, int64_t head, int64_t part) const {
    const int64_t row = (token - sequence.first_token) * sizes_.heads + head;
    return sequence.first_part + row * sequence.parts + part;
  }

  std::vector<Sequence> batch;
  std::vector<Task> tasks;  // the costly first
  std::vector<Merge> merges;
  int64_t num_parts = 0;
  int64_t threads = 0;

 private:
  // The keys that any of a task's queries attends to.
  void reach(Task& task) const {
    const Sequence& sequence = batch[task.sequence];
    const int64_t first = std::max<int64_t>(0, sequence.start + task.first_query);
    const int64_t last = sequence.start + task.first_query + task.queries - 1;
    task.begin = 0;
    task.end = last < 0 ? 0 : sequence.length;
    if (!sizes_.in_order) return;
    if (rule_.window > 0) task.begin = std::max<int64_t>(0, first - rule_.window + 1);
    if (rule_.causal) task.end = std::min(task.end, last + 1);
  }

  // For the one range of queries of a sequence: where its keys are cut. A part is small beside the keys it stands for.
  void plan_parts(const Task& task) {
    Sequence& sequence = batch[task.sequence];
    const int64_t part = sequence.queries * sizes_.heads * (sizes_.value_dim + 2);
    const int64_t key = sizes_.kv_heads * (sizes_.dim + sizes_.value_dim);
    const int64_t least = 16 * part / std::max<int64_t>(1, key);  // keys
    sequence.split = round_up(std::max(sequence.length / kMostParts, least) + 1, kSplit);
    sequence.parts = (task.end - 1) / sequence.split - task.begin / sequence.split + 1;
    if (sequence.parts == 1) return;
    sequence.first_part = num_parts;
    num_parts += sequence.parts * sequence.queries * sizes_.heads;
    for (int64_t query = 0; query < sequence.queries; ++query) {
      for (int64_t head = 0; head < sizes_.heads; ++head)
        merges.push_back({task.sequence, sequence.first_token + query, head});
    }
  }

  void cut(Task task, std::vector<Task>& out) const {
    const Sequence& sequence = batch[task.sequence];
    task.part = -1;
    if (sequence.parts == 1) return out.push_back(task);
    const int64_t begin = task.begin, end = task.end, first = begin / sequence.split;
    for (task.part = 0; task.part < sequence.parts; ++task.part) {
      task.begin = std::max(begin, (first + task.part) * sequence.split);
      task.end = std::min(end, (first + task.part + 1) * sequence.split);
      out.push_back(task);
    }
  }

  // Each range becomes tasks of some kv heads: as many as fit in kRows, fewer where threads would have nothing to do.
  void share(const std::vector<Task>& ranges) {
    const int64_t available = torch::stable::get_num_threads(), kv_heads = sizes_.kv_heads;
    const int64_t fair = static_cast<int64_t>(ranges.size()) * kv_heads / (2 * available);
    int64_t work = 0;
    for (Task task : ranges) {
      const int64_t heads = std::clamp<int64_t>(std::min(kRows / width_of(task.rows()), fair), 1, kv_heads);
      for (task.first_head = 0; task.first_head < kv_heads; task.first_head += heads) {
        task.heads = std::min(heads, kv_heads - task.first_head);
        tasks.push_back(task);
        work += cost(task);
      }
    }
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    threads = std::min<int64_t>({available, static_cast<int64_t>(tasks.size()), work / kThreadWork + 1});
  }

  int64_t cost(const Task& task) const {  // few rows cost as much as eight: reading the keys
    return task.heads * (task.end - task.begin) * (sizes_.dim + sizes_.value_dim) * std::max<int64_t>(8, task.rows());
  }

  const Sizes sizes_;
  const Rule rule_;
};

// Parallel over tasks: a thread that has done one takes the next.
template <class T, class Source>
void run_tasks(const Source& source, const Pages& pages, const Rule& rule, const Plan& plan, float* parts,
               const Output<T>& output) {
  const int64_t value_dim = source.value_dim();
  std::atomic<size_t> taken{0};
  torch::stable::parallel_for(0, plan.threads, 1, [&](int64_t, int64_t) {
    Worker<T, Source> worker(source, pages, rule);
    for (size_t i = taken++; i < plan.tasks.size(); i = taken++) {
      const Task& task = plan.tasks[i];
      const Sequence& sequence = plan.batch[task.sequence];
      worker.run(task, sequence, [&](int64_t token, int64_t head, float peak, float total, float* values) {
        if (task.part < 0) return output.write(token, head, peak, total, values);
        float* part = parts + plan.part_index(sequence, token, head, task.part) * (value_dim + 2);
        part[0] = peak;
        part[1] = total;
        std::copy_n(values, value_dim, part + 2);
      });
    }
  });
}

// Parallel over rows: the parts of each, in the order of their keys.
template <class T>
void merge_parts(const Plan& plan, int64_t value_dim, const float* parts, const Output<T>& output) {
  const int64_t size = value_dim + 2;
  torch::stable::parallel_for(0, plan.merges.size(), grain(size * 64), [&](int64_t begin, int64_t end) {
    std::vector<float> values(value_dim);
    for (int64_t i = begin; i < end; ++i) {
      const Merge& row = plan.merges[i];
      const Sequence& sequence = plan.batch[row.sequence];
      const float* first = parts + plan.part_index(sequence, row.token, row.head, 0) * size;
      float peak = -kInfinity, total = 0;
      for (int64_t n = 0; n < sequence.parts; ++n) peak = std::max(peak, first[n * size]);
      std::fill(values.begin(), values.end(), 0.0f);
      for (int64_t n = 0; n < sequence.parts; ++n) {
        const float* part = first + n * size;
        const float worth = part[0] == -kInfinity ? 0.0f : std::exp(part[0] - peak);
        total += worth * part[1];
        for (int64_t d = 0; d < value_dim; ++d) values[d] += worth * part[2 + d];
      }
      output.write(row.token, row.head, peak, total, values.data());
    }
  });
}

// The whole of an op, once its source is made: out [T, H, value_dim] and lse [T, H], or empty.
template <class T, class Source>
std::tuple<Tensor, Tensor> attend(const Source& source, const Pages& pages, const Rule& rule,
                                  std::vector<Sequence> batch, const Tensor& q, std::vector<float> sinks,
                                  bool return_lse) {
  const Output<T> output(q, source.heads(), source.value_dim(), std::move(sinks), return_lse);
  if (source.heads() > 0 && !batch.empty()) {
    const Sizes sizes{source.heads(), source.kv_heads(), source.dim(), source.value_dim(), source.in_order()};
    const Plan plan(sizes, rule, std::move(batch));
    const std::unique_ptr<float[]> parts(new float[plan.num_parts * (source.value_dim() + 2)]);
    run_tasks(source, pages, rule, plan, parts.get(), output);
    merge_parts(plan, source.value_dim(), parts.get(), output);
  }
  return {output.out, output.lse};
}

}  // namespace kvbackend::KVBACKEND_ISA
