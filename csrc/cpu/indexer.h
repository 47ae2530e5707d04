// The lightning indexer's scores, tile by tile: what indexer_logits, lightning_indexer and candidate_blocks share.
//
// A task is a few queries of one sequence x a range of its keys. The keys of a tile are loaded once, as bfloat16 for
// AMX and as floats elsewhere, and meet the heads of one query after the other; a score has the same bits whichever
// tile or task it falls into. An op brings a Collector for each thread:
//
//   void begin(const IndexTask&);
//   void take(int64_t query, const float* scores, int64_t count, int64_t first);   keys first, first + 1, ...
//   void end(const IndexTask&);
#pragma once

#include "attention.h"
#include "record_rows.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t kQueries = 4;  // of a task: they share the loading of a tile

// --------------------------------------------------------------------------------------------------------- the keys

// Keys [nb, bs, dim] as numbers.
template <class T>
class PlainKeys {
 public:
  explicit PlainKeys(const Tensor& cache)
      : data_(static_cast<const T*>(cache.const_data_ptr())),
        block_(cache.stride(0)),
        slot_(cache.stride(1)),
        stride_(cache.stride(2)),
        dim_(cache.size(2)) {}

  int64_t dim() const { return dim_; }

  // One key's numbers; returns what its scores are multiplied by.
  template <class E>
  float load(int64_t block, int64_t slot, E* out) const {
    load_row(row(block, slot), stride_, dim_, out);
    return 1.0f;
  }

  void prefetch(int64_t block, int64_t slot, Prefetcher& ahead) const {
    ahead.add(row(block, slot), dim_ * static_cast<int64_t>(sizeof(T)));
  }

  // Whether neighbours in a block can be multiplied where they lie, row() and slot_stride() numbers on.
  bool in_place() const { return stride_ == 1 && dim_ % kPair == 0; }
  int64_t slot_stride() const { return slot_; }

  const T* row(int64_t block, int64_t slot) const { return data_ + block * block_ + slot * slot_; }

 private:
  const T* data_;
  int64_t block_, slot_, stride_, dim_;
};

// Keys as records. One scale for the whole key multiplies its scores instead of its numbers, which then are exact in
// bfloat16; so are codes of four bits times powers of two.
template <class Code>
class RecordKeys {
 public:
  RecordKeys(const RecordPages& pages, const Record& record)
      : pages_(pages),
        codes_(*record.field("codes")),
        scales_(*record.field("scales")),
        scale_values_(scales_),
        spans_(scale_values_.count()),
        dim_(codes_.count() * kPerByte<Code>),
        span_(dim_ / spans_),
        bytes_(record.plane_bytes[0]) {}

  int64_t dim() const { return dim_; }
  int64_t spans() const { return spans_; }  // scales of a key

  template <class E>
  float load(int64_t block, int64_t slot, E* out) const {
    const Code* codes = reinterpret_cast<const Code*>(pages_.at(codes_, block, slot));
    float scales[kMostSpans];
    scale_values_.read(pages_.at(scales_, block, slot), scales);
    if (spans_ == 1) return expand(codes, span_, 1.0f, out), scales[0];
    for (int64_t i = 0; i < spans_; ++i) expand(codes + i * span_ / kPerByte<Code>, span_, scales[i], out + i * span_);
    return 1.0f;
  }

  void prefetch(int64_t block, int64_t slot, Prefetcher& ahead) const {
    ahead.add(pages_.row(codes_.plane, block, slot), bytes_);
  }

  static constexpr int64_t kMostSpans = 8;

 private:
  const RecordPages& pages_;
  const Field &codes_, &scales_;
  const RecordScales scale_values_;
  const int64_t spans_, dim_, span_, bytes_;
};

// -------------------------------------------------------------------------------------------------------- the batch

struct IndexTask {
  int64_t sequence;              // row of block_table
  int64_t first_token, queries;  // rows of q
  int64_t begin, end;            // keys
  int64_t part = 0, parts = 1;   // which of the ranges that the keys were cut into

  int64_t cost() const { return queries * (end - begin); }
};

struct IndexerCall {
  const Tensor &q, &weights, &key_cache, &block_table, &seq_lens, &cu_seqlens_q;
  int64_t max_seqlen_q, compress_ratio;
  const std::string& kv_format;
  int64_t block_size;
};

// How many keys each row of q sees, and whose.
struct IndexRows {
  IndexRows(const IndexerCall& call, const Pages& pages)
      : batch(read_batch(pages, call.seq_lens, call.cu_seqlens_q, call.max_seqlen_q, call.q.size(0),
                         call.compress_ratio)),
        visible(call.q.size(0), 0) {
    for (const Sequence& sequence : batch) {
      for (int64_t i = 0; i < sequence.queries; ++i)
        visible[sequence.first_token + i] = std::max<int64_t>(0, sequence.start + i + 1) / call.compress_ratio;
    }
  }

  // Tasks of at most `queries` rows. Where they are fewer than threads, their keys are cut, at multiples of `align`.
  std::vector<IndexTask> tasks(int64_t queries, int64_t align) const {
    std::vector<IndexTask> whole, found;
    for (const Sequence& sequence : batch) {
      for (int64_t i = 0; i < sequence.queries; i += queries) {
        const int64_t count = std::min(queries, sequence.queries - i), token = sequence.first_token + i;
        whole.push_back({sequence.index, token, count, 0, visible[token + count - 1]});
      }
    }
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t wanted = static_cast<int64_t>(whole.size()) < 2 * threads ? threads : 1;
    for (IndexTask task : whole) {
      const int64_t keys = task.end, step = round_up(std::max(keys / wanted, kSplit) + 1, align);
      task.parts = std::max<int64_t>(1, (keys + step - 1) / step);
      for (task.part = 0; task.part < task.parts; ++task.part) {
        task.begin = task.part * step;
        task.end = std::min(keys, task.begin + step);
        found.push_back(task);
      }
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const IndexTask& a, const IndexTask& b) { return a.cost() > b.cost(); });
    return found;
  }

  std::vector<Sequence> batch;
  std::vector<int64_t> visible;  // of each row of q
};

// --------------------------------------------------------------------------------------------------------- the tiles

// Neighbouring keys of a tile.
struct Segment {
  int64_t at, count, first;  // within the tile; how many; index of the first
};

struct KeyTile {
  int64_t count = 0, segments = 0;
  Segment segment[kTile];
  bool there[kTile];
  int64_t block[kTile], slot[kTile];

  void clear() { count = segments = 0; }

  // Whether keys [first, end) are there and lie one after the other.
  bool adjacent(int64_t first, int64_t end) const {
    bool all = there[first];
    for (int64_t n = first + 1; n < end; ++n)
      all &= there[n] & (block[n] == block[first]) & (slot[n] == slot[first] + n - first);
    return all;
  }

  // Appends keys from `first` on, as many as there is room for, at most `wanted`; returns how many.
  int64_t append(const Pages& pages, int64_t sequence, int64_t first, int64_t wanted) {
    const int64_t some = std::min(wanted, kTile - count), at = count;
    std::fill_n(there + at, some, false);
    pages.visit(sequence, first, first + some, [&](int64_t index, int64_t in_block, int64_t in_slot) {
      const int64_t n = at + index - first;
      there[n] = true;
      block[n] = in_block;
      slot[n] = in_slot;
    });
    segment[segments++] = {at, some, first};
    count += some;
    return some;
  }
};

// Yields the tiles of a range of keys.
class RangeTiles {
 public:
  RangeTiles(const Pages& pages, const IndexTask& task) : pages_(pages), task_(task), next_(task.begin) {}

  void operator()(KeyTile& tile) {
    tile.clear();
    if (next_ < task_.end) next_ += tile.append(pages_, task_.sequence, next_, task_.end - next_);
  }

 private:
  const Pages& pages_;
  const IndexTask& task_;
  int64_t next_;
};

// Yields the tiles of the candidate blocks of one query, in ascending order, each block once.
class CandidateTiles {
 public:
  CandidateTiles(const Pages& pages, const IndexTask& task, std::vector<int64_t> blocks, int64_t size)
      : pages_(pages), task_(task), blocks_(std::move(blocks)), size_(size) {
    std::sort(blocks_.begin(), blocks_.end());
    blocks_.erase(std::unique(blocks_.begin(), blocks_.end()), blocks_.end());
  }

  void operator()(KeyTile& tile) {
    tile.clear();
    while (turn_ < blocks_.size() && tile.count < kTile) {
      const int64_t start = blocks_[turn_] * size_, first = start + done_;
      const int64_t end = start < 0 ? start : std::min(task_.end, start + size_);
      if (first < end) done_ += tile.append(pages_, task_.sequence, first, end - first);
      if (start + done_ < end) continue;
      ++turn_;
      done_ = 0;
    }
  }

 private:
  const Pages& pages_;
  const IndexTask& task_;
  std::vector<int64_t> blocks_;
  int64_t size_, done_ = 0;
  size_t turn_ = 0;
};

// --------------------------------------------------------------------------------------------------------- the loops

// out[n] = sum over rows of weights[row] * relu(scores[n * key + row * step]), where step is 1 within a vector; rows
// that `mask` leaves out count nothing. Scores and out may be touched up to a multiple of 4 keys.
inline void weigh_heads(const float* scores, int64_t count, int64_t key, int64_t step, int64_t width,
                        const float* weights, const uint32_t* mask, float* out) {
  for (int64_t n = 0; n < count; n += 4) {
    Vec sum[4] = {};
    for (int64_t row = 0; row < width; row += kLanes) {
      const Vec weight = load(weights + row);
      BitVec used;
      std::memcpy(&used, mask + row, sizeof used);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const Vec score = maximum(Vec{}, load(scores + (n + k) * key + row * step));  // NaN stays
        sum[k] += weight * (Vec)((BitVec)score & used);
      }
    }
    const Quad quad = sum_lanes(sum[0], sum[1], sum[2], sum[3]);
    std::memcpy(out + n, &quad, sizeof quad);
  }
}

#if defined(__AVX512BF16__)
// Scores of kSide keys, `stride` numbers apart, and R tiles of packed queries, tile by tile [R, kSide, kSide]: some
// keys at a time.
template <int R, class Ahead>
void score_side_in_vectors(const bf16* queries, int64_t dim, const bf16* keys, int64_t stride, float* scores,
                           Ahead& ahead) {
  constexpr int kKeys = R == 1 ? 16 : R == 2 ? 8 : 4;
  const int64_t key_bytes = stride * static_cast<int64_t>(sizeof(bf16));
  for (int64_t n = 0; n < kSide; n += kKeys) {
    Vec sums[kKeys][R] = {};
    for (int64_t d = 0; d < dim; d += kDepth) {
      ahead.step();
      const bf16* strips[R];
      for (int r = 0; r < R; ++r) strips[r] = queries + r * kSide * dim + d * kSide;
      multiply(sums, keys + n * stride + d, key_bytes, strips);
    }
    for (int key = 0; key < kKeys; ++key) {
      for (int r = 0; r < R; ++r) store(scores + (r * kSide + n + key) * kSide, sums[key][r]);
    }
  }
}

// The same, all in registers.
template <int R, class Ahead>
void score_side_in_tiles(const bf16* queries, int64_t dim, const bf16* keys, int64_t stride, float* scores,
                         Ahead& ahead) {
  each<R>([](auto r) { tile_zero<r>(); });
  const int64_t key_bytes = stride * static_cast<int64_t>(sizeof(bf16));
  const auto multiply = [&](auto part, int64_t d) {
    each<R>([&](auto r) {
      tile_load<6 + r % 2>(queries + r * kSide * dim + d * kSide, 64);
      tile_multiply<r, 4 + part, 6 + r % 2>();
    });
  };
  int64_t d = 0;
  for (; d + 2 * kDepth <= dim; d += 2 * kDepth) {  // the second keys are on their way while the first are multiplied
    tile_load<4>(keys + d, key_bytes);
    tile_load<5>(keys + d + kDepth, key_bytes);
    ahead.step();
    multiply(std::integral_constant<int, 0>{}, d);
    ahead.step();
    multiply(std::integral_constant<int, 1>{}, d + kDepth);
  }
  if (d < dim) {
    tile_load<4>(keys + d, key_bytes);
    ahead.step();
    multiply(std::integral_constant<int, 0>{}, d);
  }
  each<R>([&](auto r) { tile_store<r>(scores + r * kSide * kSide, 64); });
}
#endif

// What a thread needs to score keys.
template <class T, class Keys>
class IndexWorker {
 public:
  using Element = std::conditional_t<kTiles<T>, bf16, float>;
#if defined(__AVX512BF16__)
  using Scope = std::conditional_t<kTiles<T>, TileScope, int>;
#else
  using Scope = int;
#endif

  IndexWorker(const IndexerCall& call, const Keys& keys, const std::vector<float>& weights)
      : call_(call),
        keys_(keys),
        all_weights_(weights),
        heads_(call.q.size(1)),
        dim_(round_up(call.q.size(2), kPair)),
        width_(round_up(heads_, kLanes)) {
    queries_.want_zeros(kQueries * width_ * dim_);
    rows_.want_zeros(std::max(kTile, width_) * dim_);
    weights_.want_zeros(kQueries * width_);
    raw_.want(kTile * width_);
    scores_.want(kTile);
    mask_.assign(width_, 0);
    std::fill_n(mask_.begin(), heads_, ~0u);
  }

  template <class Tiles, class Collector>
  void run(const IndexTask& task, const std::vector<int64_t>& visible, Tiles&& next_tile, Collector& collector) {
    for (int64_t i = 0; i < task.queries; ++i) start(task.first_token + i, i);
    [[maybe_unused]] const Scope scope{};
    KeyTile tiles[2];
    next_tile(tiles[0]);
    for (int turn = 0; tiles[turn].count > 0; turn ^= 1) {
      const KeyTile& tile = tiles[turn];
      next_tile(tiles[turn ^ 1]);
      prefetch(tiles[turn ^ 1], task.queries);
      for (int64_t n = 0; n < tile.count; n += kSide) load(tile, n, std::min(n + kSide, tile.count));
      for (int64_t i = 0; i < task.queries; ++i) {
        score(i, tile);
        for (int64_t s = 0; s < tile.segments; ++s) {
          const Segment& part = tile.segment[s];
          const int64_t count = std::min(part.count, visible[task.first_token + i] - part.first);
          if (count > 0) collector.take(i, scores_ + part.at, count, part.first);
        }
      }
    }
  }

 private:
  static constexpr int64_t kSide = 16;  // keys that are multiplied together: a tile's rows

  struct Side {
    const Element* keys;
    int64_t stride;
  };

  Element* row(int64_t n) { return reinterpret_cast<Element*>(rows_.data()) + n * dim_; }

  // Keys [first, end) of a tile, at most kSide: from where they lie, or as copies.
  void load(const KeyTile& tile, int64_t first, int64_t end) {
    Side& side = sides_[first / kSide];
    if constexpr (std::is_same_v<Keys, PlainKeys<bf16>> && kTiles<T>) {
      if (end - first == kSide && keys_.in_place() && tile.adjacent(first, end)) {
        side = {keys_.row(tile.block[first], tile.slot[first]), keys_.slot_stride()};
        std::fill(scale_ + first, scale_ + end, 1.0f);
        return;
      }
    }
    side = {row(first), dim_};
    for (int64_t n = first; n < end; ++n) {
      if (tile.there[n]) scale_[n] = keys_.load(tile.block[n], tile.slot[n], row(n));
    }
  }

  // A query's heads into the order that the loops want.
  void start(int64_t token, int64_t i) {
    const T* data = static_cast<const T*>(call_.q.const_data_ptr()) + token * call_.q.stride(0);
    const int64_t size = call_.q.size(2);
    float* queries = queries_ + i * width_ * dim_;
    std::fill_n(row(0), width_ * dim_, Element{});
    for (int64_t head = 0; head < heads_; ++head)
      load_row(data + head * call_.q.stride(1), call_.q.stride(2), size, row(head));
#if defined(__AVX512BF16__)
    if constexpr (kTiles<T>) {
      for (int64_t head = 0; head < width_; head += kSide)
        pack_queries(row(head), dim_, reinterpret_cast<bf16*>(queries) + head * dim_);
    } else
#endif
    {
      for (int64_t head = 0; head < width_; ++head) {
        for (int64_t d = 0; d < dim_; ++d) queries[d * width_ + head] = row(head)[d];
      }
    }
    std::fill_n(row(0), width_ * dim_, Element{});  // beyond a key's dims stays 0
    std::copy_n(all_weights_.data() + token * heads_, heads_, weights_ + i * width_);
  }

  // What the loops over one query and a tile of keys take.
  int64_t steps_of([[maybe_unused]] int64_t count) const {
    const int64_t strips = width_ / kLanes;
#if defined(__AVX512BF16__)
    if constexpr (kTiles<T>) {
      const int64_t some = has_tiles() ? (strips + 3) / 4 : strips + (strips % 4 == 3);
      return (count + kSide - 1) / kSide * some * (dim_ / kDepth);
    }
#endif
    return strips * (dim_ / 32);
  }

  void prefetch(const KeyTile& tile, int64_t queries) {
    ahead_.clear();
    for (int64_t n = 0; n < tile.count; ++n) {
      if (tile.there[n]) keys_.prefetch(tile.block[n], tile.slot[n], ahead_);
    }
    ahead_.finish_within(std::max<int64_t>(1, queries * steps_of(tile.count)));
  }

  // Scores of a tile for one query; -inf where there is no key.
  void score(int64_t i, const KeyTile& tile) {
    const float* queries = queries_ + i * width_ * dim_;
#if defined(__AVX512BF16__)
    if constexpr (kTiles<T>) {
      // Tiles multiply the next keys while the scores of the last ones are weighed.
      for (int64_t n = 0; n < tile.count + kSide; n += kSide) {
        float* raw[] = {raw_, raw_ + kSide * width_};
        if (n < tile.count) {
          for (int64_t head = 0; head < width_; head += kHeads)
            score_heads(queries, head, sides_[n / kSide], raw[n / kSide % 2] + head * kSide);
        }
        if (n == 0) continue;
        weigh_heads(raw[(n / kSide - 1) % 2], kSide, kSide, kSide, width_, weights_ + i * width_, mask_.data(),
                    scores_ + n - kSide);
      }
    } else
#endif
    {
      score_many_rows(queries, call_.q.size(2), reinterpret_cast<const float*>(row(0)), dim_, tile.count, raw_, width_,
                      ahead_);
      weigh_heads(raw_, tile.count, width_, 1, width_, weights_ + i * width_, mask_.data(), scores_);
    }
    for (int64_t n = 0; n < tile.count; ++n) scores_[n] = tile.there[n] ? scale_[n] * scores_[n] : -kInfinity;
  }

#if defined(__AVX512BF16__)
  static constexpr int64_t kHeads = 4 * kSide;  // whose sums stay in registers

  void score_heads(const float* queries, int64_t head, const Side& side, float* out) {
    const bf16* packed = reinterpret_cast<const bf16*>(queries) + head * dim_;
    const auto score = [&](auto r) {
      if (has_tiles()) return score_side_in_tiles<r>(packed, dim_, side.keys, side.stride, out, ahead_);
      FetchOnce once{ahead_};
      score_side_in_vectors<r>(packed, dim_, side.keys, side.stride, out, once);
    };
    switch (std::min(kHeads, width_ - head) / kSide) {
      case 1:
        return score(std::integral_constant<int, 1>{});
      case 2:
        return score(std::integral_constant<int, 2>{});
      case 3:
        return score(std::integral_constant<int, 3>{});
      default:
        return score(std::integral_constant<int, 4>{});
    }
  }
#endif

  const IndexerCall& call_;
  const Keys& keys_;
  const std::vector<float>& all_weights_;
  const int64_t heads_, dim_, width_;  // dims rounded up to pairs of vectors, heads to vectors
  Floats queries_;                     // [kQueries, width, dim]
  Floats rows_;                        // keys of a tile [kTile, dim]
  Floats weights_, raw_, scores_;      // [kQueries, width], [kTile, width], [kTile]
  float scale_[kTile] = {};
  Side sides_[kTile / kSide] = {};
  std::vector<uint32_t> mask_;
  Prefetcher ahead_;
};

// -------------------------------------------------------------------------------------------------------- the whole

inline std::vector<float> read_weights(const Tensor& weights) {
  const int64_t tokens = weights.size(0), heads = weights.size(1);
  std::vector<float> out(tokens * heads);
  with_dtype(weights, "weights", [&](auto zero) {
    const auto* data = static_cast<const decltype(zero)*>(weights.const_data_ptr());
    for (int64_t t = 0; t < tokens; ++t)
      load_row(data + t * weights.stride(0), weights.stride(1), heads, out.data() + t * heads);
  });
  return out;
}

inline void expect_indexer(const IndexerCall& call) {
  expect_rank(call.q, "q", 3);
  expect_shape(call.weights, "weights", {call.q.size(0), call.q.size(1)});
  expect_rank(call.block_table, "block_table", 2);
  KVBACKEND_CHECK(call.compress_ratio >= 1, "compress_ratio is ", call.compress_ratio,
                  "; it must be at least 1: pass how many tokens share a key");
}

// Where the keys lie: rows of a page, and pages.
inline Pages index_pages(const IndexerCall& call) {
  if (call.kv_format == "auto") {
    expect_rank(call.key_cache, "key_cache", 3);
    return Pages(call.block_table, call.key_cache.size(0), call.key_cache.size(1));
  }
  const RecordPages pages(call.key_cache, "key_cache", record_named(call.kv_format, "kv_format"), call.block_size);
  return Pages(call.block_table, pages.num_blocks(), pages.block_size());
}

// function(T{}, keys) with the type of the queries and with what reads the keys.
template <class F>
void with_keys(const IndexerCall& call, F&& function) {
  with_dtype(call.q, "q", [&](auto zero) {
    if (call.kv_format == "auto") {
      expect_shape(call.key_cache, "key_cache", {call.key_cache.size(0), call.key_cache.size(1), call.q.size(2)});
      expect_dtype(call.key_cache, "key_cache", call.q.scalar_type());
      return function(zero, PlainKeys<decltype(zero)>(call.key_cache));
    }
    const Record& record = record_named(call.kv_format, "kv_format");
    const RecordPages pages(call.key_cache, "key_cache", record, call.block_size);
    const auto read = [&](auto code) {
      const RecordKeys<decltype(code)> keys(pages, record);
      KVBACKEND_CHECK(!record.field("rope") && keys.spans() <= keys.kMostSpans && keys.dim() == call.q.size(2),
                      "kv_format is '", call.kv_format, "', which holds no index keys of ", call.q.size(2),
                      " numbers: choose a record that does");
      function(zero, keys);
    };
    const Field& codes = *record.field("codes");
    if (codes.holds("float8_e4m3fn")) return read(e4m3{});
    if (codes.holds("int8")) return read(int8_t{});
    read(e2m1x2{});
  });
}

// Parallel over tasks: a thread that has done one takes the next. tiles_of(task) makes what yields its tiles.
template <class TilesOf, class MakeCollector>
void score_keys(const IndexerCall& call, const IndexRows& rows, const std::vector<IndexTask>& tasks, TilesOf&& tiles_of,
                MakeCollector&& make_collector) {
  const std::vector<float> weights = read_weights(call.weights);
  int64_t work = 0;
  for (const IndexTask& task : tasks) work += task.cost() * call.q.size(1) * call.q.size(2);
  const int64_t threads =
      std::min<int64_t>({torch::stable::get_num_threads(), static_cast<int64_t>(tasks.size()), work / kThreadWork + 1});
  with_keys(call, [&](auto zero, const auto& keys) {
    using T = decltype(zero);
    if (tasks.empty()) return;  // only now: keys that do not fit are refused in any case
    std::atomic<size_t> taken{0};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      IndexWorker<T, std::decay_t<decltype(keys)>> worker(call, keys, weights);
      auto collector = make_collector();
      for (size_t i = taken++; i < tasks.size(); i = taken++) {
        collector.begin(tasks[i]);
        worker.run(tasks[i], rows.visible, tiles_of(tasks[i]), collector);
        collector.end(tasks[i]);
      }
    });
  });
}

}  // namespace kvbackend::KVBACKEND_ISA
