// The loops of attention over a tile of keys, and a thread's buffers for them.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "codes.h"
#include "prefetcher.h"

namespace kvbackend::KVBACKEND_ISA {

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

constexpr int64_t kFewRows = 8;  // at most, for which keys are read in place, their numbers in lanes

inline int64_t width_of(int64_t rows) {
  if (rows > kLanes / 2) return round_up(rows, kLanes);
  int64_t width = 1;
  while (width < rows) width *= 2;
  return width;
}

// Scales of groups of dims, for codes that are read in place: `row` floats for each key, of which a head has `head`.
struct Groups {
  const float* scales = nullptr;
  int64_t row = 0, head = 0;
  int shift = 0;  // a group has 2^shift dims, at least kLanes

  const float* of(int64_t n, int64_t head_at = 0) const { return scales + n * row + head_at * head; }
};

// The lower half of the lanes of one vector, the upper half of the other's.
template <int... Lane>
inline Vec join_halves(Vec low, Vec high, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(low, high, (Lane < kLanes / 2 ? Lane : Lane + kLanes)...);
}

inline Vec join_halves(Vec low, Vec high) { return join_halves(low, high, std::make_integer_sequence<int, kLanes>{}); }

// The first or the second vector of a pair.
template <class T>
inline Vec load_half(const T* from, int half) {
  Vec first, second;
  load_pair(from, first, second);
  return half ? second : first;
}

// The scales of the first or second vector of the pair at dim d.
template <class E>
inline Vec load_scales(const float* scales, int64_t d, int shift, int half) {
  constexpr int kSmallestGroup = 16;
  if (kPair <= kSmallestGroup) return broadcast(scales[d >> shift]);
  const Vec low = broadcast(scales[d >> shift]), high = broadcast(scales[(d + kLanes) >> shift]);
  return kEvensFirst<E> ? join_halves(low, high) : half ? high : low;
}

constexpr int64_t kValues = 16;  // weighed at a time of several heads

// kv heads that are attended to at once, some keys after the other, as memory has them. L1 then holds the rows at hand
// of all heads, with what a core fetches by itself beyond the lines of each. It would not those of a whole tile: a head
// after the other took up to twice as long.
struct Heads {
  int64_t count = 1;
  int64_t values = kMostKeys;  // at a time
  // From one head to the next:
  int64_t row = 0;      // elements
  int64_t queries = 0;  // of their type
  int64_t scores = 0;   // or weights: floats
  int64_t state = 0;    // decay: floats
};

// Rows of codes or numbers in products of floats, half a pair at a time. Queries are in the order of load_pair.
template <bool kGrouped, class E>
struct InFloats {
  using Query = float;
  static constexpr int kParts = 2;  // of a pair
  const Groups groups;

  Vec numbers(const E* row, int64_t n, int64_t d, int half) const {  // of row n
    const Vec found = load_half(row + d / kPerByte<E>, half);
    if constexpr (kGrouped) return found * load_scales<E>(groups.of(n), d, groups.shift, half);
    return found;
  }

  static Vec query(const float* pair, int half) { return load(pair + half * kLanes); }
  static Vec add(Vec sum, Vec key, Vec query) { return sum + key * query; }
};

// Sums that a loop keeps in registers where numbers of this type become floats first, which may take registers too.
template <class E>
constexpr int kSumsOf = sizeof(E) > 1 || std::is_same_v<E, int8_t> ? kManySums : kAccumulators;

// Few rows: lanes run over dims. R rows x kSums / R keys in registers: a key is read once for R rows, a query once for
// those keys. The queries of each head [width, dim] stay in L1. Where kDim says how many dims, loops are unrolled.
// `keys` may be read up to a multiple of kSums / R.
template <int R, int kDim = 0, class Products, class E, class Ahead>
void score_few(const Products& products, const typename Products::Query* queries, int64_t any_dim, const E* const* keys,
               int64_t count, float* scores, int64_t width, const Heads& heads, Ahead& ahead) {
  const int64_t dim = kDim ? kDim : any_dim;
  constexpr int kSums = kSumsOf<E>, kKeys = kSums / R;
  constexpr int kParts = Products::kParts;                     // of a pair of vectors
  constexpr int kAtOnce = kSums > kAccumulators ? 1 : kParts;  // many sums leave no registers for both
  const auto some_rows = [&](const auto* own, int64_t n, const E** row, float* score) __attribute__((always_inline)) {
    Vec sum[kSums] = {};
    ahead.step(dim / kPair);
#pragma GCC unroll 2
    for (int first = 0; first < kParts; first += kAtOnce) {
      for (int64_t d = 0; d < dim; d += kPair) {
#pragma GCC unroll 2
        for (int part = first; part < first + kAtOnce; ++part) {
          decltype(products.numbers(row[0], n, d, part)) key[kKeys];
#pragma GCC unroll 16
          for (int k = 0; k < kKeys; ++k) key[k] = products.numbers(row[k], n + k, d, part);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            auto query = products.query(own + r * dim + d, part);
            keep_in_register(query);
#pragma GCC unroll 16
            for (int k = 0; k < kKeys; ++k) sum[k * R + r] = products.add(sum[k * R + r], key[k], query);
          }
        }
      }
    }
    Quad quads[kSums / 4];  // four neighbours among the sums are neighbours among the scores
#if defined(__AVX512F__)
    const Vec all = kUnit<E> * sum_lanes(sum);
    if (width == R) return store(score, all);
    std::memcpy(quads, &all, sizeof all);
#else
#pragma GCC unroll 4
    for (int i = 0; i < kSums; i += 4) quads[i / 4] = kUnit<E> * sum_lanes(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
#endif
#pragma GCC unroll 4
    for (int i = 0; i < kSums; i += 4) std::memcpy(score + i / R * width + i % R, &quads[i / 4], sizeof(Quad));
  };
  const Heads each = heads;  // in registers: `ahead` has numbers of the same type
  for (int64_t n = 0; n < count; n += kKeys, scores += kKeys * width) {
    for (int64_t row = 0; row < width; row += R) {
      const E* key[kKeys];
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) key[k] = keys[n + k];
      const auto* own = queries + row * dim;
      float* score = scores + row;
      for (int64_t head = each.count; head > 0; --head) {
        some_rows(own, n, key, score);
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) key[k] += each.row;
        own += each.queries;
        score += each.scores;
      }
    }
  }
}

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

// Sums of R rows x V vectors, times a unit and what they are worth now; decay may be null: as much as before.
template <int R, int V>
[[gnu::always_inline]] inline void load_sums(const float* from, int64_t from_row, const float* decay, float unit,
                                             Vec (&sum)[R][V]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = load(from + r * from_row + v * kLanes);
  }
  if (!decay && unit == 1.0f) return;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const Vec worth = broadcast(decay ? decay[r] * unit : unit);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] *= worth;
  }
}

template <int R, int V>
[[gnu::always_inline]] inline void store_sums(const Vec (&sum)[R][V], float unit, float* to, int64_t to_row) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(to + r * to_row + v * kLanes, unit * sum[r][v]);
  }
}

// out[row] = decay[row] * out[row] + sum over keys of weights[n, row] * value n, for R rows and V vectors of dims,
// which stay in registers while the keys go by: those from the pair at dim d on, or with kOdd from its second half on.
// decay may be null.
template <int R, int V, bool kOdd, class Products, class E, class Ahead>
[[gnu::always_inline]] inline void weigh(const Products& products, const float* weights, int64_t width,
                                         const E* const* values, int64_t count, int64_t from, int64_t d,
                                         const float* decay, float* out, int64_t out_row, Ahead& ahead) {
  out += d + kOdd * kLanes;
  Vec sum[R][V];
  load_sums(out, out_row, decay, 1.0f / kUnit<E>, sum);
  for (int64_t n = 0; n < count; ++n) {
    if (n % 8 == 0) ahead.step((std::min<int64_t>(8, count - n) + 1) / 2);
    Vec numbers[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
      numbers[v] = products.numbers(values[n] + from, n, d + (v + kOdd) / 2 * kPair, (v + kOdd) % 2);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float weight = weights[n * width + r];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r][v] += weight * numbers[v];
    }
  }
  store_sums(sum, kUnit<E>, out, out_row);
}

// function(vectors, odd, row, d) for all rows and dims, R rows x `vectors` at a time, from the pair at dim d on; odd:
// from its second half on. Dims in the outer loop: their part of the values stays in L1 for all rows.
template <int R, class E, class F>
void each_block(int64_t rows, int64_t dims, F&& function) {
  constexpr int kVectors = std::max(2, kAccumulators / R);
  int64_t d = 0;
  const auto block = [&](auto vectors, auto odd) {
    for (int64_t row = 0; row < rows; row += R) function(vectors, odd, row, d);
    d += vectors / 2 * 2 * kLanes;
  };
  const auto even = std::false_type{};
  if constexpr (kSumsOf<E> / R == 3) {  // threes, always two of them, but where twos would not take the rest
    const auto three = std::integral_constant<int, 3>{};
    for (const int64_t end = dims - dims / kLanes * 2 % 3 * 2 * kLanes; d < end; d += kPair) {
      block(three, even);
      block(three, std::true_type{});
    }
  }
  while (d + kVectors * kLanes <= dims) block(std::integral_constant<int, kVectors>{}, even);
  while (d < dims) block(std::integral_constant<int, 2>{}, even);
}

// How often each_block calls for R rows.
template <int R, class E>
int64_t blocks_of(int64_t dims) {
  int64_t blocks = 0;
  each_block<R, E>(R, dims, [&](auto, auto, int64_t, int64_t) { ++blocks; });
  return blocks;
}

// function(R): so many rows at a time fit a tile of this width.
template <class F>
void with_rows_at_once(int64_t width, F&& function) {
  if (width >= 4) return function(std::integral_constant<int, 4>{});
  if (width == 2) return function(std::integral_constant<int, 2>{});
  function(std::integral_constant<int, 1>{});
}

// score_few for any number of rows: queries [width, dim], scores [count, width].
template <int kDim = 0, class Products, class E, class Ahead>
void score_few_all(const Products& products, const typename Products::Query* queries, int64_t dim, const E* const* keys,
                   int64_t count, float* scores, int64_t width, const Heads& heads, Ahead& ahead) {
  with_rows_at_once(
      width, [&](auto r) { score_few<r, kDim>(products, queries, dim, keys, count, scores, width, heads, ahead); });
}

// function(r, v, odd, head, row, d, n, count): each_block for some values after the other, and all heads. Of `keys`
// values.
template <class E, class F>
void each_slice(const Heads& heads, int64_t width, int64_t rows, int64_t keys, int64_t dims, F&& function) {
  with_rows_at_once(width, [&](auto r) {
    for (int64_t n = 0; n < keys; n += heads.values) {
      for (int64_t head = 0; head < heads.count; ++head) {
        each_block<r, E>(rows, dims, [&](auto v, auto odd, int64_t row, int64_t d) __attribute__((always_inline)) {
          function(r, v, odd, head, row, d, n, std::min(heads.values, keys - n));
        });
      }
    }
  });
}

// Whether `weigh` is called so often for a tile that a call can be one step.
inline bool many_calls(int64_t width) { return width >= 4 * kLanes; }

// What a call takes for so many keys.
inline int64_t steps_of_block(int64_t width, int64_t count) { return many_calls(width) ? 1 : (count + 1) / 2; }

// weigh for `rows` rows of a tile and all dims: weights [count, width], sums [rows, dims].
template <class Products, class E, class Ahead>
void weigh_all(const Products& products, const float* weights, int64_t width, int64_t rows, const E* const* values,
               int64_t count, const float* decay, float* sums, int64_t dims, const Heads& heads, Ahead& ahead) {
  const auto block = [&](auto r, auto v, auto odd, int64_t head, int64_t row, int64_t d, int64_t n,
                         int64_t some) __attribute__((always_inline)) {
    const auto weigh_block = [&](auto& ahead) __attribute__((always_inline)) {
      weigh<r, v, odd>(products, weights + head * heads.scores + n * width + row, width, values + n, some,
                       head * heads.row, d, n ? nullptr : decay + head * heads.state + row,
                       sums + (head * width + row) * dims, dims, ahead);
    };
    if (std::is_same_v<E, float> && many_calls(width)) {
      FetchNothing nothing;
      ahead.step();
      weigh_block(nothing);
    } else {
      weigh_block(ahead);
    }
  };
  each_slice<E>(heads, width, rows, count, dims, block);
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
