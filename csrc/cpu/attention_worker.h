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
//   bool in_place();                                 rows can be read where they lie, by keys() and values()
//   bool stored();                                   keys are as the cache holds them, but for a factor
//   void load_query(token, head, E* out);            E is float, or T
//   void load_key(keys, n, head, RowBuffer&, E* out), load_value(..);   E is float, or exact_bf16
//   void locate(Keys&, int64_t n);                   from key n's block and slot: where its rows are
//   bool in_order();                                 positions are indices within the sequence
//   int64_t position(block, slot);                   where they are not
//   void prefetch(keys, head, Prefetcher&);          names the rows that will be wanted next
//   bool bias(keys, head, float* out);               what is added to the logits of each key; false: nothing
#pragma once

#include "cached_rows.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace kvbackend::KVBACKEND_ISA {

// ----------------------------------------------------------------------------------------------------------- a task

#if defined(__AMX_BF16__)
template <class T>
constexpr bool kTiles = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool kTiles = false;
#endif

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
    decay_.want(kRows);
    scores_.want(kTile * kRows);
    bias_.want(kTile);
    factors_.want(kTile);
    row_.want(std::max(dim_, value_dim_));
  }

  // Calls finish(token, head, peak, total, values) for every row.
  template <class F>
  void run(const Task& task, const Sequence& sequence, F&& finish) {
    begin(task, sequence);
    start_sums();
    walk([&](const Keys& keys, int64_t head) {
      soften(scores_, keys.count, width_, peak_ + head * state_width(), total_ + head * state_width(), decay_);
      weigh(keys, head);
    });
    for (int64_t head = 0; head < task.heads; ++head) finish_head(head, finish);
  }

  // In two steps, for who wants the scores alone: first the queries,
  void begin(const Task& task, const Sequence& sequence) {
    task_ = &task;
    sequence_ = &sequence;
    width_ = width_of(task.rows());
    in_place_ = source_.in_place() && width_ < kLanes;
    tiled_ = kTiles<T> && source_.stored() && width_ >= kLanes;
    want_keys();
    bounds_.clear();
    all_ = {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
    for (int64_t i = 0; i < task.queries; ++i) {
      bounds_.push_back(rule_.bound(position(task.first_query + i)));
      all_ = {std::max(all_.after, bounds_.back().after), std::min(all_.last, bounds_.back().last)};
    }
    std::fill_n(queries_.data(), task.heads * width_ * dim_, 0.0f);
    for (int64_t head = 0; head < task.heads; ++head) tiled_ ? start_tiled(head) : start_queries(head);
  }

  // then function(keys, head) for each tile of keys and kv head of the task, with its scores made. Keys, then heads:
  // one tile's rows of all heads lie side by side in memory. Meanwhile the next rows are fetched.
  template <class F>
  void walk(F&& function) {
    const Task& task = *task_;
    Keys found[2];
    locate(task.begin, found[0]);
    for (int64_t begin = task.begin, turn = 0; begin < task.end; begin += kTile, turn ^= 1) {
      const Keys &keys = found[turn], &next = found[turn ^ 1];
      locate(begin + kTile, found[turn ^ 1]);
      if (keys.count == 0) continue;
      for (int64_t head = 0; head < task.heads; ++head) {
        ahead_.clear();
        const bool last = head + 1 == task.heads;
        source_.prefetch(last ? next : keys, task.first_head + (last ? 0 : head + 1), ahead_);
        score(keys, head);
        adjust(keys, head);
        function(keys, head);
      }
    }
  }

  // Scores of the last tile: [keys, width], of which rows() are a query's.
  float* scores() { return scores_; }
  int64_t width() const { return width_; }
  int64_t token(int64_t row) const { return sequence_->first_token + task_->first_query + row / task_->members; }
  int64_t query_head(int64_t head, int64_t row) const {
    const int64_t group = source_.heads() / source_.kv_heads();
    return (task_->first_head + head) * group + task_->first_member + row % task_->members;
  }

 private:
  int64_t state_width() const { return std::max<int64_t>(width_, kLanes); }

  // Where keys go that are not read in place. What rounding up adds to their rows stays 0.
  void want_keys() {
    if (tiled_) {  // bf16, two in a float
      tile_keys_.want_zeros(kTile * dim_ / 2);
    } else if (!in_place_) {
      key_rows_.want_zeros(kTile * dim_);
    }
    key_buffer_.offset = value_buffer_.offset = -1;
  }

  // No value seen yet; and where values go that are not read in place.
  void start_sums() {
    if (tiled_) {
      packed_values_.want(kTile * value_dim_ / 2);
      packed_weights_.want(kTile * kRows / 2);
      if (!Source::kValuesAreKeys) tile_values_.want_zeros(kTile * value_dim_ / 2);
    } else if (!in_place_ && !Source::kValuesAreKeys) {
      value_rows_.want_zeros(kTile * value_dim_);
    }
    std::fill_n(sums_.data(), task_->heads * width_ * value_dim_, 0.0f);
    std::fill_n(total_.data(), task_->heads * state_width(), 0.0f);
    std::fill_n(peak_.data(), task_->heads * state_width(), -kInfinity);
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
        const auto arrange = in_place_ && source_.keys().evens_first() ? to_pairs<bf16> : to_pairs<float>;
        arrange(row_, dim_, queries + row * dim_);
      }
    }
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
      keys.index[n] = index;
      keys.block[n] = block;
      keys.slot[n] = slot;
      keys.position[n] = source_.in_order() ? index : source_.position(block, slot);
      keys.lowest = std::min(keys.lowest, keys.position[n]);
      keys.highest = std::max(keys.highest, keys.position[n]);
      source_.locate(keys, n);
    });
  }

  // Scores of a tile of keys and one kv head, neither scaled in tiles nor masked.
  void score(const Keys& keys, int64_t head) {
    if (tiled_) return score_tiled(keys, head);
    if (in_place_) {
      with_rows(source_.keys(), keys, keys.key, head, key_scales_, [&](const auto* rows, auto grouped, Groups groups) {
        score_few_rows<grouped>(keys, head, rows, groups);
      });
      return apply_factors(source_.keys(), keys, head);
    }
    for (int64_t n = 0; n < keys.count; ++n)
      source_.load_key(keys, n, task_->first_head + head, key_buffer_, key_rows_ + n * dim_);
    if (width_ >= kLanes)
      return score_many_rows(queries_ + head * width_ * dim_, source_.dim(), key_rows_, dim_, keys.count, scores_,
                             width_, ahead_);
    const float* key[kTile];
    for (int64_t n = 0; n < kTile; ++n) key[n] = key_rows_ + std::min(n, keys.count - 1) * dim_;
    score_few_rows<false>(keys, head, key, {});
  }

  template <bool kGrouped, class E>
  void score_few_rows(const Keys& keys, int64_t head, const E* const* key, const Groups& groups) {
    const float* queries = queries_ + head * width_ * dim_;
    const auto score_rows = width_ >= 4   ? score_few<4, kGrouped, E>
                            : width_ == 2 ? score_few<2, kGrouped, E>
                                          : score_few<1, kGrouped, E>;
    for (int64_t row = 0; row < width_; row += 4)
      score_rows(queries + row * dim_, dim_, key, groups, keys.count, scores_ + row, width_, ahead_);
  }

  // The scores have become weights: the values of a tile and one kv head, weighed, are added to the sums.
  void weigh(const Keys& keys, int64_t head) {
    if (value_dim_ == 0) return;
    if (tiled_) return weigh_tiled(keys, head);
    if (in_place_) {
      apply_factors(source_.values(), keys, head);
      return with_rows(
          source_.values(), keys, keys.value, head, value_scales_,
          [&](const auto* rows, auto grouped, Groups groups) { weigh_rows<grouped>(keys, head, rows, groups); });
    }
    const float* value[kTile];
    for (int64_t n = 0; n < keys.count; ++n) {
      value[n] = Source::kValuesAreKeys ? key_rows_ + n * dim_ : value_rows_ + n * value_dim_;
      if (!Source::kValuesAreKeys)
        source_.load_value(keys, n, task_->first_head + head, value_buffer_, value_rows_ + n * value_dim_);
    }
    weigh_rows<false>(keys, head, value, {});
  }

  template <bool kGrouped, class E>
  void weigh_rows(const Keys& keys, int64_t head, const E* const* value, const Groups& groups) {
    const auto weigh_some = width_ >= 4   ? weigh_all<4, kGrouped, E>
                            : width_ == 2 ? weigh_all<2, kGrouped, E>
                                          : weigh_all<1, kGrouped, E>;
    weigh_some(scores_, width_, value, groups, keys.count, task_->rows(), value_dim_, decay_,
               sums_ + head * width_ * value_dim_, ahead_);
  }

  // function(rows, grouped, groups): a tile's rows where they lie, the last repeated, and the scales of their groups.
  template <class F>
  void with_rows(const CachedRows<T>& rows, const Keys& keys, const int64_t* offsets, int64_t head, Floats& scales,
                 F&& function) {
    head += task_->first_head;
    rows.with_type([&](auto zero) {
      using E = decltype(zero);
      if constexpr (!std::is_same_v<E, uint4x2>) {  // KIVI's codes are not read in place
        const E* row[kTile];
        for (int64_t n = 0; n < kTile; ++n)
          row[n] = reinterpret_cast<const E*>(rows.row(offsets[std::min(n, keys.count - 1)], head));
        if constexpr (kMayHaveGroups<E>) {
          if (rows.grouped()) {
            const Groups groups = load_groups(rows, keys, head, scales);
            return function(row, std::true_type{}, groups);
          }
        }
        function(row, std::false_type{}, Groups{});
      }
    });
  }

  Groups load_groups(const CachedRows<T>& rows, const Keys& keys, int64_t head, Floats& scales) const {
    const int64_t count = rows.size() / rows.span();
    scales.want_zeros(kTile * std::max(dim_, value_dim_) / kLanes + kLanes);
    rows.load_scales(keys, head, scales);
    return {scales, count, __builtin_ctzll(rows.span())};
  }

  // Scores, or weights, times what was left out of the rows that they belong to.
  void apply_factors(const CachedRows<T>& rows, const Keys& keys, int64_t head) {
    if (!rows.has_factor()) return;
    load_factors(rows, keys, head);
    multiply_keys(scores_, keys.count, width_, factors_);
  }

  void load_factors(const CachedRows<T>& rows, const Keys& keys, int64_t head) {
    for (int64_t n = 0; n < keys.count; ++n)
      factors_[n] = rows.factor(keys.block[n], keys.slot[n], task_->first_head + head);
  }

#if defined(__AMX_BF16__)
  static bf16* as_bf16(float* data) { return reinterpret_cast<bf16*>(data); }
  static exact_bf16* as_exact(bf16* data) { return reinterpret_cast<exact_bf16*>(data); }

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

  void score_tiled(const Keys& keys, int64_t head) {
    const TileScope scope;
    bf16* key = as_bf16(tile_keys_);
    for (int64_t n = 0; n < keys.count; ++n) {
      if constexpr (kTiles<T>)
        source_.load_key(keys, n, task_->first_head + head, key_buffer_, as_exact(key + n * dim_));
    }
    ahead_.finish_within(dim_ / 16 + value_dim_ / 16 + width_ / kSide * value_dim_ / 32);
    const bf16* queries = as_bf16(queries_ + head * width_ * dim_);
    if (!Source::kValuesAreKeys || !source_.keys().has_factor()) {
      score_tiles(queries, dim_, 0, dim_, key, keys.count, scores_, width_, ahead_);
      return apply_factors(source_.keys(), keys, head);
    }
    // The factor is that of the latent only, and the scores of the rotary part come on top.
    const int64_t latent = source_.value_dim() / kDepth * kDepth;
    rotary_scores_.want(kTile * kRows);
    score_tiles(queries, dim_, latent, dim_, key, keys.count, rotary_scores_, width_, ahead_);
    score_tiles(queries, dim_, 0, latent, key, keys.count, scores_, width_, ahead_);
    apply_factors(source_.keys(), keys, head);
    for (int64_t i = 0; i < keys.count * width_; i += kLanes)
      store(scores_ + i, load(scores_ + i) + load(rotary_scores_ + i));
  }

  // Weights are rounded to bf16.
  void weigh_tiled(const Keys& keys, int64_t head) {
    const TileScope scope;
    bf16* value = Source::kValuesAreKeys ? as_bf16(tile_keys_) : as_bf16(tile_values_);
    for (int64_t n = 0; n < keys.count && !Source::kValuesAreKeys; ++n) {
      if constexpr (kTiles<T>)
        source_.load_value(keys, n, task_->first_head + head, value_buffer_, as_exact(value + n * value_dim_));
    }
    apply_factors(Source::kValuesAreKeys ? source_.keys() : source_.values(), keys, head);
    const int64_t count = keys.count, key_tiles = kTile / kDepth;
    bf16 *weights = as_bf16(packed_weights_), *values = as_bf16(packed_values_);
    float* sums = sums_ + head * width_ * value_dim_;
    for (int64_t row = 0; row < width_; ++row) {
      if (decay_[row] == 1.0f) continue;
      for (int64_t d = 0; d < value_dim_; ++d) sums[row * value_dim_ + d] *= decay_[row];
    }
    pack_weights(scores_, width_, count, key_tiles, weights);
    pack_values(value, Source::kValuesAreKeys ? dim_ : value_dim_, value_dim_, count, values, ahead_);
    weigh_tiles(weights, key_tiles, width_, values, count, value_dim_, sums, ahead_);
  }

  static constexpr auto kFromTiles = from_tiles;
#else
  static constexpr auto kFromTiles = from_pairs<float>;
  void start_tiled(int64_t) {}
  void score_tiled(const Keys&, int64_t) {}
  void weigh_tiled(const Keys&, int64_t) {}
#endif

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
      const bool evens_first = in_place_ && value_dim_ && source_.values().evens_first();
      const auto arrange = tiled_ ? kFromTiles : evens_first ? from_pairs<bf16> : from_pairs<float>;
      arrange(values, value_dim_, row_);
      finish(token(row), query_head(head, row), peak[row], sum, row_);
    }
  }

  const Source& source_;
  const KeyPages& pages_;
  const LogitRule rule_;
  const int64_t dim_, value_dim_;  // rounded up to whole pairs of vectors
  Floats queries_;                 // [heads, width, dim], or [heads, dim, width] for many rows
  Floats sums_;                    // [heads, width, value_dim]
  Floats peak_, total_;            // [heads, max(width, kLanes)]
  Floats decay_, scores_, bias_, row_;
  Floats key_rows_, value_rows_;
  Floats key_scales_, value_scales_, factors_;  // of a tile's rows
  RowBuffer key_buffer_, value_buffer_;
  Floats tile_keys_, tile_values_, packed_values_, packed_weights_, rotary_scores_;
  std::vector<Bound> bounds_;  // of each query
  Bound all_{};                // what all queries attend to
  Prefetcher ahead_;
  const Task* task_ = nullptr;
  const Sequence* sequence_ = nullptr;
  int64_t width_ = 0;
  bool in_place_ = false, tiled_ = false;
};

}  // namespace kvbackend::KVBACKEND_ISA
