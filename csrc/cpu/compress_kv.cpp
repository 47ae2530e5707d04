// Groups of tokens to one row each: a softmax over the tokens in each channel, then RMSNorm and RoPE.
#include "rope.h"
#include "simd.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------------- pooling

// One token's part in an entry: rows of dim channels, and what is added to its gate.
template <class T>
struct Member {
  const T *kv, *gate;
  const float* bias;
  const float *kept_kv = nullptr, *kept_gate = nullptr;  // instead, of a token that a state kept
};

template <class T>
using Members = std::vector<Member<T>>;  // of one entry, in order of their positions

// Vectors of channels, all whole.
struct Whole {
  template <class T>
  Vec operator()(const T* from) const {
    return load(from);
  }
};

// The last channels of a row: the lanes beyond `count` are 0, and nothing beyond them is read.
struct Partial {
  int64_t count;

  template <class T>
  Vec operator()(const T* from) const {
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = to_float(from[i]);
    return load(lanes);
  }
};

// What a vector of channels is so far: sums over tokens, whose weights are relative to the largest gate.
struct Sums {
  Vec peak, weights, rows;
};

// N tokens more in V vectors of channels. Gates stay in registers.
template <int N, int V, class T, class Load>
void add(const Member<T>* members, int64_t channel, Load load_row, bool first, Sums* sums) {
  constexpr bool kRough = sizeof(T) == 2;
  Vec gates[N][V], peak[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) peak[v] = first ? broadcast(std::numeric_limits<float>::lowest()) : sums[v].peak;
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Member<T>& member = members[n];
      const int64_t at = channel + v * kLanes;
      gates[n][v] =
          member.kept_gate ? load_row(member.kept_gate + at) : load_row(member.gate + at) + load_row(member.bias + at);
      peak[v] = maximum(gates[n][v], peak[v]);  // never -infinity, which must not be subtracted from itself
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const Vec decay = first ? Vec{} : exp_small<kRough>(sums[v].peak - peak[v]);
    Vec weights = first ? Vec{} : sums[v].weights * decay, rows = first ? Vec{} : sums[v].rows * decay;
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Member<T>& member = members[n];
      const int64_t at = channel + v * kLanes;
      const Vec weight = exp_small<kRough>(gates[n][v] - peak[v]);
      weights += weight;
      rows += weight * (member.kept_kv ? load_row(member.kept_kv + at) : load_row(member.kv + at));
    }
    sums[v] = {peak[v], weights, rows};
  }
}

// Rows of tokens that later entries will read, asked for in the order of memory.
template <class T>
struct Upcoming {
  const T *kv, *gate;
  int64_t kv_stride, gate_stride, tokens, width;
  int64_t channel = 0, due = 0;

  void ask(int64_t numbers) {  // so many of kv, and as many gates
    constexpr int64_t kLine = 64 / sizeof(T);
    for (due += numbers; due >= kLine && tokens > 0; due -= kLine) {
      __builtin_prefetch(kv + channel, 0, 2);
      __builtin_prefetch(gate + channel, 0, 2);
      channel += kLine;
      if (channel < width) continue;
      channel = 0;
      kv += kv_stride;
      gate += gate_stride;
      --tokens;
    }
  }
};

// The weighted means of an entry's members. `sums` and `out` have room for whole vectors. Inlined it takes a fifth
// longer.
template <class T>
[[gnu::noinline]] void pool(const Members<T>& members, Upcoming<T> upcoming, int64_t dim, std::vector<Sums>& sums,
                            float* out) {
  constexpr int kTile = 2;  // vectors at a time
  const int64_t count = members.size();
  int64_t i = 0;
  const auto add_tokens = [&](auto group) {
    int64_t channel = 0;
    for (; channel + kTile * kLanes <= dim; channel += kTile * kLanes) {
      upcoming.ask(group * kTile * kLanes);
      add<group, kTile>(&members[i], channel, Whole{}, i == 0, &sums[channel / kLanes]);
    }
    for (; channel < dim; channel += kLanes) {
      const Partial last{std::min<int64_t>(kLanes, dim - channel)};
      add<group, 1>(&members[i], channel, last, i == 0, &sums[channel / kLanes]);
    }
    i += group;
  };
  while (i + 8 <= count) add_tokens(std::integral_constant<int, 8>{});
  if (count & 4) add_tokens(std::integral_constant<int, 4>{});
  if (count & 2) add_tokens(std::integral_constant<int, 2>{});
  if (count & 1) add_tokens(std::integral_constant<int, 1>{});
  for (const Sums& channels : sums) {
    store(out, channels.rows / channels.weights);
    out += kLanes;
  }
}

// row over its root mean square, times the weights, in place
void normalize(float* row, const float* weight, int64_t dim, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < dim; ++i) squares += row[i] * row[i];
  const float scale = 1 / std::sqrt(squares / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < dim; ++i) row[i] *= scale * weight[i];
}

// ------------------------------------------------------------------------------------------------------------ the call

struct Sequence {
  int64_t first_token, start, end, state;  // positions [start, end) are tokens of the call; state -1: none
};

struct Entry {
  int64_t sequence, index;
};

std::vector<float> floats(const Tensor& tensor, const char* name) {  // any strides, row by row
  const int64_t columns = tensor.size(tensor.dim() - 1), rows = tensor.dim() == 2 ? tensor.size(0) : 1;
  std::vector<float> out(rows * columns);
  with_dtype(tensor, name, [&](auto zero) {
    const auto* data = static_cast<const decltype(zero)*>(tensor.const_data_ptr());
    const int64_t stride = tensor.dim() == 2 ? tensor.stride(0) : 0;
    for (int64_t row = 0; row < rows; ++row)
      load_row(data + row * stride, tensor.stride(tensor.dim() - 1), columns, out.data() + row * columns);
  });
  return out;
}

template <class T>
class Rows {  // [T, width] with channels beside each other; a tensor that has them apart is copied
 public:
  explicit Rows(const Tensor& tensor)
      : data_(static_cast<const T*>(tensor.const_data_ptr())), stride_(tensor.stride(0)) {
    const int64_t rows = tensor.size(0), width = tensor.size(1);
    if (tensor.stride(1) == 1 || width < 2) return;
    copy_.resize(rows * width);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < width; ++i) copy_[row * width + i] = data_[row * stride_ + i * tensor.stride(1)];
    data_ = copy_.data();
    stride_ = width;
  }
  const T* operator[](int64_t row) const { return data_ + row * stride_; }
  int64_t stride() const { return stride_; }

 private:
  const T* data_;
  int64_t stride_;
  std::vector<T> copy_;
};

class States {  // rings of kept tokens, [num_states, ring, 2 * width]
 public:
  States(const Tensor& tensor, int64_t width)
      : ring(tensor.size(1)),
        data_(static_cast<float*>(tensor.mutable_data_ptr())),
        state_stride_(tensor.stride(0)),
        row_stride_(tensor.stride(1)),
        width_(width) {
    KVBACKEND_CHECK(tensor.stride(2) == 1 || tensor.size(2) < 2, "state has a stride of ", tensor.stride(2),
                    " in its last dim; it must be dense there: allocate it so");
  }
  float* kv(int64_t state, int64_t position) const {
    return data_ + state * state_stride_ + position % ring * row_stride_;
  }
  float* gate(int64_t state, int64_t position) const { return kv(state, position) + width_; }

  int64_t ring;

 private:
  float* data_;
  int64_t state_stride_, row_stride_, width_;
};

std::vector<Sequence> read_sequences(const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t num_tokens,
                                     const std::optional<Tensor>& state_slots, int64_t num_states) {
  const Ids lengths(seq_lens, "seq_lens"), cumulated(cu_seqlens_q, "cu_seqlens_q");
  std::optional<Ids> slots;
  if (state_slots) slots.emplace(*state_slots, "state_slots");
  std::vector<Sequence> batch;
  for (int64_t i = 0; i < seq_lens.size(0); ++i) {
    const int64_t first = std::clamp<int64_t>(cumulated[i], 0, num_tokens);
    const int64_t last = std::clamp<int64_t>(cumulated[i + 1], first, num_tokens);
    const int64_t state = slots ? (*slots)[i] : -1, end = std::max<int64_t>(lengths[i], 0);
    batch.push_back({first, end - (last - first), end, state < num_states ? std::max<int64_t>(state, -1) : -1});
  }
  return batch;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> compress_kv(const Tensor& kv, const Tensor& norm_weight, const Tensor& seq_lens,
                                               const Tensor& cu_seqlens_q, int64_t compress_ratio, double eps,
                                               bool overlap, const std::optional<Tensor>& gate,
                                               const std::optional<Tensor>& position_bias,
                                               const std::optional<Tensor>& state,
                                               const std::optional<Tensor>& state_slots,
                                               const std::optional<Tensor>& cos_sin,
                                               const std::optional<Tensor>& block_table, int64_t block_size) {
  expect_rank(kv, "kv", 2);
  expect_rank(norm_weight, "norm_weight", 1);
  expect_rank(seq_lens, "seq_lens", 1);
  KVBACKEND_CHECK(compress_ratio >= 1, "compress_ratio is ", compress_ratio,
                  "; it must be 1 or more: pass a group's tokens");
  const int64_t num_tokens = kv.size(0), num_seqs = seq_lens.size(0), dim = norm_weight.size(0);
  const int64_t stages = overlap ? 2 : 1, width = stages * dim, num_states = state ? state->size(0) : 0;
  expect_shape(kv, "kv", {num_tokens, width});
  expect_shape(cu_seqlens_q, "cu_seqlens_q", {num_seqs + 1});
  KVBACKEND_CHECK(gate.has_value() == (compress_ratio > 1),
                  "gate and a compress_ratio above 1 come together: pass both");
  if (gate) {
    expect_shape(*gate, "gate", {num_tokens, width});
    expect_dtype(*gate, "gate", kv.scalar_type());
  }
  if (position_bias) expect_shape(*position_bias, "position_bias", {compress_ratio, width});
  KVBACKEND_CHECK(state.has_value() == state_slots.has_value(), "state and state_slots come together: pass both");
  if (state) {
    expect_rank(*state, "state", 3);
    expect_shape(*state, "state", {num_states, state->size(1), 2 * width});
    expect_shape(*state_slots, "state_slots", {num_seqs});
    expect_dtype(*state, "state", ScalarType::Float);
    KVBACKEND_CHECK(state->size(1) >= stages * compress_ratio - 1, "state has a ring of ", state->size(1),
                    " rows; it must hold all tokens of an entry but the last: allocate a longer one");
  }
  std::optional<RotaryTable> table;
  if (cos_sin) {
    table.emplace(*cos_sin, kv.scalar_type());
    KVBACKEND_CHECK(table->rotary_dim() <= dim, "cos_sin rotates more dims than rows have: pass this model's table");
  }
  std::optional<Ids> blocks;
  if (block_table) {
    expect_rank(*block_table, "block_table", 2);
    expect_shape(*block_table, "block_table", {num_seqs, block_table->size(1)});
    KVBACKEND_CHECK(block_size > 0, "block_size is ", block_size, "; it must be positive: pass a block's rows");
    blocks.emplace(*block_table, "block_table");
  }

  const int64_t num_rows = std::min(num_tokens, num_tokens / compress_ratio + num_seqs);
  Tensor rows = new_result(kv, {num_rows, dim});
  Tensor positions = new_result(kv, {num_rows}, ScalarType::Long);
  Tensor slots = new_result(kv, {block_table ? num_rows : 0}, ScalarType::Long);
  int64_t* position_of = static_cast<int64_t*>(positions.mutable_data_ptr());
  int64_t* slot_of = static_cast<int64_t*>(slots.mutable_data_ptr());
  std::fill_n(position_of, num_rows, -1);
  std::fill_n(slot_of, slots.size(0), -1);

  const std::vector<Sequence> batch = read_sequences(seq_lens, cu_seqlens_q, num_tokens, state_slots, num_states);
  std::vector<Entry> entries;
  for (int64_t i = 0; i < num_seqs; ++i) {
    for (int64_t n = std::max<int64_t>(batch[i].start, 0) / compress_ratio; n < batch[i].end / compress_ratio; ++n) {
      const int64_t place = entries.size();
      if (place == num_rows) break;
      entries.push_back({i, n});
      position_of[place] = n * compress_ratio;
      if (!blocks || n / block_size >= block_table->size(1)) continue;
      const int64_t block = (*blocks)(i, n / block_size);
      if (block >= 0) slot_of[place] = block * block_size + n % block_size;
    }
  }

  const std::vector<float> weights = floats(norm_weight, "norm_weight");
  const std::vector<float> bias = position_bias ? floats(*position_bias, "position_bias") : std::vector<float>();
  std::optional<States> states;
  if (state) states.emplace(*state, width);

  with_dtype(kv, "kv", [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> kv_rows(kv), gate_rows(gate ? *gate : kv);
    T* out = static_cast<T*>(rows.mutable_data_ptr());
    std::memset(static_cast<void*>(out + entries.size() * dim), 0, (num_rows - entries.size()) * dim * sizeof(T));
    const std::vector<T> no_gate(gate ? 0 : dim);  // with one token any gate will do

    const std::vector<float> no_bias(position_bias ? 0 : width);
    const auto gather = [&](const Entry& entry, Members<T>& members) {
      const Sequence& sequence = batch[entry.sequence];
      const int64_t group = entry.index * compress_ratio, before = (stages - 1) * compress_ratio;
      members.clear();
      for (int64_t p = std::max<int64_t>(group - before, 0); p < group + compress_ratio; ++p) {
        const int64_t column = p < group ? 0 : (stages - 1) * dim;  // the half of the row that this entry takes
        if (p >= sequence.start) {
          const int64_t token = sequence.first_token + p - sequence.start;
          const float* added = position_bias ? bias.data() + p % compress_ratio * width : no_bias.data();
          members.push_back(
              {kv_rows[token] + column, gate ? gate_rows[token] + column : no_gate.data(), added + column});
        } else if (sequence.state >= 0) {
          members.push_back({nullptr, nullptr, nullptr, states->kv(sequence.state, p) + column,
                             states->gate(sequence.state, p) + column});
        }
      }
    };

    const auto upcoming = [&](const Entry& entry) {
      constexpr int64_t kAhead = 8;  // tokens
      const Sequence& sequence = batch[entry.sequence];
      const int64_t read = std::max<int64_t>(entry.index * compress_ratio - sequence.start, 0);
      const int64_t token = sequence.first_token + read + kAhead;
      const int64_t count = std::min(compress_ratio, num_tokens - token);
      return Upcoming<T>{kv_rows[token], gate_rows[token], kv_rows.stride(), gate_rows.stride(), count, width};
    };

    // Parallel over entries; a row stays in L1 until it is written.
    const int64_t bytes = stages * compress_ratio * dim * 2 * static_cast<int64_t>(sizeof(T));
    torch::stable::parallel_for(0, entries.size(), grain(bytes), [&](int64_t begin, int64_t end) {
      Members<T> members;
      std::vector<Sums> sums((dim + kLanes - 1) / kLanes);
      std::vector<float> row(sums.size() * kLanes), angles(table ? table->rotary_dim() : 0);
      for (int64_t place = begin; place < end; ++place) {
        gather(entries[place], members);
        pool(members, upcoming(entries[place]), dim, sums, row.data());
        normalize(row.data(), weights.data(), dim, static_cast<float>(eps));
        if (table && table->load(position_of[place], angles.data()))
          rotate(row.data() + dim - table->rotary_dim(), angles.data(), table->rotary_dim(), true);
        store_row(row.data(), dim, out + place * dim, 1);
      }
    });

    // Parallel over sequences, after all entries have read: the last tokens of each, as many as a ring holds.
    if (!states || !gate) return;
    torch::stable::parallel_for(0, num_seqs, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Sequence& sequence = batch[i];
        if (sequence.state < 0) continue;
        for (int64_t p = std::max({int64_t{0}, sequence.start, sequence.end - states->ring}); p < sequence.end; ++p) {
          const int64_t token = sequence.first_token + p - sequence.start;
          load_row(kv_rows[token], 1, width, states->kv(sequence.state, p));
          float* kept = states->gate(sequence.state, p);
          load_row(gate_rows[token], 1, width, kept);
          if (!position_bias) continue;
          for (int64_t c = 0; c < width; ++c) kept[c] += bias[p % compress_ratio * width + c];
        }
      }
    });
  });
  return {rows, positions, slots};
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(compress_kv)
