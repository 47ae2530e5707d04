// The loops of attention over a tile of keys, and the prefetching that goes on beside them.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "attention_batch.h"
#include "codes.h"

namespace kvbackend::KVBACKEND_ISA {

#if defined(__AVX512F__)
constexpr int kAsked = 4, kLinesAtOnce = 4;
#else
constexpr int kAsked = 1, kLinesAtOnce = 1;
#endif

// Rows wanted next, a few cache lines at a time, as evenly as the work on others goes: a core drops requests while too
// many wait. Loops that are faster than memory ask for each line several times; where it is there already that costs
// an instruction.
class Prefetcher {
 public:
  // Rows of another list follow. What is left of the last one is given up.
  void clear() {
    std::copy_n(pieces_ + count_ - kBefore, kBefore, pieces_);
    count_ = kBefore;
    at_ = kBefore * kPlaces;
    due_ = at_ << kShift;
    pace_ = kPlaces << kShift;
  }

  void add(const void* row, int64_t bytes) {
    const int64_t none = 0;
    add(row, &none, 1, bytes);
  }

  // `count` rows at these offsets. Beyond what the list holds rows are so long that a core follows them by itself.
  void add(const void* rows, const int64_t* offsets, int64_t count, int64_t bytes) {
    const char* first = static_cast<const char*>(rows);
    if (bytes <= kPiece) {
      count = std::min(count, kMost - count_);
      for (int64_t n = 0; n < count; ++n) pieces_[count_ + n] = first + offsets[n];
      count_ += count;
      return;
    }
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t at = 0; at < bytes && count_ < kMost; at += kPiece) pieces_[count_++] = first + offsets[n] + at;
    }
  }

  // All of the list in that many steps.
  void finish_within(int64_t steps) { pace_ = (((count_ - kBefore) * kPlaces << kShift) + steps - 1) / steps; }

  template <int kAsk = kAsked>
  void step() {
    due_ += pace_;
    uint64_t at = at_;
    const uint64_t end = std::min<uint64_t>(due_ >> kShift, count_ * kPlaces);
    for (; at < end; ++at) {
#pragma GCC unroll 4
      for (int ask = 0; ask < kAsk; ++ask) {
        const char* lines = pieces_[at / kPlaces - ask * kLag] + at % kPlaces * kLinesAtOnce * kLine;
#pragma GCC unroll 4
        for (int line = 0; line < kLinesAtOnce; ++line) __builtin_prefetch(lines + line * kLine, 0, 3);
      }
    }
    at_ = at;
  }

 private:
  static constexpr int64_t kPiece = 4 * kLine, kLag = 32, kBefore = 3 * kLag;
  static constexpr int64_t kPlaces = kPiece / kLine / kLinesAtOnce;  // of a piece: what is asked for at once
  static constexpr int64_t kMost = kBefore + 8 * kMostKeys;
  static constexpr int kShift = 16;  // of the places that are due at each step
  const char* pieces_[kMost] = {};   // the last ones of the list before this one come first
  int64_t count_ = kBefore;
  uint64_t at_ = kBefore * kPlaces, due_ = at_ << kShift, pace_ = kPlaces << kShift;
};

// For loops that multiply more than they read.
struct FetchOnce {
  Prefetcher& rows;
  void step() { rows.step<1>(); }
};

// What a thread's buffers leave behind for its next call: memory that is new from the system is slow when first
// touched. As much as one call of many rows needs; what came first goes first.
class Spares {
 public:
  static Spares& of_thread() {
    thread_local Spares spares;
    return spares;
  }

  Spares() = default;
  Spares(const Spares&) = delete;
  ~Spares() {
    for (const Spare& spare : spares_) std::free(spare.data);
  }

  // Memory of just that size, aligned to cache lines.
  void* take(size_t bytes) {
    for (size_t i = spares_.size(); i-- > 0;) {
      if (spares_[i].bytes != bytes) continue;
      void* data = spares_[i].data;
      spares_.erase(spares_.begin() + static_cast<int64_t>(i));
      kept_ -= bytes;
      return data;
    }
    void* data = std::aligned_alloc(kLine, bytes);
    if (!data) throw std::bad_alloc();
    return data;
  }

  void keep(void* data, size_t bytes) {
    spares_.push_back({data, bytes});
    kept_ += bytes;
    while (kept_ > kMost) {
      std::free(spares_.front().data);
      kept_ -= spares_.front().bytes;
      spares_.erase(spares_.begin());
    }
  }

 private:
  struct Spare {
    void* data;
    size_t bytes;
  };
  static constexpr size_t kMost = 4 << 20;  // bytes
  std::vector<Spare> spares_;
  size_t kept_ = 0;
};

// Floats of a thread's own, aligned to cache lines. Made when first wanted.
class Floats {
 public:
  Floats() = default;
  Floats(const Floats&) = delete;
  ~Floats() {
    if (data_) Spares::of_thread().keep(data_, bytes_);
  }

  float* data() const { return data_; }
  operator float*() const { return data_; }

  void want(int64_t size) {
    if (data_) return;
    bytes_ = round_up(size * sizeof(float) + 1, kLine);
    data_ = static_cast<float*>(Spares::of_thread().take(bytes_));
  }

  void want_zeros(int64_t size) {
    if (data_) return;
    want(size);
    std::fill_n(data_, size, 0.0f);
  }

 private:
  float* data_ = nullptr;
  size_t bytes_ = 0;
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

// Scales of groups of dims, for codes that are read in place: `row` floats for each key.
struct Groups {
  const float* scales = nullptr;
  int64_t row = 0;
  int shift = 0;  // a group has 2^shift dims, at least kLanes

  const float* of(int64_t n) const { return scales + n * row; }
};

// The lower half of the lanes of one vector, the upper half of the other's.
template <int... Lane>
inline Vec join_halves(Vec low, Vec high, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(low, high, (Lane < kLanes / 2 ? Lane : Lane + kLanes)...);
}

inline Vec join_halves(Vec low, Vec high) { return join_halves(low, high, std::make_integer_sequence<int, kLanes>{}); }

// kPair codes from dim d on, with the scales of their groups.
template <class E>
inline void load_scaled(const E* codes, int64_t d, const float* scales, int shift, Vec& first, Vec& second) {
  load_pair(codes + d / kPerByte<E>, first, second);
  const Vec low = broadcast(scales[d >> shift]), high = broadcast(scales[(d + kLanes) >> shift]);
  if constexpr (kEvensFirst<E>) {
    const Vec halves = join_halves(low, high);
    first *= halves;
    second *= halves;
  } else {
    first *= low;
    second *= high;
  }
}

// kPair numbers of a key times those of rows, in floats. Queries are in the order of load_pair.
template <bool kGrouped, class E>
struct InFloats {
  using Query = float;
  struct Numbers {
    Vec first, second;
  };
  const Groups& groups;

  Numbers numbers(const E* const* keys, int64_t n, int64_t d) const {
    Numbers found;
    if constexpr (kGrouped) {
      load_scaled(keys[n], d, groups.of(n), groups.shift, found.first, found.second);
    } else {
      load_pair(keys[n] + d / kPerByte<E>, found.first, found.second);
    }
    return found;
  }

  static Vec add(Vec sum, const Numbers& key, const float* query) {
    sum += key.first * load(query);
    return sum + key.second * load(query + kLanes);
  }
};

// Few rows: lanes run over dims. R rows x kAccumulators / R keys in registers; a key is read once for R rows. The
// queries [R, dim] stay in L1. `keys` may be read up to the next multiple of kAccumulators / R.
template <int R, class Products, class E>
void score_few(const Products& products, const typename Products::Query* queries, int64_t dim, const E* const* keys,
               int64_t count, float* scores, int64_t width, Prefetcher& ahead) {
  constexpr int kKeys = kAccumulators / R;
  for (int64_t n = 0; n < count; n += kKeys) {
    Vec sum[kAccumulators] = {};
    for (int64_t d = 0; d < dim; d += kPair) {
      ahead.step();
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const auto key = products.numbers(keys, n + k, d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[k * R + r] = products.add(sum[k * R + r], key, queries + r * dim + d);
      }
    }
    float* score = scores + n * width;  // four neighbours among the sums are neighbours among the scores
#if defined(__AVX512F__)
    const Vec all = sum_lanes(sum);
    if (width == R) {
      store(score, all);
      continue;
    }
    Quad quads[kAccumulators / 4];
    std::memcpy(quads, &all, sizeof all);
#else
    Quad quads[kAccumulators / 4];
#pragma GCC unroll 4
    for (int i = 0; i < kAccumulators; i += 4) quads[i / 4] = sum_lanes(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
#endif
#pragma GCC unroll 4
    for (int i = 0; i < kAccumulators; i += 4) std::memcpy(score + i / R * width + i % R, &quads[i / 4], sizeof(Quad));
  }
}

// Sums that a loop over many rows keeps in registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kManySums = 12;
#else
constexpr int kManySums = kAccumulators;
#endif

// Many rows: lanes run over rows. V vectors of rows x K keys in registers; a number of a key meets all of them. Adds
// the products of `dims` dims, a panel of the keys [count, key_row] and of the queries [dims, width] that stays in L1.
template <int V, int K>
void score_rows_of(const float* queries, int64_t dims, const float* key, int64_t key_row, float* scores, int64_t width,
                   Prefetcher& ahead) {
  Vec sum[K * V] = {};
  ahead.step();
  for (int64_t d = 0; d < dims; ++d) {
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[k * V + v] += key[k * key_row + d] * load(queries + d * width + v * kLanes);
    }
  }
  ahead.step();
#pragma GCC unroll 8
  for (int k = 0; k < K; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* score = scores + k * width + v * kLanes;
      store(score, load(score) + sum[k * V + v]);
    }
  }
}

// The same for all keys, which may be read up to a multiple of 4.
template <int V>
void score_many(const float* queries, int64_t dims, const float* keys, int64_t key_row, int64_t count, float* scores,
                int64_t width, Prefetcher& ahead) {
  constexpr int kKeys = std::min(8, kManySums / V);
  int64_t n = 0;
  for (; n + kKeys <= count; n += kKeys)
    score_rows_of<V, kKeys>(queries, dims, keys + n * key_row, key_row, scores + n * width, width, ahead);
  for (; n < count; n += 4)
    score_rows_of<V, 4>(queries, dims, keys + n * key_row, key_row, scores + n * width, width, ahead);
}

// score_many for all rows and dims. Panels of kPanel dims: shorter sums also round less.
inline void score_many_rows(const float* queries, int64_t dim, const float* keys, int64_t key_row, int64_t count,
                            float* scores, int64_t width, Prefetcher& ahead) {
  constexpr int kMost = kAccumulators / 4;
  std::fill_n(scores, round_up(count, 4) * width, 0.0f);
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
template <int R, int V, bool kGrouped, class E>
void weigh(const float* weights, int64_t width, const E* const* values, const Groups& groups, int64_t count,
           int64_t dim, const float* decay, float* out, int64_t out_row, Prefetcher& ahead) {
  Vec sum[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = decay[r] * load(out + r * out_row + v * kLanes);
  }
  for (int64_t n = 0; n < count; ++n) {
    if (n % 2 == 0) ahead.step();
    Vec numbers[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v += 2) {
      const int64_t d = dim + v * kLanes;
      if constexpr (V % 2) {  // of floats, whose pairs are in order
        numbers[v] = load(values[n] + d);
        if (v + 1 < V) numbers[v + 1] = load(values[n] + d + kLanes);
      } else if constexpr (kGrouped) {
        load_scaled(values[n], d, groups.of(n), groups.shift, numbers[v], numbers[v + 1]);
      } else {
        load_pair(values[n] + d / kPerByte<E>, numbers[v], numbers[v + 1]);
      }
    }
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

// function(vectors, row, d) for all rows and dims, R rows x `vectors` at a time. Dims in the outer loop: their part of
// the values stays in L1 for all rows. With kMany, which is for rows of floats, kManySums are kept.
template <int R, bool kMany, class F>
void each_block(int64_t rows, int64_t dims, F&& function) {
  constexpr int kVectors = std::max(2, kAccumulators / R), kMost = kManySums / R;
  int64_t d = 0;
  const auto block = [&](auto vectors) {
    for (int64_t row = 0; row < rows; row += R) function(vectors, row, d);
    d += vectors * kLanes;
  };
  if constexpr (kMany && kMost == 3) {  // threes, but where twos would not take the rest
    const int64_t end = dims - dims / kLanes * 2 % 3 * 2 * kLanes;
    while (d < end) block(std::integral_constant<int, 3>{});
  }
  while (d + kVectors * kLanes <= dims) block(std::integral_constant<int, kVectors>{});
  while (d < dims) block(std::integral_constant<int, 2>{});
}

// function(R): so many rows at a time fit a tile of this width.
template <class F>
void with_rows_at_once(int64_t width, F&& function) {
  if (width >= 4) return function(std::integral_constant<int, 4>{});
  if (width == 2) return function(std::integral_constant<int, 2>{});
  function(std::integral_constant<int, 1>{});
}

// rows [count, width] of a tile, each times its key's factor.
template <class Some>
void multiply_keys_by(float* rows, int64_t count, int64_t width, const float* factors) {
  constexpr int64_t kSome = sizeof(Some) / sizeof(float);
  for (int64_t n = 0; n < count; ++n) {
    const Some factor = factors[n] - Some{};
    for (int64_t row = 0; row < width; row += kSome) {
      Some some;
      std::memcpy(&some, rows + n * width + row, sizeof some);
      some *= factor;
      std::memcpy(rows + n * width + row, &some, sizeof some);
    }
  }
}

inline void multiply_keys(float* rows, int64_t count, int64_t width, const float* factors) {
  if (width % kLanes == 0) return multiply_keys_by<Vec>(rows, count, width, factors);
  if (width % 4 == 0) return multiply_keys_by<Quad>(rows, count, width, factors);
  multiply_keys_by<float>(rows, count, width, factors);
}

// Scores of `count` keys become weights, after they are multiplied with `scale`; peak and total of each row are brought
// up to date, and decay is what the row's earlier total and values are worth now. All three have `width` floats, or
// kLanes where width is less: then lanes repeat the rows, and total is spread over the repeats. A peak stays while
// logits exceed it by no more than `slack`, at most 8: weights may then be above 1, and what was summed up needs no
// decay.
inline void soften(float* scores, int64_t count, int64_t width, float scale, float slack, float* peak, float* total,
                   float* decay) {
  const int64_t step = std::max<int64_t>(width, kLanes), size = count * width;
  std::fill(scores + size, scores + round_up(size, kLanes), -kInfinity);
  for (int64_t row = 0; row < step; row += kLanes) {
    const Vec before = load(peak + row);
    constexpr int kChains = 4;  // of comparisons that need not wait for each other
    Vec tops[kChains] = {broadcast(-kInfinity), broadcast(-kInfinity), broadcast(-kInfinity), broadcast(-kInfinity)};
    int64_t n = row;
    for (; n + (kChains - 1) * step < size; n += kChains * step) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) tops[c] = maximum(load(scores + n + c * step), tops[c]);
    }
    for (; n < size; n += step) tops[0] = maximum(load(scores + n), tops[0]);
    Vec top = maximum(maximum(tops[0], tops[1]), maximum(tops[2], tops[3]));
    for (int64_t shift = width; shift < kLanes; shift *= 2) {
      float twice[2 * kLanes];
      store(twice, top);
      store(twice + kLanes, top);
      top = maximum(load(twice + shift), top);
    }
    top = scale * top;
    top = top > before + slack ? top : before;
    const Vec base = top > -kInfinity ? top : Vec{};  // nothing seen yet: all weights shall be 0, not NaN
    const Vec worth = exp_small(before - base);
    Vec sum = load(total + row) * worth;
    for (int64_t i = row; i < size; i += step) {
      const Vec weight = exp_small(scale * load(scores + i) - base);
      store(scores + i, weight);
      sum += weight;
    }
    store(peak + row, top);
    store(total + row, sum);
    store(decay + row, worth);
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
