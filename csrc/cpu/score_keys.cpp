// Scores of index keys: a part of indexer_logits, lightning_indexer and candidate_blocks.
//
// The keys of a tile are loaded once, as bfloat16 for AMX and as floats elsewhere, and meet the heads of one query
// after the other; a score has the same bits whichever tile or task it falls into.
#include "indexer.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

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

  // Names `count` keys of a block to what fetches them.
  template <class Ahead>
  void prefetch(int64_t block, int64_t slot, int64_t count, Ahead& ahead) const {
    const int64_t bytes = dim_ * static_cast<int64_t>(sizeof(T));
    if (slot_ == dim_) return ahead.add(row(block, slot), count * bytes);
    for (int64_t n = 0; n < count; ++n) ahead.add(row(block, slot + n), bytes);
  }

  // Whether neighbours in a block can be multiplied where they lie, row() and slot_stride() numbers on.
  bool in_place() const { return stride_ == 1 && dim_ % kPair == 0; }
  int64_t slot_stride() const { return slot_; }
  static constexpr bool kScaled = false;  // whether load() returns anything but 1

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

  template <class Ahead>
  void prefetch(int64_t block, int64_t slot, int64_t count, Ahead& ahead) const {
    for (int64_t n = 0; n < count; ++n) ahead.add(pages_.row(codes_.plane, block, slot + n), bytes_);
  }

  static constexpr bool kScaled = true;
  static constexpr int64_t kMostSpans = 8;

 private:
  const RecordPages& pages_;
  const Field &codes_, &scales_;
  const RecordScales scale_values_;
  const int64_t spans_, dim_, span_, bytes_;
};

// --------------------------------------------------------------------------------------------------------- the loops

// out[n] = sum over rows of weights[row] * relu(scores[n * key + row * step]), where step is 1 within a vector; rows
// that `mask` leaves out count nothing. Scores and out may be touched up to a multiple of 4 keys.
void weigh_heads(const float* scores, int64_t count, int64_t key, int64_t step, int64_t width, const float* weights,
                 const uint32_t* mask, float* out) {
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
  for (int64_t n = 0; n < kSide; n += kKeys) {
    Vec sums[kKeys][R] = {};
    for (int64_t d = 0; d < dim; d += kDepth) {
      ahead.step();
      const bf16* strips[R];
      for (int r = 0; r < R; ++r) strips[r] = queries + r * kSide * dim + d * kSide;
      multiply(sums, [&](int m) { return keys + (n + m) * stride + d; }, strips);
    }
    for (int key = 0; key < kKeys; ++key) {
      for (int r = 0; r < R; ++r) store(scores + (r * kSide + n + key) * kSide, sums[key][r]);
    }
  }
}

// Keys wanted next, evenly, each line once and into L2: tiles are loaded from there fast enough.
class LinesAhead {
 public:
  void clear() { count_ = 0; }

  void add(const void* rows, int64_t bytes) {
    const char* first = static_cast<const char*>(rows);
    for (int64_t at = 0; at < bytes && count_ < kMost; at += kPiece) pieces_[count_++] = first + at;
  }

  // All of the list in that many steps.
  void finish_within(int64_t steps) {
    pace_ = ((count_ << kShift) + steps - 1) / steps;
    due_ = 0;
  }

  // A loop takes its steps with a copy of this, which stays in registers, and gives it back.
  struct Steps {
    const char* const* pieces;
    int64_t count, pace, due;

    [[gnu::always_inline]] void step() {
      int64_t at = due >> kShift;
      due += pace;
      for (const int64_t end = std::min(due >> kShift, count); at < end; ++at) {
#pragma GCC unroll 4
        for (int64_t line = 0; line < kPiece; line += kLine) __builtin_prefetch(pieces[at] + line, 0, 2);
      }
    }
  };
  Steps steps() const { return {pieces_, count_, pace_, due_}; }
  void went(const Steps& steps) { due_ = steps.due; }

 private:
  static constexpr int64_t kPiece = 4 * kLine, kMost = 8 * kTile;
  static constexpr int kShift = 16;  // of the pieces that are due at each step
  const char* pieces_[kMost];
  int64_t count_ = 0, pace_ = 0, due_ = 0;
};

// Has the compiler compute a value here, not where it is used.
void keep_here([[maybe_unused]] Vec& value) {
#if !defined(KVBACKEND_EMULATED_TILES)
  asm volatile("" : "+v"(value));
#endif
}

// function(std::integral_constant<int, First>), ..., < Last: no call is left, and what it indexes stays in registers.
template <int First, class F, int... I>
[[gnu::always_inline]] inline void unrolled(F&& function, std::integer_sequence<int, I...>) {
  (function(std::integral_constant<int, First + I>{}), ...);
}

template <int First, int Last, class F>
[[gnu::always_inline]] inline void unrolled(F&& function) {
  unrolled<First>(function, std::make_integer_sequence<int, Last - First>{});
}

// kSide keys that are multiplied together, rows `stride` apart, and where their scores belong.
struct Side {
  const bf16* keys;
  int64_t stride, at;
};

// As score_side_in_vectors, while meanwhile(n) deals with the n-th of kSide keys before. kSteps: dim / kDepth, or 1 for
// any.
template <int R, int kSteps, class F>
[[gnu::always_inline]] inline void score_side_in_tiles(const bf16* queries, int64_t dim, const Side& side,
                                                       float* scores, LinesAhead::Steps& ahead, F&& meanwhile) {
  constexpr int kProducts = kSteps * R;
  if constexpr (kSteps > 1) dim = kSteps * kDepth;
  const int64_t key_bytes = side.stride * static_cast<int64_t>(sizeof(bf16));
  const auto multiply = [&](const bf16* heads, const bf16* keys) __attribute__((always_inline)) {
    unrolled<0, kProducts>([&](auto product) __attribute__((always_inline)) {
      constexpr int r = product % R, depth = product / R * kDepth;
      if constexpr (r == 0) tile_load<4>(keys + depth, key_bytes);
      tile_load<5 + r % 3>(heads + r * kSide * dim + depth * kSide, 64);
      tile_multiply<r, 4, 5 + r % 3>();
      ahead.step();
      if constexpr (kSteps > 1) unrolled<product * kSide / kProducts, (product + 1) * kSide / kProducts>(meanwhile);
    });
  };
  unrolled<0, R>([](auto r) __attribute__((always_inline)) { tile_zero<r>(); });
  if constexpr (kSteps > 1) {
    multiply(queries, side.keys);
  } else {
    for (int64_t d = 0; d < dim; d += kDepth) multiply(queries + d * kSide, side.keys + d);
    unrolled<0, kSide>(meanwhile);
  }
  unrolled<0, R>([&](auto r) __attribute__((always_inline)) { tile_store<r>(scores + r * kSide * kSide, 64); });
}

// Scores of sides of keys by R tiles of heads, stored or, where others' are there, added. raw: [2, R, kSide, kSide].
template <int R, int kSteps>
[[gnu::noinline]] void score_sides(const bf16* queries, int64_t dim, const Side* sides, int64_t count,
                                   const float* head_weights, const uint32_t* mask, bool add, float* raw, float* scores,
                                   LinesAhead& ahead) {
  Vec weights[R];
  unrolled<0, R>([&](auto r) __attribute__((always_inline)) { weights[r] = load(head_weights + r * kLanes); });
  const __m512i last = _mm512_loadu_si512(mask + (R - 1) * kLanes);
  const __mmask16 used = _mm512_test_epi32_mask(last, last);
  const auto place = [&](int64_t i) { return raw + i % 2 * R * kSide * kSide; };
  Vec sums[kSide];
  const auto weigh = [&](const float* key, auto n) __attribute__((always_inline)) {
    sums[n] = Vec{};
    unrolled<0, R>([&](auto r) __attribute__((always_inline)) {
      const __m512 score = (__m512)load(key + n * kSide + r * kSide * kSide);
      sums[n] += weights[r] * (Vec)_mm512_maskz_max_ps(r < R - 1 ? 0xffff : used, __m512{}, score);  // NaN stays
    });
    keep_here(sums[n]);
  };
  const auto keep = [&](const Side& side) __attribute__((always_inline)) {
    float* to = scores + side.at;
    const Vec found = sum_lanes(sums);
    store(to, add ? load(to) + found : found);
  };
  LinesAhead::Steps steps = ahead.steps();
  std::fill_n(place(1), R * kSide * kSide, 0.0f);  // weighed beside the first keys, and dropped
  for (int64_t i = 0; i <= count; ++i) {
    const float* before = place(i + 1);
    const auto weigh_before = [&](auto n) __attribute__((always_inline)) { weigh(before, n); };
    if (i < count) {
      score_side_in_tiles<R, kSteps>(queries, dim, sides[i], place(i), steps, weigh_before);
    } else {
      unrolled<0, kSide>(weigh_before);
    }
    if (i > 0) keep(sides[i - 1]);
  }
  ahead.went(steps);
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
    const int64_t queries = std::min(kQueries, call.q.size(0));
    queries_.want(floats_for(queries * width_ * dim_));
    rows_.want(floats_for(std::max(kMostTiles * kTile, width_) * dim_));
    if (dim_ > call.q.size(2)) std::fill(row(0), row(std::max(kMostTiles * kTile, width_)), Element{});  // and stays 0
    weights_.want_zeros(queries * width_);
    raw_.want(kTile * width_);
    scores_.want(kMostTiles * kTile);
    mask_.assign(width_, 0);
    std::fill_n(mask_.begin(), heads_, ~0u);
  }

  void run(const IndexTask& task, const std::vector<int64_t>& visible, Tiles& tiles, Collector& collector) {
    for (int64_t i = 0; i < task.queries; ++i) start(task.first_token + i, i);
    [[maybe_unused]] const Scope scope{};
#if defined(__AVX512BF16__)
    most_tiles_ = has_tiles() ? kMostTiles : 1;
#endif
    Batch batches[2];
    const auto fill = [&](Batch& batch) {
      for (batch.tiles = 0; batch.tiles < most_tiles_; ++batch.tiles) {
        tiles.next(batch.tile[batch.tiles]);
        if (batch.tile[batch.tiles].count == 0) break;
      }
    };
    fill(batches[0]);
    for (int turn = 0; batches[turn].tiles > 0; turn ^= 1) {
      const Batch& batch = batches[turn];
      fill(batches[turn ^ 1]);
      prefetch(batches[turn ^ 1], task.queries);
#if defined(__AVX512BF16__)
      num_sides_ = 0;
#endif
      for (int64_t t = 0; t < batch.tiles; ++t) load(batch.tile[t], t * kTile);
      for (int64_t i = 0; i < task.queries; ++i) {
        score(i, batch);
        for (int64_t t = 0; t < batch.tiles; ++t) {
          const KeyTile& tile = batch.tile[t];
          for (int64_t s = 0; s < tile.segments; ++s) {
            const Segment& part = tile.segment[s];
            const int64_t count = std::min(part.count, visible[task.first_token + i] - part.first);
            if (count > 0) collector.take(i, scores_ + t * kTile + part.at, count, part.first);
          }
        }
      }
    }
  }

 private:
  static constexpr int64_t kSide = 16;  // keys that are multiplied together: a tile's rows
#if defined(__AVX512BF16__)
  static constexpr int64_t kMostTiles = kTiles<T> ? 4 : 1;
#else
  static constexpr int64_t kMostTiles = 1;
#endif

  // Tiles of keys that one query meets after the other.
  struct Batch {
    int64_t tiles = 0;
    KeyTile tile[kMostTiles];
  };

  static constexpr int64_t floats_for(int64_t elements) {
    return elements * static_cast<int64_t>(sizeof(Element)) / static_cast<int64_t>(sizeof(float));
  }

  Element* row(int64_t n) { return reinterpret_cast<Element*>(rows_.data()) + n * dim_; }
  Element* query(int64_t i) { return reinterpret_cast<Element*>(queries_.data()) + i * width_ * dim_; }

  // Keys of a tile, kSide at a time: from where they lie, or as copies.
  void load(const KeyTile& tile, int64_t at) {
    const Run *run = tile.run, *end = run + tile.runs;
    for (int64_t n = 0; n < tile.count; n += kSide) {
      while (run < end && run->end() <= n) ++run;
#if defined(__AVX512BF16__)
      if constexpr (std::is_same_v<Keys, PlainKeys<bf16>> && kTiles<T>) {
        if (keys_.in_place() && run < end && run->at <= n && n + kSide <= run->end()) {
          sides_[num_sides_++] = {keys_.row(run->block, run->slot + n - run->at), keys_.slot_stride(), at + n};
          continue;
        }
      }
      if constexpr (kTiles<T>) sides_[num_sides_++] = {row(at + n), dim_, at + n};
#endif
      for (const Run* part = run; part < end && part->at < n + kSide; ++part) {
        for (int64_t k = std::max(n, part->at); k < std::min(n + kSide, part->end()); ++k)
          scale_[at + k] = keys_.load(part->block, part->slot + k - part->at, row(at + k));
      }
    }
  }

  // A query's heads into the order that the loops want.
  void start(int64_t token, int64_t i) {
    const T* data = static_cast<const T*>(call_.q.const_data_ptr()) + token * call_.q.stride(0);
    const int64_t size = call_.q.size(2);
    std::fill(row(heads_), row(width_), Element{});
    for (int64_t head = 0; head < heads_; ++head)
      load_row(data + head * call_.q.stride(1), call_.q.stride(2), size, row(head));
#if defined(__AVX512BF16__)
    if constexpr (kTiles<T>) {
      for (int64_t head = 0; head < width_; head += kSide) pack_queries(row(head), dim_, query(i) + head * dim_);
    } else
#endif
    {
      for (int64_t head = 0; head < width_; ++head) {
        for (int64_t d = 0; d < dim_; ++d) query(i)[d * width_ + head] = row(head)[d];
      }
    }
    std::copy_n(all_weights_.data() + token * heads_, heads_, weights_ + i * width_);
  }

  // What the loops over one query and a batch of keys take.
  int64_t steps_of(const Batch& batch) const {
    const int64_t strips = width_ / kLanes;
#if defined(__AVX512BF16__)
    if constexpr (kTiles<T>) {
      int64_t sides = 0;
      for (int64_t t = 0; t < batch.tiles; ++t) sides += (batch.tile[t].count + kSide - 1) / kSide;
      return sides * (has_tiles() ? strips : strips + (strips % 4 == 3)) * (dim_ / kDepth);
    }
#endif
    return strips * (dim_ / 32);
  }

  void prefetch(const Batch& batch, int64_t queries) {
    const auto ask = [&](auto& ahead) {
      ahead.clear();
      for (int64_t t = 0; t < batch.tiles; ++t) {
        const KeyTile& tile = batch.tile[t];
        for (int64_t r = 0; r < tile.runs; ++r)
          keys_.prefetch(tile.run[r].block, tile.run[r].slot, tile.run[r].count, ahead);
      }
      ahead.finish_within(std::max<int64_t>(1, queries * steps_of(batch)));
    };
#if defined(__AVX512BF16__)
    if (kTiles<T> && has_tiles()) return ask(lines_);
#endif
    ask(ahead_);
  }

  // Scores of a batch for one query; -inf where there is no key.
  void score(int64_t i, const Batch& batch) {
#if defined(__AVX512BF16__)
    if constexpr (kTiles<T>) {
      has_tiles() ? score_in_tiles(i) : score_in_vectors(i);
    } else
#endif
    {
      const int64_t count = batch.tile[0].count;
      score_many_rows(query(i), call_.q.size(2), row(0), dim_, count, raw_, width_, ahead_);
      weigh_heads(raw_, count, width_, 1, width_, weights_ + i * width_, mask_.data(), scores_);
    }
    for (int64_t t = 0; t < batch.tiles; ++t) finish(batch.tile[t], t * kTile);
  }

  void finish(const KeyTile& tile, int64_t at) {
    if (Keys::kScaled) {
      for (int64_t n = at; n < at + tile.count; ++n) scores_[n] *= scale_[n];
    }
    int64_t n = 0;
    for (int64_t r = 0; r < tile.runs; ++r) {
      std::fill(scores_ + at + n, scores_ + at + tile.run[r].at, -kInfinity);
      n = tile.run[r].end();
    }
    std::fill(scores_ + at + n, scores_ + at + tile.count, -kInfinity);
  }

#if defined(__AVX512BF16__)
  static constexpr int64_t kHeads = 4 * kSide;  // whose sums stay in registers

  // function(R, head): R vectors of heads at a time.
  template <class F>
  void each_heads(F&& function) {
    for (int64_t head = 0; head < width_; head += kHeads) {
      switch (std::min(kHeads, width_ - head) / kSide) {
        case 1:
          function(std::integral_constant<int, 1>{}, head);
          break;
        case 2:
          function(std::integral_constant<int, 2>{}, head);
          break;
        case 3:
          function(std::integral_constant<int, 3>{}, head);
          break;
        default:
          function(std::integral_constant<int, 4>{}, head);
      }
    }
  }

  void score_in_tiles(int64_t i) {
    if (width_ == 0) std::fill_n(scores_.data(), kMostTiles * kTile, 0.0f);  // no head has a say
    each_heads([&](auto r, int64_t head) {
      const auto score = dim_ == 4 * kDepth ? score_sides<r, 4> : score_sides<r, 1>;
      score(query(i) + head * dim_, dim_, sides_, num_sides_, weights_ + i * width_ + head, mask_.data() + head,
            head > 0, raw_, scores_, lines_);
    });
  }

  void score_in_vectors(int64_t i) {
    for (const Side* side = sides_; side < sides_ + num_sides_; ++side) {
      each_heads([&](auto r, int64_t head) {
        score_side_in_vectors<r>(query(i) + head * dim_, dim_, side->keys, side->stride, raw_ + head * kSide, ahead_);
      });
      weigh_heads(raw_, kSide, kSide, kSide, width_, weights_ + i * width_, mask_.data(), scores_ + side->at);
    }
  }

  LinesAhead lines_;
  Side sides_[kMostTiles * kTile / kSide];
  int64_t num_sides_ = 0;
#endif

  const IndexerCall& call_;
  const Keys& keys_;
  const std::vector<float>& all_weights_;
  const int64_t heads_, dim_, width_;  // dims rounded up to pairs of vectors, heads to vectors
  int64_t most_tiles_ = 1;             // of a batch
  Floats queries_;                     // [kQueries, width, dim]
  Floats rows_;                        // keys of a batch [kMostTiles, kTile, dim]
  Floats weights_, raw_, scores_;      // [kQueries, width], [kTile, width], [kMostTiles, kTile]
  float scale_[kMostTiles * kTile] = {};
  std::vector<uint32_t> mask_;
  Prefetcher ahead_;
};

// -------------------------------------------------------------------------------------------------------- the whole

std::vector<float> read_weights(const Tensor& weights) {
  const int64_t tokens = weights.size(0), heads = weights.size(1);
  std::vector<float> out(tokens * heads);
  with_dtype(weights, "weights", [&](auto zero) {
    const auto* data = static_cast<const decltype(zero)*>(weights.const_data_ptr());
    for (int64_t t = 0; t < tokens; ++t)
      load_row(data + t * weights.stride(0), weights.stride(1), heads, out.data() + t * heads);
  });
  return out;
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

}  // namespace

void score_keys(const IndexerCall& call, const IndexRows& rows, const std::vector<IndexTask>& tasks,
                const TilesOf& tiles_of, const MakeCollector& make_collector) {
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
      const std::unique_ptr<Collector> collector = make_collector();
      for (size_t i = taken++; i < tasks.size(); i = taken++) {
        collector->begin(tasks[i]);
        worker.run(tasks[i], rows.visible, *tiles_of(tasks[i]), *collector);
        collector->end(tasks[i]);
      }
    });
  });
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_PART_BF16
