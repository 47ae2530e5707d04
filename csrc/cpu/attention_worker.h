// Attention over a paged cache: what paged_attention and mla_attention share.
//
// The work is cut into tasks: some queries of one sequence x some kv heads x a range of keys. A task walks its keys in
// tiles of kTile and keeps, for each row (a query and a head), a running maximum, a sum of weights and a weighted sum
// of values. All query heads of a kv head are rows of one task, so a cached row is read once for all of them. Where a
// sequence has few queries, its keys are cut into parts, which are merged in order. What a row comes to depends on its
// own sequence alone, neither on the batch nor on the number of threads: the length decides where keys are cut.
//
// Codes of a quantized cache become numbers a tile at a time, and in registers where rows are read in place. A factor
// that a whole row has (cached_rows.h) is left out of it there and goes into its logits, or its weights.
//
// An op brings a Source, which knows what a query, a key and a value are:
//
//   int64_t heads(), kv_heads(), dim(), value_dim();
//   static constexpr bool kValuesAreKeys;            a value is the first value_dim numbers of its key
//   const CachedRows<T>& keys(), &values();          values where value_dim is not 0. With kValuesAreKeys keys() are
//   the
//                                                    first value_dim numbers of a key
//   static constexpr bool kInPlace;                  rows may lie so that they are read there, by keys() and values():
//   bool in_place();                                 whether these do; only where some may
//   bool stored();                                   keys are as the cache holds them, but for a factor
//   void load_query(token, head, E* out);            E is float, or T
//   void load_key(keys, n, head, RowBuffer&, E* out), load_value(..);   E is float, or exact_bf16
//   void locate(Keys&, int64_t n, int64_t count);    from key n's block and slot: where its rows are, and those of the
//                                                    keys that follow it there
//   bool in_order();                                 positions are indices within the sequence
//   int64_t position(block, slot);                   where they are not
//   StoredRows<T> part(keys, i);                     rows of keys, or the two parts of them, as a cache holds them
//   void prefetch(keys, Wanted, Prefetcher&);        names rows that will be wanted next
//   bool bias(keys, head, float* out);               what is added to the logits of each key; false: nothing
#pragma once

#include <unistd.h>

#include "cached_rows.h"
#if defined(__AVX512BF16__)
#include "attention_nibble_pairs.h"
#endif

namespace kvbackend::KVBACKEND_ISA {

// ----------------------------------------------------------------------------------------------------------- a task

// Of a core's second cache, as the system knows it.
inline int64_t l2_bytes() {
  int64_t bytes = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
  bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
  return bytes > 0 ? bytes : 512 << 10;
}

// Of whole vectors.
inline bool all_finite(const float* numbers, int64_t size) {
  Vec zeros{};
  for (int64_t i = 0; i < size; i += kLanes) zeros += 0.0f * load(numbers + i);
  return sum_lanes(zeros, zeros, zeros, zeros)[0] == 0;
}

#if defined(__AVX512BF16__)
template <class T>
constexpr bool kTiles = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool kTiles = false;
constexpr int64_t kSide = kLanes;  // rows of a strip
inline bool has_tiles() { return false; }
constexpr int64_t kPackedValues = 0, kNarrowKeys = 1, kNibbleDims = 1;
inline int64_t scaled_pairs(int64_t) { return 0; }
#endif

// What a thread will work on next, if anything: the first keys of that are asked for with the last ones of the task at
// hand.
struct Upcoming {
  Task task{};
  const Sequence* sequence = nullptr;
};
inline Upcoming nothing() { return {}; }

// What a thread needs to work on tasks, one after the other. KeyPages says where a sequence's keys are, as Pages does.
template <class T, class Source, class KeyPages = Pages>
class Worker {
 public:
  Worker(const Source& source, const KeyPages& pages, const LogitRule& rule)
      : source_(source),
        pages_(pages),
        rule_(rule),
        dim_(round_up(source.dim(), kPair)),
        value_dim_(round_up(source.value_dim(), kPair)) {
    queries_.want(kRows * dim_);
    sums_.want(kRows * value_dim_);
    peak_.want(kRows * kLanes);
    total_.want(kRows * kLanes);
    decay_.want(kRows * kLanes);
    scores_.want(std::max(kMostKeys, kApart) * kRows);
    bias_.want(kMostKeys);
    factors_.want(kMostKeys);
    row_.want(std::max(dim_, value_dim_));
  }

  // Calls finish(token, head, peak, total, values) for every row, and before that upcoming().
  template <class Next, class F>
  void run(const Task& task, const Sequence& sequence, Next&& upcoming, F&& finish) {
    begin(task, sequence);
    add_up(upcoming);
    left_.assign(task.heads * task.rows(), true);
    if (finish_rows(finish)) return;
    asked_ = Asked::nothing;
    begin(task, sequence, false);
    add_up(upcoming);
    finish_rows(finish);
  }

  // In two steps, for who wants the scores alone: first the queries,
  void begin(const Task& task, const Sequence& sequence, bool beside = true) {
    task_ = &task;
    sequence_ = &sequence;
    width_ = width_of(task.rows());
    tiled_ = kTiles<T> && source_.stored() && width_ >= kSide;
    if constexpr (Source::kInPlace) in_place_ = source_.in_place() && width_ <= kFewRows;
    rows_in_lanes_ = !in_place_ && width_ >= kLanes;
    const auto all_rows = [&](auto&& are) { return are(source_.keys()) && (value_dim_ == 0 || are(source_.values())); };
    const bool narrow = beside && kTiles<T> && in_place_ && width_ >= kNarrow && has_tiles();
    nibbles_ = false;
    if constexpr (kNarrowed) {
      nibbles_ = in_place_ && (narrow || source_.dim() % kNibbleDims == 0) &&
                 all_rows([](const auto& rows) { return rows.nibbles(); });
    }
    paired_ = kTiles<T> && in_place_ && (nibbles_ || all_rows([](const auto& rows) { return !rows.grouped(); }));
    narrow_ = narrow && paired_;
    beside_ = beside && tiled_ && width_ == kSide && has_tiles();
    scales_later_ = false;
    head_scores_ = scores_;
    want_keys();
    bounds_.clear();
    all_ = {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
    for (int64_t i = 0; i < task.queries; ++i) {
      bounds_.push_back(rule_.bound(position(task.first_query + i)));
      all_ = {std::max(all_.after, bounds_.back().after), std::min(all_.last, bounds_.back().last)};
    }
    const bool whole = width_ == task.rows() && dim_ == source_.dim();
    if (!tiled_ && !whole) std::fill_n(queries_.data(), task.heads * width_ * dim_, 0.0f);
    for (int64_t head = 0; head < task.heads; ++head) tiled_ ? start_tiled(head) : start_queries(head);
  }

  // then function(keys, head) for each tile of keys and kv head of the task, with its scores made. Keys, then heads:
  // one tile's rows of all heads lie side by side in memory. Meanwhile the next rows are fetched.
  template <class F>
  void walk(F&& function) {
    asked_ = Asked::nothing;
    walk(nothing, function);
  }

 private:
  template <class Next, class F>
  void walk(Next&& upcoming, F&& function) {
    const Task& task = *task_;
    std::optional<Scope> scope;
    if (tiled_ || narrow_) scope.emplace(tile_shapes());
    const int64_t tile = tiled_ ? keys_at_once() : narrow_ ? kNarrowKeys : in_place_ ? few_keys() : kTile;
    const Asked manner = narrow_                  ? Asked::narrow
                         : sliced()               ? Asked::slices
                         : tiled_ && !has_tiles() ? Asked::strips
                                                  : Asked::nothing;
    Keys found[3];                   // the tile before, this one and the next
    bool wanted = asked_ == manner;  // whether the tile at hand has been asked for
    asked_ = Asked::nothing;
    next_task_ = task_;
    if constexpr (kNarrowed) forget_next_rows();
    locate(task, *sequence_, task.begin, tile, found[0]);
    if constexpr (kNarrowed) {
      if (narrow_ && !wanted) want_narrow_at_once(found[0]);
    }
    if (manner == Asked::strips && !wanted) want_at_once(found[0]);
    for (int64_t begin = task.begin, turn = 0; begin < task.end; begin += tile, turn = (turn + 1) % 3) {
      const Keys& keys = found[turn];
      Keys& next = found[(turn + 1) % 3];
      locate(task, *sequence_, begin + tile, tile, next);
      if (begin + tile >= task.end) {
        if (later_ = upcoming(); later_.sequence) {
          next_task_ = &later_.task;
          asked_ = manner;
          locate(later_.task, *later_.sequence, later_.task.begin, tile, next);
        }
      }
      if (keys.count == 0) {
        if constexpr (kNarrowed) finish_due();
        wanted = false;
        asked_ = Asked::nothing;
        continue;
      }
      if constexpr (Source::kInPlace) {
        if (sliced()) score_slices(keys, next, wanted);
        wanted = true;
      }
      for (int64_t head = 0; head < task.heads; ++head) {
        if (narrow_) {
          if constexpr (kNarrowed) start_narrow(keys, next, head);
        } else if (sliced()) {
          if constexpr (Source::kInPlace) ready_scores(keys, head);
        } else {
          want_next(keys, next, head);
          score(keys, head);
        }
        adjust(keys, head);
        function(keys, head);
      }
      if constexpr (Source::kInPlace) {
        if (sliced() && weighs_) weigh_slices(keys);
      }
    }
    if constexpr (kNarrowed) finish_due();
  }

 public:
  // The scores of the last tile, in strips: function(scores [keys, width], width, first), whose columns are the rows
  // from `first` on.
  template <class F>
  void strips(F&& function) {
    if (!tiled_) return function(head_scores_, width_, int64_t{0});
    for (int64_t row = 0; row < width_; row += kSide) function(scores_ + row * kMostKeys, kSide, row);
  }

  // One of them: of key n and a row.
  float& score_at(int64_t n, int64_t row) {
    return tiled_ ? scores_[(row / kSide * kMostKeys + n) * kSide + row % kSide] : head_scores_[n * width_ + row];
  }

  // Whether key n is one that a row attends to.
  bool sees(const Keys& keys, int64_t n, int64_t row) const {
    const Bound& bound = bounds_[row / task_->members];
    return keys.position[n] > bound.after && keys.position[n] <= bound.last;
  }

  int64_t width() const { return width_; }
  int64_t state_width() const { return std::max<int64_t>(width_, kLanes); }
  int64_t token(int64_t row) const { return sequence_->first_token + task_->first_query + row / task_->members; }
  int64_t query_head(int64_t head, int64_t row) const {
    const int64_t group = source_.heads() / source_.kv_heads();
    return (task_->first_head + head) * group + task_->first_member + row % task_->members;
  }

 private:
  static constexpr int64_t kApart = kTile + kManySums;              // from one head's scores to the next, in keys
  static constexpr bool kNarrowed = kTiles<T> && Source::kInPlace;  // where there may be few rows in tiles

  // A task's peaks, totals and sums.
  template <class Next>
  void add_up(Next&& upcoming) {
    start_sums();
    // Not where sums alone are wanted: who divides by them makes the scores again, and they shall be the same.
    scales_later_ = unscaled() && value_dim_ > 0 && rule_.scale > 0 && rule_.softcap == 0;
    weighs_ = value_dim_ > 0;
    walk(upcoming, [&](const Keys& keys, int64_t head) {
      if (tiled_ && value_dim_ > 0) {
        soften_tiled(keys, head);
        return weigh_tiled(keys, head);
      }
      if constexpr (kNarrowed) {
        if (narrow_ && weighs_) return soften_narrow_head(keys, head);
      }
      strips([&](float* scores, int64_t width, int64_t first) {
        const int64_t row = head * state_width() + first;
        soften(scores, keys.count, width, scales_later_ ? rule_.scale : 1.0f, tiled_ || narrow_ ? kSlack : 0.0f,
               peak_ + row, total_ + row, decay_ + (sliced() ? row : first));
      });
      sliced() ? ready_weights(keys, head) : weigh(keys, head);
    });
    weighs_ = false;
  }

  // What is fetched while one kv head of a tile is worked on: the rows of the next head.
  void want_next(const Keys& keys, const Keys& next, int64_t head) {
    const bool last = head + 1 == task_->heads;
    const Keys& tile = last ? next : keys;
    ahead_.clear(!has_tiles());
    source_.prefetch(tile, {0, tile.count, last ? next_task_->first_head : task_->first_head + head + 1, 1}, ahead_);
    const int64_t steps = tiled_ ? steps_of(keys.count) : steps_in_vectors(keys.count);
    if (steps > 0) ahead_.finish_within(steps, tiled_ && has_tiles() && width_ == kSide ? 4 : 1);
  }

  // A thread's first tile, which nothing else can be worked on meanwhile.
  void want_at_once(const Keys& keys) {
    ahead_.clear(true);
    source_.prefetch(keys, {0, keys.count, task_->first_head, 1}, ahead_);
    ahead_.finish_within(1);
    ahead_.step();
  }

  // Where keys go that are not read in place. What rounding up adds to their rows stays 0.
  void want_keys() {
    if (tiled_) {  // bf16, two in a float
      want_rows(tile_keys_, kMostKeys * dim_ / 2, source_.dim());
    } else if (narrow_) {
      narrow_keys_.want(kNarrowKeys * dim_ / 2);
      if (nibbles_) {
        products_.want(2 * kFewRows * dim_);
        key_scales_across_.resize(source_.kv_heads() * 2 * dim_);
        value_scales_across_.resize(source_.kv_heads() * 2 * value_dim_);
      }
    } else if (!in_place_) {
      want_rows(key_rows_, kTile * apart(dim_), source_.dim());
    }
    key_buffer_.offset = value_buffer_.offset = -1;
  }

  // From one copied row to the next, in floats: rows a power of two apart would share few sets of L1.
  static int64_t apart(int64_t dim) { return dim + kLine / static_cast<int64_t>(sizeof(float)); }

  static void want_rows(Floats& rows, int64_t size, int64_t dim) {
    dim % kPair ? rows.want_zeros(size) : rows.want(size);
  }

  // No value seen yet; and where values go that are not read in place.
  void start_sums() {
    if (tiled_) {
      packed_values_.want(kPackedValues / 2);
      packed_weights_.want(kMostKeys * kRows / 2);
      if (!Source::kValuesAreKeys) want_rows(tile_values_, kMostKeys * value_dim_ / 2, source_.value_dim());
    } else if (narrow_) {
      narrow_values_.want(kNarrowKeys * value_dim_ / 2);
      narrow_weights_.want(std::max(2 * kNarrowKeys, value_dim_) * kFewRows);
    } else if (nibbles_) {
      scaled_weights_.want(scaled_pairs(value_dim_));
    } else if (!in_place_ && !Source::kValuesAreKeys) {
      want_rows(value_rows_, kTile * apart(value_dim_), source_.value_dim());
    }
    std::fill_n(sums_.data(), task_->heads * width_ * value_dim_, 0.0f);
    std::fill_n(total_.data(), task_->heads * state_width(), 0.0f);
    std::fill_n(peak_.data(), task_->heads * state_width(), -kInfinity);
  }

  // Queries of one kv head into the order that the loops want, scaled but for pairs.
  void start_queries(int64_t head) {
    float* queries = queries_ + head * width_ * dim_;
    if constexpr (kTiles<T>) {
      T *packed = reinterpret_cast<T*>(queries), *rows = narrow_ ? reinterpret_cast<T*>(narrow_keys_.data()) : packed;
      if (narrow_) std::memset(static_cast<void*>(rows), 0, width_ * dim_ * sizeof(T));
      for (int64_t row = 0; paired_ && row < task_->rows(); ++row) {
        const bool ordered = nibbles_ && !narrow_;
        T* query = ordered ? reinterpret_cast<T*>(row_.data()) : rows + row * dim_;
        source_.load_query(token(row), query_head(head, row), query);
        if (ordered) order_query(query, dim_, row, packed);
      }
      if (narrow_) pack_narrow(rows, packed);
    }
    for (int64_t row = 0; !paired_ && row < task_->rows(); ++row) {
      source_.load_query(token(row), query_head(head, row), row_.data());
      for (int64_t d = 0; d < source_.dim(); ++d) row_[d] *= rule_.scale;
      std::fill(row_ + source_.dim(), row_ + dim_, 0.0f);
      if (rows_in_lanes_) {
        for (int64_t d = 0; d < source_.dim(); ++d) queries[d * width_ + row] = row_[d];
      } else {
        const auto arrange = in_place_ && source_.keys().evens_first() ? to_pairs<bf16> : to_pairs<float>;
        arrange(row_, dim_, queries + row * dim_);
      }
    }
  }

  int64_t position(int64_t query) const {
    const int64_t index = sequence_->start + query;
    if (index < 0 || source_.in_order()) return index;
    int64_t own = 0;
    pages_.visit_runs(sequence_->index, index, index + 1,
                      [&](int64_t, int64_t, int64_t block, int64_t slot) { own = source_.position(block, slot); });
    return own;
  }

  void locate(const Task& task, const Sequence& sequence, int64_t begin, int64_t size, Keys& keys) const {
    keys.count = 0;
    const int64_t end = std::min(begin + size, task.end);
    pages_.visit_runs(sequence.index, begin, end, [&](int64_t index, int64_t count, int64_t block, int64_t slot) {
      const int64_t n = keys.count;
      for (int64_t i = 0; i < count; ++i) {
        keys.index[n + i] = keys.position[n + i] = index + i;
        keys.block[n + i] = block;
        keys.slot[n + i] = slot + i;
      }
      for (int64_t i = 0; !source_.in_order() && i < count; ++i)
        keys.position[n + i] = source_.position(block, slot + i);
      source_.locate(keys, n, count);
      keys.count += count;
    });
    if (keys.count == 0) return;
    const auto [lowest, highest] = std::minmax_element(keys.position, keys.position + keys.count);
    keys.lowest = *lowest, keys.highest = *highest;
    if (tiled_ || narrow_) keys.look_for_runs();
    for (int64_t n = keys.count; narrow_ && n < round_up(keys.count, kNarrowKeys); ++n) {  // are fetched
      keys.key.row[n] = keys.key.row[keys.count - 1];
      if (value_dim_ > 0) keys.value.row[n] = keys.value.row[keys.count - 1];
    }
  }

  // Queries are as they were given.
  bool unscaled() const { return tiled_ || paired_; }

  // Keys of a tile whose rows are read in place: while they are worked on and the next ones fetched, half of L2 holds
  // the rows of all kv heads of both. The number depends on no batch and no thread.
  int64_t few_keys() const {
    static const int64_t l2 = l2_bytes();
    const int64_t key =
        source_.kv_heads() * (source_.keys().row_bytes() + (value_dim_ ? source_.values().row_bytes() : 0));
    return std::clamp(l2 / 4 / std::max<int64_t>(1, key) / 16 * 16, int64_t{16}, kTile);
  }

  // What the loops over a tile and a head take, but for the scores of many rows, which are few steps.
  int64_t steps_in_vectors(int64_t count) const {
    int64_t steps = 0;
    with_rows_at_once(width_, [&](auto r) {
      with_type_read(source_.keys(), [&](auto zero) {
        constexpr int64_t kKeys = kSumsOf<decltype(zero)> / r;
        if (!rows_in_lanes_) steps += (count + kKeys - 1) / kKeys * (dim_ / kPair);
      });
      if (value_dim_ > 0) {
        with_type_read(Source::kValuesAreKeys ? source_.keys() : source_.values(), [&](auto zero) {
          steps += blocks_of<r, decltype(zero)>(value_dim_) * steps_of_block(width_, count);
        });
      }
      steps *= width_ / r;
    });
    return steps;
  }

  // function(E{}): what the loops read.
  template <class F>
  void with_type_read(const CachedRows<T>& rows, F&& function) const {
    if constexpr (Source::kInPlace) {
      if (in_place_) return rows.with_type(function);
    }
    function(0.0f);
  }

  // Scores of a tile of keys and one kv head, scaled where queries are, and not masked.
  void score(const Keys& keys, int64_t head) {
    if (tiled_) return score_tiled(keys, head);
    for (int64_t n = 0; n < keys.count; ++n)
      source_.load_key(keys, n, task_->first_head + head, key_buffer_, key_rows_ + n * apart(dim_));
    if (rows_in_lanes_)
      return score_many_rows(queries_ + head * width_ * dim_, source_.dim(), key_rows_, apart(dim_), keys.count,
                             scores_, width_, ahead_);
    const float* key[kTile + kManySums];
    for (int64_t n = 0; n < keys.count + kManySums; ++n) key[n] = key_rows_ + std::min(n, keys.count - 1) * apart(dim_);
    const float* queries = queries_ + head * width_ * dim_;
    score_few_all(InFloats<false, float>{{}}, queries, dim_, key, keys.count, scores_, width_, {}, ahead_);
  }

  // In place and in vectors: a few keys after the other, of all heads, in the order of memory.
  bool sliced() const { return in_place_ && !narrow_; }

  float* scores_of(int64_t head) const { return scores_ + head * kApart * width_; }

  // The scores of a tile and all heads. While they are made and their values weighed, the next tile is fetched, and of
  // this one what is not worked on at once, unless that was.
  void score_slices(const Keys& keys, const Keys& next, bool wanted) {
    rows_ahead_.clear();
    const auto want = [&](const Task& task, const Keys& tile, int64_t first) {
      const Wanted all{0, tile.count, task.first_head, task.heads};
      source_.keys().prefetch_scales(tile.key, all, rows_ahead_);
      if (weighs_) source_.values().prefetch_scales(tile.value, all, rows_ahead_);
      const Wanted rows{std::min(first, tile.count), tile.count, task.first_head, task.heads};
      source_.keys().prefetch(tile.key.row, rows, rows_ahead_);
      if (weighs_) source_.values().prefetch(tile.value.row, all, rows_ahead_);
    };
    if (!wanted) want(*task_, keys, kValues);
    want(*next_task_, next, 0);
    rows_ahead_.finish_within(steps_in_vectors(keys.count) * task_->heads);
    with_rows(source_.keys(), keys.key, keys.count, key_scales_,
              [&](const auto* rows, auto grouped, const Groups& groups, int64_t head, const Heads& heads) {
                score_rows<grouped>(rows, keys.count, groups, head, heads);
              });
  }

  template <bool kGrouped, class E>
  void score_rows(const E* const* rows, int64_t count, const Groups& groups, int64_t head, Heads heads) {
    const float* queries = queries_ + head * width_ * dim_;
    heads.queries = width_ * dim_;
#if defined(__AVX512BF16__)
    if (paired_) heads.queries *= 2;  // of bfloat16
    const auto* halves = reinterpret_cast<const bf16*>(queries);
    if constexpr (kTiles<T> && kGrouped && std::is_same_v<E, e2m1x2>) {
      if (nibbles_)
        return score_all_nibbles(groups, halves, dim_, rows, count, scores_of(head), width_, heads, rows_ahead_);
    }
    if constexpr (kTiles<T> && !kGrouped) {
      if (paired_) return score_all_pairs(halves, dim_, rows, count, scores_of(head), width_, heads, rows_ahead_);
    }
#endif
    score_few_all(InFloats<kGrouped, E>{groups}, queries, dim_, rows, count, scores_of(head), width_, heads,
                  rows_ahead_);
  }

  // Those of one head.
  void ready_scores(const Keys& keys, int64_t head) {
    head_scores_ = scores_of(head);
    apply_factors(source_.keys(), keys.key, keys.count, head);
  }

  // The scores have become weights: the values of a tile and one kv head, weighed, are added to the sums.
  void weigh(const Keys& keys, int64_t head) {
    if (value_dim_ == 0) return;
    const float* value[kTile];
    for (int64_t n = 0; n < keys.count; ++n) {
      value[n] = Source::kValuesAreKeys ? key_rows_ + n * apart(dim_) : value_rows_ + n * apart(value_dim_);
      if (!Source::kValuesAreKeys)
        source_.load_value(keys, n, task_->first_head + head, value_buffer_, value_rows_ + n * apart(value_dim_));
    }
    weigh_all(InFloats<false, float>{{}}, scores_, width_, task_->rows(), value, keys.count, decay_,
              sums_ + head * width_ * value_dim_, value_dim_, {}, ahead_);
  }

  // A head's weights as weigh_slices wants them.
  void ready_weights(const Keys& keys, int64_t head) {
    if (value_dim_ == 0) return;
    apply_factors(source_.values(), keys.value, keys.count, head);
#if defined(__AVX512BF16__)
    if (paired_ && !nibbles_) pair_weights(head_scores_, keys.count, width_, head_scores_);
#endif
  }

  // weigh for all heads, whose weights are ready.
  void weigh_slices(const Keys& keys) {
    with_rows(source_.values(), keys.value, keys.count, value_scales_,
              [&](const auto* rows, auto grouped, const Groups& groups, int64_t head, const Heads& heads) {
                weigh_rows<grouped>(rows, keys.count, groups, head, heads);
              });
  }

  template <bool kGrouped, class E>
  void weigh_rows(const E* const* rows, int64_t count, const Groups& groups, int64_t head, const Heads& heads) {
    const float *weights = scores_of(head), *decay = decay_ + head * state_width();
    float* sums = sums_ + head * width_ * value_dim_;
#if defined(__AVX512BF16__)
    if constexpr (kTiles<T> && kGrouped && std::is_same_v<E, e2m1x2>) {
      if (nibbles_)
        return weigh_all_nibbles(groups, weights, width_, task_->rows(), rows, count, decay, sums, value_dim_,
                                 scaled_weights_, heads, rows_ahead_);
    }
    if constexpr (kTiles<T> && !kGrouped) {
      if (paired_)
        return weigh_all_pairs(weights, width_, task_->rows(), rows, count, decay, sums, value_dim_, heads,
                               rows_ahead_);
    }
#endif
    weigh_all(InFloats<kGrouped, E>{groups}, weights, width_, task_->rows(), rows, count, decay, sums, value_dim_,
              heads, rows_ahead_);
  }

  // function(rows, grouped, groups, head, heads): a tile's rows where they lie, from this head of the task on, and the
  // scales of their groups. All heads at once if they lie side by side, unless they have such scales and are not
  // `nibbles`: InFloats counts those from a tile's first key, of one head.
  template <class F>
  void with_rows(const CachedRows<T>& rows, const Places& places, int64_t count, Floats& scales, F&& function) {
    rows.with_type([&](auto zero) {
      using E = decltype(zero);
      if constexpr (!std::is_same_v<E, uint4x2>) {  // KIVI's codes are not read in place
        Heads heads;
        if (nibbles_) heads.values = kTile;  // so few bytes that a head after the other takes no longer
        if (rows.heads_together() && (nibbles_ || !rows.grouped()) && task_->heads > 1)
          heads = {task_->heads, nibbles_ ? kTile : kValues, rows.size() / kPerByte<E>, 0, kApart * width_,
                   state_width()};
        for (int64_t head = 0; head < task_->heads; head += heads.count) {
          const E *row[kTile + kManySums], *last = nullptr;
          const char* first = rows.row(0, task_->first_head + head);
          for (int64_t n = 0; n < count; ++n) row[n] = last = reinterpret_cast<const E*>(first + places.row[n]);
          std::fill_n(row + count, kManySums, last);
          const auto with_groups = [&](const auto* row) {
            if constexpr (kMayHaveGroups<E>) {
              if (rows.grouped())
                return function(row, std::true_type{}, load_groups(rows, places, count, head, heads.count, scales),
                                head, heads);
            }
            function(row, std::false_type{}, Groups{}, head, heads);
          };
          if constexpr (kHasFinite<E>) {
            if (all_finite(row, count, heads.count * rows.size())) {
              with_groups(as_finite(row));
              continue;
            }
          }
          with_groups(row);
        }
      }
    });
  }

  Groups load_groups(const CachedRows<T>& rows, const Places& places, int64_t count, int64_t head, int64_t heads,
                     Floats& scales) const {
    const int64_t most_heads = nibbles_ ? std::min(kRows, source_.kv_heads()) : 1;
    scales.want_zeros((kTile + kManySums) * most_heads * std::max(dim_, value_dim_) / kLanes + kLanes);
    rows.load_scales(places, count, task_->first_head + head, heads, scales);
    const int64_t of_head = rows.size() / rows.span();
    return {scales, heads * of_head, of_head, __builtin_ctzll(rows.span())};
  }

  // Scores, or weights, times what was left out of the rows that they belong to.
  void apply_factors(const CachedRows<T>& rows, const Places& places, int64_t count, int64_t head) {
    if (!rows.has_factor()) return;
    load_factors(rows, places, count, head);
    multiply_keys(head_scores_, count, width_, factors_);
  }

  void load_factors(const CachedRows<T>& rows, const Places& places, int64_t count, int64_t head) {
    rows.load_factors(places, count, task_->first_head + head, factors_);
  }

#if defined(__AVX512BF16__)
  using Scope = TileScope;
  TileShapes tile_shapes() const { return {tiled_ ? kSide : width_, nibbles_}; }

  // Keys of a tile: where many strips multiply in AMX's tiles, so many that sums are seldom loaded, else so few that
  // packed values stay in L1.
  int64_t keys_at_once() const { return has_tiles() && width_ > kSide ? kMostKeys : kMostKeys / 2; }

  static bf16* as_bf16(float* data) { return reinterpret_cast<bf16*>(data); }
  static exact_bf16* as_exact(bf16* data) { return reinterpret_cast<exact_bf16*>(data); }

  // Queries of one kv head as tiles, not scaled: so they are exact. The rows of keys serve as scratch.
  void start_tiled(int64_t head) {
    static_assert(kRows <= kMostKeys);
    bf16* rows = as_bf16(tile_keys_);
    const auto clear = [&](int64_t first) {
      std::memset(static_cast<void*>(rows + first * dim_), 0, (width_ - first) * dim_ * sizeof(bf16));
    };
    const bool rounded = dim_ > source_.dim();  // up: what that adds to queries and to keys is 0
    clear(rounded ? 0 : task_->rows());
    for (int64_t row = 0; row < task_->rows(); ++row) {
      if constexpr (kTiles<T>) source_.load_query(token(row), query_head(head, row), rows + row * dim_);
    }
    pack_head(rows, width_, dim_, as_bf16(queries_ + head * width_ * dim_));
    if (rounded) clear(0);
    for (int64_t row = 0; row < width_; ++row) {
      const Bound& bound = bounds_[std::min(row, task_->rows() - 1) / task_->members];
      after_[row] = bound.after, last_[row] = bound.last;
    }
  }

  // The same of few rows, or as the loops over codes of 4 bits want them.
  void pack_narrow(const bf16* rows, bf16* out) const {
    if (nibbles_) return pack_shared_queries(rows, width_, dim_, out);
    with_narrow(width_, [&](auto width) { pack_narrow_queries<width>(rows, dim_, turned(source_.keys()), out); });
  }

  static int64_t groups_of(const Keys& keys) { return (keys.count + kSide - 1) / kSide; }

  // Where keys lie, 16 at a time: in their cache, which tiles can read if they follow each other there, else copies, or
  // what codes stand for.
  void find_keys(const Keys& keys, int64_t head, KeyTiles& tiles) {
    const int64_t first_dims = source_.value_dim();
    tiles.parts = Source::kValuesAreKeys && first_dims % kDepth == 0 && first_dims < dim_ ? 2 : 1;
    tiles.part[0].dims = tiles.parts == 2 ? first_dims : dim_;
    tiles.part[1].dims = dim_ - first_dims;
    bool plain = tiles.parts == 2 || width_ < 4 * kSide;  // rows that many strips read again are worth a copy
    for (int i = 0; i < tiles.parts; ++i) {
      const StoredRows<T> stored = source_.part(keys, i);
      plain = plain && stored.rows && stored.rows->plain();
    }
    const int64_t groups = groups_of(keys);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t n = group * kSide;
      const bool there = plain && (keys.runs[group] || !has_tiles());
      for (int i = 0; there && i < tiles.parts; ++i) {
        const StoredRows<T> stored = source_.part(keys, i);
        set_rows(tiles.part[i], *stored.rows, stored.offsets, keys, group, head);
      }
      if (there) continue;
      bf16* rows = as_bf16(tile_keys_) + n * dim_;
      for (int64_t k = n; k < std::min(n + kSide, keys.count); ++k) {
        if constexpr (kTiles<T>)
          source_.load_key(keys, k, task_->first_head + head, key_buffer_, as_exact(rows + (k - n) * dim_));
      }
      clear_rows(rows, keys.count - n, dim_);
      for (int i = 0; i < tiles.parts; ++i) set_copies(tiles.part[i], rows + (i ? tiles.part[0].dims : 0), dim_, group);
    }
    for (int i = 0; i < tiles.parts; ++i) {  // blocks of up to 4 groups are read
      KeyTiles::Part& part = tiles.part[i];
      std::fill(part.row + groups * kSide, std::end(part.row), part.at(groups - 1));
      std::fill(part.row_bytes + groups, std::end(part.row_bytes), 0);
    }
  }

  // The rows of a group where the cache holds them; past the last one that again.
  void set_rows(KeyTiles::Part& part, const CachedRows<T>& rows, const int64_t* offsets, const Keys& keys,
                int64_t group, int64_t head) const {
    for (int64_t n = group * kSide; n < (group + 1) * kSide; ++n) {
      const char* row = rows.row(offsets[std::min(n, keys.count - 1)], task_->first_head + head);
      part.row[n] = reinterpret_cast<const bf16*>(row);
    }
    part.row_bytes[group] = keys.runs[group] ? rows.slot_bytes() : 0;
  }

  static void set_copies(KeyTiles::Part& part, const bf16* first, int64_t dims, int64_t group) {
    for (int64_t n = 0; n < kSide; ++n) part.row[group * kSide + n] = first + n * dims;
    part.row_bytes[group] = dims * static_cast<int64_t>(sizeof(bf16));
  }

  // Whether find_narrow's copies are turned.
  static bool turned(const CachedRows<T>& stored) {
    bool turned = false;
    stored.with_type([&](auto zero) { turned = kTurned<decltype(zero)>; });
    return turned;
  }

  // Rows of few keys: where they lie, else copies, which end in zeros.
  NarrowRows find_narrow(const CachedRows<T>& stored, const Keys& keys, const int64_t* offsets, int64_t head,
                         bf16* copies) {
    const char* first = stored.row(0, task_->first_head + head);
    NarrowRows found;
    for (int64_t group = 0; group < groups_of(keys); ++group) {
      const int64_t n = group * kSide;
      if (stored.plain() && keys.runs[group]) {
        found.at[group] = reinterpret_cast<const bf16*>(first + offsets[n]);
        found.row_bytes[group] = stored.slot_bytes();
        continue;
      }
      const int64_t dims = stored.size(), count = std::min(kSide, keys.count - n);
      bf16* to = copies + n * dims;
      keep_tiles_awake();
      stored.with_type([&](auto zero) {
        using E = decltype(zero);
        if constexpr (!std::is_same_v<E, uint4x2>) copy_halves<E>(first, offsets + n, count, dims, to, next_rows_);
      });
      clear_rows(to, count, dims);
      found.at[group] = to;
      found.row_bytes[group] = dims * static_cast<int64_t>(sizeof(bf16));
    }
    if (groups_of(keys) == 1) found.at[1] = found.at[0], found.row_bytes[1] = found.row_bytes[0];
    return found;
  }

  // Few rows of a tile and a kv head: scores. What a tile reads that vectors have just stored, or a vector of what a
  // tile has, is not there at once. So between them others are worked on: the values of the head before.
  void start_narrow(const Keys& keys, const Keys& next, int64_t head) {
    const bool last = head + 1 == task_->heads;
    last ? want_narrow(next, next_task_->first_head) : want_narrow(keys, task_->first_head + head + 1);
    want_scales(next, head);
    nibbles_ ? score_nibbles(keys, head) : score_numbers(keys, head);
    weigh_due();
    if (!source_.keys().has_factor()) return;
    load_narrow_factors(source_.keys(), keys.key, keys.count, head);
    with_narrow(width_, [&](auto width) { multiply_narrow<width>(scores_, factors_); });
  }

  // Scales of a part of the next tile, as many parts as there are heads.
  void want_scales(const Keys& next, int64_t head) const {
    const int64_t first = next.count * head / task_->heads, end = next.count * (head + 1) / task_->heads;
    source_.keys().prefetch_scales(next.key, first, end);
    if (weighs_) source_.values().prefetch_scales(next.value, first, end);
  }

  // Rows of numbers, or of codes with one scale.
  void score_numbers(const Keys& keys, int64_t head) {
    const NarrowRows rows = find_narrow(source_.keys(), keys, keys.key.row, head, as_bf16(narrow_keys_));
    ready_due();
    score_narrow(rows, dim_, as_bf16(queries_ + head * width_ * dim_), width_, scores_, next_rows_);
  }

  // Rows of codes whose dims share scales. Those of all heads change places at once.
  void score_nibbles(const Keys& keys, int64_t head) {
    const bf16* queries = as_bf16(queries_ + head * width_ * dim_);
    if (head == 0) {
      source_.keys().load_scales_across(keys.key, keys.count, task_->first_head, task_->heads,
                                        key_scales_across_.data());
      keep_tiles_awake();
      if (weighs_)
        source_.values().load_scales_across(keys.value, keys.count, task_->first_head, task_->heads,
                                            value_scales_across_.data());
    }
    key_pieces(source_.keys().row(0, task_->first_head + head), keys.key.row, dim_, as_bf16(narrow_keys_), next_rows_);
    multiply_pieces(as_bf16(narrow_keys_), dim_, queries, width_, products_, next_rows_);
    ready_due();
    with_narrow(width_, [&](auto width) {
      source_.keys().with_scales_of(key_scales_across_.data() + head * 2 * dim_,
                                    [&](const auto* scales) { add_products<width>(products_, scales, dim_, scores_); });
    });
  }

  void load_narrow_factors(const CachedRows<T>& rows, const Places& places, int64_t count, int64_t head) {
    load_factors(rows, places, count, head);
    std::fill(factors_ + count, factors_ + kNarrowKeys, 0.0f);
  }

  void forget_next_rows() { next_rows_ = {}; }

  // Those of a task's first head.
  void want_narrow_at_once(const Keys& keys) {
    want_narrow(keys, task_->first_head);
    next_rows_.finish();
  }

  // What the loops over keys, or values, of a head take.
  static int64_t steps_of_narrow(const CachedRows<T>& rows, int64_t dims) {
    return dims / kDepth + (rows.nibbles() ? dims / kDepth : rows.plain() ? 0 : kNarrowKeys);
  }

  // The rows of the next head are fetched meanwhile.
  void want_narrow(const Keys& keys, int64_t head) {
    const CachedRows<T>& values = weighs_ ? source_.values() : source_.keys();
    next_rows_ = {};
    if (keys.count == 0) return;
    next_rows_ = {source_.keys().row(0, head),
                  keys.key,
                  values.row(0, head),
                  weighs_ ? keys.value : keys.key,
                  std::max(source_.keys().row_bytes(), values.row_bytes()),
                  steps_of_narrow(source_.keys(), dim_) + (weighs_ ? steps_of_narrow(values, value_dim_) : 0)};
  }

  // Weights of a head, whose values are weighed later.
  void soften_narrow_head(const Keys& keys, int64_t head) {
    due_head_ = head;
    due_keys_ = &keys;
    const int64_t row = head * state_width();
    const auto soften = [&](auto width, const auto& factor) {
      NarrowWeights<width> weights;
      soften_narrow<width>(scores_, keys.count, scales_later_ ? rule_.scale : 1.0f, kSlack, factor, peak_ + row,
                           total_ + row, decay_, weights);
      if (nibbles_) {
        return source_.values().with_scales_of(
            value_scales_across_.data() + head * 2 * value_dim_,
            [&](const auto* scales) { scale_weights<width>(weights, scales, value_dim_, as_bf16(narrow_weights_)); });
      }
      place_beside<width>(weights, narrow_weights_);
    };
    with_narrow(width_, [&](auto width) {
      if (!source_.values().has_factor()) return soften(width, [](Vec weights, int) { return weights; });
      load_narrow_factors(source_.values(), keys.value, keys.count, head);
      soften(width, [&](Vec weights, int i) { return weights * repeat<width>(factors_ + i * kLanes / width); });
    });
  }

  // The values of the head before, if any.
  void ready_due() {
    if (due_head_ < 0) return;
    if (nibbles_) {
      const char* first = source_.values().row(0, task_->first_head + due_head_);
      return value_pieces(first, due_keys_->value.row, value_dim_, as_bf16(narrow_values_), next_rows_);
    }
    due_values_ = find_narrow(source_.values(), *due_keys_, due_keys_->value.row, due_head_, as_bf16(narrow_values_));
  }

  void finish_due() {
    ready_due();
    weigh_due();
  }

  void weigh_due() {
    if (due_head_ < 0) return;
    float* sums = sums_ + due_head_ * width_ * value_dim_;
    if (nibbles_) {
      weigh_pieces(as_bf16(narrow_weights_), width_, as_bf16(narrow_values_), value_dim_, decay_, sums, next_rows_);
    } else {
      weigh_narrow(narrow_weights_, width_, due_values_, groups_of(*due_keys_), value_dim_, decay_, sums, next_rows_);
    }
    due_head_ = -1;
  }

  // What all loops over a tile of keys take, so that the next one is fetched evenly while they go on.
  int64_t steps_of(int64_t count) const {
    const int64_t groups = (count + kSide - 1) / kSide, pairs = std::max<int64_t>(1, width_ / kSide / 2);
    const int64_t blocks = width_ == kSide ? (groups + 3) / 4 : pairs * ((groups + 1) / 2);
    const int64_t columns = width_ == kSide ? value_dim_ / kDepth / 2 : pairs * value_dim_ / kDepth;
    const int64_t depths = (count + kDepth - 1) / kDepth, steps = blocks * dim_ / kDepth + columns * depths;
    if (width_ > kSide) return steps;
    return has_tiles() ? steps + columns * depths : 4 * steps;
  }

  void score_tiled(const Keys& keys, int64_t head) {
    find_keys(keys, head, tiles_);
    const bf16* queries = as_bf16(queries_ + head * width_ * dim_);
    const auto score = [&](int first, int last, float* to) {
      score_head(tiles_, first, last, keys.count, queries, width_, dim_, to, ahead_);
    };
    if (tiles_.parts == 1 || !source_.keys().has_factor()) {
      score(0, tiles_.parts, scores_);
      return multiply_strips(keys, head);
    }
    // The factor is that of the latent only, and the scores of the rotary part come on top.
    rotary_scores_.want(kMostKeys * kRows);
    score(1, 2, rotary_scores_);
    score(0, 1, scores_);
    multiply_strips(keys, head);
    strips([&](float* scores, int64_t, int64_t first) {
      const float* rotary = rotary_scores_ + first * kMostKeys;
      for (int64_t i = 0; i < keys.count * kSide; i += kLanes) store(scores + i, load(scores + i) + load(rotary + i));
    });
  }

  // Scores times what was left out of the keys.
  void multiply_strips(const Keys& keys, int64_t head) {
    if (!source_.keys().has_factor()) return;
    load_factors(source_.keys(), keys.key, keys.count, head);
    strips([&](float* scores, int64_t width, int64_t) { multiply_keys(scores, keys.count, width, factors_); });
  }

  // Scores become weights, rounded to bf16, and the sums so far are decayed.
  void soften_tiled(const Keys& keys, int64_t head) {
    const CachedRows<T>& values = Source::kValuesAreKeys ? source_.keys() : source_.values();
    if (values.has_factor()) {
      load_factors(values, Source::kValuesAreKeys ? keys.key : keys.value, keys.count, head);
      std::fill(factors_ + keys.count, factors_ + round_up(keys.count, kDepth), 0.0f);
      soften_strips(keys, head, [&](Vec weights, int64_t n) { return weights * factors_[n]; });
    } else {
      soften_strips(keys, head, [](Vec weights, int64_t) { return weights; });
    }
  }

  template <class Factor>
  void soften_strips(const Keys& keys, int64_t head, const Factor& factor) {
    const auto soften = beside_ ? soften_strip<true, Factor> : soften_strip<false, Factor>;
    strips([&](float* scores, int64_t, int64_t first) {
      const int64_t row = head * width_ + first;
      soften(scores, keys.count, scales_later_ ? rule_.scale : 1.0f, kSlack, factor, peak_ + row, total_ + row,
             decay_ + first, as_bf16(packed_weights_) + first * kMostKeys);
      decay_sums(sums_ + row * value_dim_, value_dim_, decay_ + first);
    });
  }

  void weigh_tiled(const Keys& keys, int64_t head) {
    float* sums = sums_ + head * width_ * value_dim_;
    const bf16* weights = as_bf16(packed_weights_);
    const KeyTiles::Part& values = find_values(keys, head);
    if (beside_) return weigh_beside(weights, values, groups_of(keys), value_dim_, sums, ahead_);
    weigh_head(weights, width_, values.row, keys.count, value_dim_, sums, as_bf16(packed_values_), ahead_);
  }

  // Of kSide rows those past count: 0, so that weights of 0 leave no trace of them.
  static void clear_rows(bf16* rows, int64_t count, int64_t dims) {
    if (count < kSide) std::fill(rows + count * dims, rows + kSide * dims, bf16{});
  }

  // As find_keys; values that are keys have been found.
  const KeyTiles::Part& find_values(const Keys& keys, int64_t head) {
    if constexpr (Source::kValuesAreKeys || !kTiles<T>) {
      return tiles_.part[0];
    } else {
      const CachedRows<T>& values = source_.values();
      for (int64_t group = 0; group < groups_of(keys); ++group) {
        const int64_t n = group * kSide;
        if (values.plain() && (keys.runs[group] || !has_tiles())) {
          set_rows(found_values_, values, keys.value.row, keys, group, head);
          continue;
        }
        bf16* rows = as_bf16(tile_values_) + n * value_dim_;
        for (int64_t k = n; k < std::min(n + kSide, keys.count); ++k)
          source_.load_value(keys, k, task_->first_head + head, value_buffer_, as_exact(rows + (k - n) * value_dim_));
        clear_rows(rows, keys.count - n, value_dim_);
        set_copies(found_values_, rows, value_dim_, group);
      }
      std::fill(found_values_.row + groups_of(keys) * kSide, std::end(found_values_.row), found_values_.at(0));
      return found_values_;
    }
  }

  void read_tiles(const float* sums, int64_t row) {
    if (nibbles_) return unpack_pieces(sums + row * kSide, width_, value_dim_, row_);
    if (!beside_ && !narrow_)
      return unpack_sums(sums + row / kSide * kSide * value_dim_ + row % kSide * kSide, value_dim_, row_);
    unpack_beside(sums + row * kSide, width_, value_dim_, row_);
    if (narrow_ && value_dim_ > 0 && turned(source_.values())) turn_back(row_, value_dim_);
  }

  void read_pairs(const float* sums) {
    nibbles_ ? unpair_nibble_sums(sums, value_dim_, row_) : unpair_sums(sums, value_dim_, row_);
  }

  // -inf where a row does not attend to a key.
  void mask_strips(const Keys& keys) {
    strips([&](float* scores, int64_t, int64_t first) {
      const auto bounds = [&](const int64_t* from) { return _mm512_loadu_si512(from + first); };
      const __m512i after[2] = {bounds(after_), bounds(after_ + 8)}, last[2] = {bounds(last_), bounds(last_ + 8)};
      for (int64_t n = 0; n < keys.count; ++n) {
        const __m512i position = _mm512_set1_epi64(keys.position[n]);
        const auto seen = [&](int i) {
          return _mm512_cmpgt_epi64_mask(position, after[i]) & _mm512_cmple_epi64_mask(position, last[i]);
        };
        const __mmask16 hidden = ~(seen(0) | seen(1) << 8);
        _mm512_mask_storeu_ps(scores + n * kSide, hidden, _mm512_set1_ps(-kInfinity));
      }
    });
  }
#else
  using Scope = int;
  int tile_shapes() const { return 0; }
  int64_t keys_at_once() const { return kTile; }
  void start_tiled(int64_t) {}
  int64_t steps_of(int64_t) const { return 1; }
  void pack_narrow(const T*, T*) const {}
  void want_narrow_at_once(const Keys&) {}
  void forget_next_rows() {}
  void start_narrow(const Keys&, const Keys&, int64_t) {}
  void soften_narrow_head(const Keys&, int64_t) {}
  void finish_due() {}
  void score_tiled(const Keys&, int64_t) {}
  void soften_tiled(const Keys&, int64_t) {}
  void weigh_tiled(const Keys&, int64_t) {}
  void read_tiles(const float*, int64_t) {}
  void read_pairs(const float*) {}
  void mask_strips(const Keys&) {}
#endif

  // Scale, softcap, bias and mask, where there are any.
  void adjust(const Keys& keys, int64_t head) {
    strips([&](float* scores, int64_t width, int64_t) {
      const int64_t size = keys.count * width;
      if (unscaled() && !scales_later_) {
        for (int64_t i = 0; i < size; i += kLanes) store(scores + i, rule_.scale * load(scores + i));
      }
      if (rule_.softcap > 0) {
        const float inverse = 1.0f / rule_.softcap;
        for (int64_t i = 0; i < size; i += kLanes) store(scores + i, rule_.softcap * tanh(inverse * load(scores + i)));
      }
    });
    if (source_.bias(keys, task_->first_head + head, bias_)) {
      for (int64_t n = 0; n < keys.count; ++n) {
        const float bias = scales_later_ ? bias_[n] / rule_.scale : bias_[n];
        for (int64_t row = 0; row < width_; ++row) score_at(n, row) += bias;
      }
    }
    if (keys.lowest > all_.after && keys.highest <= all_.last) return;
    if (tiled_) return mask_strips(keys);
    for (int64_t query = 0; query < task_->queries; ++query) {
      const Bound bound = bounds_[query];
      for (int64_t n = 0; n < keys.count; ++n) {
        if (keys.position[n] > bound.after && keys.position[n] <= bound.last) continue;
        std::fill_n(head_scores_ + n * width_ + query * task_->members, task_->members, -kInfinity);
      }
    }
  }

  // Of rows with a logit of +inf: its weight, and so the row's total and values, are NaN by now. As a sum of
  // exponentials it is e^peak, unless some logit is NaN, of which only the logits tell: they are made again.
  void total_infinite() {
    const auto each_row = [&](int64_t head, auto&& function) {
      const int64_t first = head * state_width();
      for (int64_t row = 0; row < task_->rows(); ++row) {
        if (peak_[first + row] == kInfinity) function(row, total_ + first);
      }
    };
    for (int64_t head = 0; head < task_->heads; ++head) {
      each_row(head, [&](int64_t row, float* total) {
        for (int64_t i = row; i < state_width(); i += width_) total[i] = i == row ? 1.0f : 0.0f;
      });
    }
    walk([&](const Keys& keys, int64_t head) {
      each_row(head, [&](int64_t row, float* total) {
        for (int64_t n = 0; n < keys.count; ++n) {
          if (std::isnan(score_at(n, row))) total[row] = score_at(n, row);
        }
      });
    });
  }

  // The rows that are left, but those whose sums a value that is not finite may have spoilt; returns whether none is
  // left now.
  template <class F>
  bool finish_rows(F&& finish) {
    const bool some_stay = (narrow_ || beside_) && value_dim_ > 0;
    if (!some_stay && std::count(peak_.data(), peak_ + task_->heads * state_width(), kInfinity)) total_infinite();
    for (int64_t head = 0; head < task_->heads; ++head) {
      const float *peak = peak_ + head * state_width(), *total = total_ + head * state_width();
      for (int64_t row = 0; row < task_->rows(); ++row) {
        if (!left_[head * task_->rows() + row]) continue;
        read_sums(head, row);
        if (some_stay && !all_finite(row_, value_dim_)) continue;
        float sum = 0;
        for (int64_t i = row; i < state_width(); i += width_) sum += total[i];
        finish(token(row), query_head(head, row), peak[row], sum, row_);
        left_[head * task_->rows() + row] = false;
      }
    }
    return std::find(left_.begin(), left_.end(), true) == left_.end();
  }

  // A row's sums in the order of dims, to row_.
  void read_sums(int64_t head, int64_t row) {
    const float* sums = sums_ + head * width_ * value_dim_;
    if (tiled_ || narrow_) return read_tiles(sums, row);
    if (paired_) return read_pairs(sums + row * value_dim_);
    const bool evens_first = in_place_ && value_dim_ && source_.values().evens_first();
    const auto arrange = evens_first ? from_pairs<bf16> : from_pairs<float>;
    arrange(sums + row * value_dim_, value_dim_, row_);
  }

  const Source& source_;
  const KeyPages& pages_;
  const LogitRule rule_;
  const int64_t dim_, value_dim_;  // rounded up to whole pairs of vectors
  Floats queries_;                 // [heads, width, dim], or [heads, dim, width] with rows in lanes
  Floats sums_;                    // [heads, width, value_dim]
  Floats peak_, total_;            // [heads, max(width, kLanes)]
  Floats decay_, scores_, bias_, row_;
  float* head_scores_ = nullptr;  // those of the head that is worked on
  Floats key_rows_, value_rows_;
  Floats key_scales_, value_scales_, factors_;  // of a tile's rows
  RowBuffer key_buffer_, value_buffer_;
  Floats tile_keys_, tile_values_, packed_values_, packed_weights_, rotary_scores_;
  Floats narrow_keys_, narrow_values_, narrow_weights_, products_;
  Floats scaled_weights_;  // in vectors
  std::vector<uint8_t> key_scales_across_, value_scales_across_;
#if defined(__AVX512BF16__)
  KeyTiles tiles_;
  KeyTiles::Part found_values_;
  NextRows next_rows_;
  int64_t due_head_ = -1;  // whose values are not weighed yet
  const Keys* due_keys_ = nullptr;
  NarrowRows due_values_{};
#endif
  int64_t after_[kRows], last_[kRows];  // what a row attends to
  std::vector<Bound> bounds_;           // of each query
  std::vector<bool> left_;              // rows [heads, rows] that are not finished
  Bound all_{};                         // what all queries attend to
  Prefetcher ahead_;
  RowsAhead rows_ahead_;  // of slices
  const Task* task_ = nullptr;
  const Task* next_task_ = nullptr;  // whose the next tile is: that, or
  Upcoming later_;
  const Sequence* sequence_ = nullptr;
  int64_t width_ = 0;
  enum class Asked {
    nothing,
    slices,
    narrow,
    strips
  } asked_ = Asked::nothing;  // of the task to come, and in which manner
  bool in_place_ = false, tiled_ = false, rows_in_lanes_ = false;
  bool paired_ = false;        // in place, in products of bfloat16
  bool narrow_ = false;        // and those in tiles
  bool nibbles_ = false;       // of codes of 4 bits whose scales are left out
  bool beside_ = false;        // one strip of rows in tiles, whose values are not packed
  bool weighs_ = false;        // values are added up, not scores alone made
  bool scales_later_ = false;  // scores are multiplied with the scale as they become weights
};

}  // namespace kvbackend::KVBACKEND_ISA
