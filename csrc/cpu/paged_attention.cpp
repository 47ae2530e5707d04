// Dense attention over a paged K/V cache.
#include "attention.h"
#include "rope.h"

namespace kvbackend::KVBACKEND_ISA {
namespace {

template <class T>
struct Cache {  // [nb, bs, Hk, D]
  explicit Cache(const Tensor& tensor)
      : data(static_cast<const T*>(tensor.const_data_ptr())),
        block(tensor.stride(0)),
        slot(tensor.stride(1)),
        head(tensor.stride(2)),
        dim(tensor.stride(3)),
        size(tensor.size(3)) {}

  const T* data;
  int64_t block, slot, head, dim, size;
};

template <class T>
class PagedSource {
 public:
  static constexpr bool kValuesAreKeys = false;

  PagedSource(const Tensor& q, const Tensor& key_cache, const Tensor& value_cache)
      : q_(static_cast<const T*>(q.const_data_ptr())),
        q_token_(q.stride(0)),
        q_head_(q.stride(1)),
        q_dim_(q.stride(2)),
        heads_(q.size(1)),
        kv_heads_(key_cache.size(2)),
        keys_(key_cache),
        values_(value_cache) {}

  std::optional<Ids> positions;
  std::optional<RotaryTable> rope;  // keys are turned as they are read
  int64_t rope_rows = 0;
  bool rope_interleaved = false;
  std::optional<Tensor> key_bias;

  int64_t heads() const { return heads_; }
  int64_t kv_heads() const { return kv_heads_; }
  int64_t dim() const { return keys_.size; }
  int64_t value_dim() const { return values_.size; }

  bool in_place() const {
    return stored() && keys_.dim == 1 && values_.dim == 1 && keys_.size % kPair == 0 && values_.size % kPair == 0;
  }

  bool stored() const { return !rope; }

  template <class E>
  void load_query(int64_t token, int64_t head, E* out) const {
    load_row(q_ + token * q_token_ + head * q_head_, q_dim_, keys_.size, out);
  }

  bool in_order() const { return !positions; }
  int64_t position(int64_t block, int64_t slot) const { return (*positions)(block, slot); }

  void locate(Keys& keys, int64_t n) const {
    keys.key[n] = keys.block[n] * keys_.block + keys.slot[n] * keys_.slot;
    keys.value[n] = keys.block[n] * values_.block + keys.slot[n] * values_.slot;
  }

  const T* key_row(const Keys& keys, int64_t n, int64_t head) const {
    return keys_.data + keys.key[n] + head * keys_.head;
  }
  const T* value_row(const Keys& keys, int64_t n, int64_t head) const {
    return values_.data + keys.value[n] + head * values_.head;
  }

  template <class E>
  void load_key(const Keys& keys, int64_t n, int64_t head, E* out) const {
    load_row(key_row(keys, n, head), keys_.dim, keys_.size, out);
    if constexpr (std::is_same_v<E, float>) {
      if (rope) turn(keys.position[n], out);
    }
  }

  template <class E>
  void load_value(const Keys& keys, int64_t n, int64_t head, E* out) const {
    load_row(value_row(keys, n, head), values_.dim, values_.size, out);
  }

  void prefetch(const Keys& keys, int64_t head, Prefetcher& ahead) const {
    for (int64_t n = 0; n < keys.count; ++n) ahead.add(key_row(keys, n, head), keys_.size * sizeof(T));
    for (int64_t n = 0; n < keys.count; ++n) ahead.add(value_row(keys, n, head), values_.size * sizeof(T));
  }

  bool bias(const Keys& keys, int64_t head, float* out) const {
    if (!key_bias) return false;
    const float* data = static_cast<const float*>(key_bias->const_data_ptr()) + head * key_bias->stride(2);
    for (int64_t n = 0; n < keys.count; ++n)
      out[n] = data[keys.block[n] * key_bias->stride(0) + keys.slot[n] * key_bias->stride(1)];
    return true;
  }

 private:
  void turn(int64_t position, float* key) const {
    std::vector<float> cos_sin(rope->rotary_dim());
    rope->load(std::clamp<int64_t>(position, 0, rope_rows - 1), cos_sin.data());
    rotate(key, cos_sin.data(), rope->rotary_dim(), rope_interleaved);
  }

  const T* q_;
  int64_t q_token_, q_head_, q_dim_, heads_, kv_heads_;
  Cache<T> keys_, values_;
};

std::vector<float> read_sinks(const std::optional<Tensor>& sinks, int64_t heads) {
  if (!sinks) return {};
  expect_shape(*sinks, "sinks", {heads});
  std::vector<float> values(heads);
  with_dtype(*sinks, "sinks", [&](auto zero) {
    load_row(static_cast<const decltype(zero)*>(sinks->const_data_ptr()), sinks->stride(0), heads, values.data());
  });
  return values;
}

}  // namespace

std::tuple<Tensor, Tensor> paged_attention(
    const Tensor& q, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
    const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t max_seqlen_q, double softmax_scale, bool causal,
    int64_t window, double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& /*k_scale*/,
    const std::optional<Tensor>& /*v_scale*/, const std::optional<Tensor>& /*k_scale_cache*/,
    const std::optional<Tensor>& /*v_scale_cache*/, const std::string& /*kv_format*/,
    const std::optional<Tensor>& key_positions, const std::optional<Tensor>& rope_cos_sin, bool rope_interleaved,
    const std::optional<Tensor>& key_bias, bool return_lse) {
  expect_rank(q, "q", 3);
  expect_rank(key_cache, "key_cache", 4);
  expect_rank(block_table, "block_table", 2);
  const int64_t num_blocks = key_cache.size(0), block_size = key_cache.size(1), kv_heads = key_cache.size(2);
  expect_rank(value_cache, "value_cache", 4);
  expect_shape(key_cache, "key_cache", {num_blocks, block_size, kv_heads, q.size(2)});
  expect_shape(value_cache, "value_cache", {num_blocks, block_size, kv_heads, value_cache.size(3)});
  expect_dtype(key_cache, "key_cache", q.scalar_type());
  expect_dtype(value_cache, "value_cache", q.scalar_type());
  KVBACKEND_CHECK(kv_heads > 0 && q.size(1) % kv_heads == 0, "q has ", q.size(1), " heads and key_cache ", kv_heads,
                  "; the first must be a multiple of the second: pass the heads of one rank together");
  const Pages pages(block_table, num_blocks, block_size);
  const Rule rule{static_cast<float>(softmax_scale), causal, window, static_cast<float>(softcap)};
  std::vector<Sequence> batch = read_batch(pages, seq_lens, cu_seqlens_q, max_seqlen_q, q.size(0));
  std::tuple<Tensor, Tensor> result;
  with_dtype(q, "q", [&](auto zero) {
    using T = decltype(zero);
    PagedSource<T> source(q, key_cache, value_cache);
    if (key_positions) {
      expect_shape(*key_positions, "key_positions", {num_blocks, block_size});
      source.positions.emplace(*key_positions, "key_positions");
    }
    if (rope_cos_sin) {
      source.rope.emplace(*rope_cos_sin, q.scalar_type());
      source.rope_rows = rope_cos_sin->size(0);
      source.rope_interleaved = rope_interleaved;
      KVBACKEND_CHECK(rope_cos_sin->size(1) <= q.size(2), "rope_cos_sin rotates ", rope_cos_sin->size(1),
                      " dims but keys have ", q.size(2), "; it must be at most that: pass the table of this model");
      KVBACKEND_CHECK(source.rope_rows > 0,
                      "rope_cos_sin has 0 rows; it must have one for each position: ", "pass the table of this model");
    }
    if (key_bias) {
      expect_shape(*key_bias, "key_bias", {num_blocks, block_size, kv_heads});
      expect_dtype(*key_bias, "key_bias", ScalarType::Float);
      source.key_bias = *key_bias;
    }
    result = attend<T>(source, pages, rule, std::move(batch), q, read_sinks(sinks, q.size(1)), return_lse);
  });
  return result;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER_AMX(paged_attention)
