// Keys and values of a paged cache, for attention: what paged_attention and accumulate_scores read.
#pragma once

#include "attention.h"
#include "rope.h"

namespace kvbackend::KVBACKEND_ISA {

// What a call may say about its keys besides the rows.
struct KeyExtras {
  const std::optional<Tensor>& positions;     // [nb, bs]
  const std::optional<Tensor>& rope_cos_sin;  // [P, rotary_dim]: keys are turned as they are read
  bool rope_interleaved;
  const std::optional<Tensor>& bias;  // [nb, bs, Hk]
};

template <class T>
class PagedSource {
 public:
  static constexpr bool kValuesAreKeys = false;
  static constexpr bool kInPlace = true;

  // Without value_cache, values have no dims.
  PagedSource(const Tensor& q, const CacheArguments& keys, const std::optional<CacheArguments>& values,
              const KeyExtras& extras)
      : q_(static_cast<const T*>(q.const_data_ptr())),
        q_token_(q.stride(0)),
        q_head_(q.stride(1)),
        q_dim_(q.stride(2)),
        heads_(q.size(1)),
        kv_heads_(keys.cache.size(2)),
        keys_(keys),
        bias_(extras.bias) {
    const int64_t num_blocks = keys.cache.size(0), block_size = keys.cache.size(1);
    KVBACKEND_CHECK(keys_.size() == q.size(2), keys.name, " holds rows of ", keys_.size(), " numbers and q has ",
                    q.size(2), " dims; they must be equal: pass the cache of this model");
    KVBACKEND_CHECK(kv_heads_ > 0 && heads_ % kv_heads_ == 0, "q has ", heads_, " heads and key_cache ", kv_heads_,
                    "; the first must be a multiple of the second: pass the heads of one rank together");
    if (values) {
      expect_shape(values->cache, values->name, {num_blocks, block_size, kv_heads_, values->cache.size(3)});
      values_.emplace(*values);
    }
    if (extras.positions) {
      expect_shape(*extras.positions, "key_positions", {num_blocks, block_size});
      positions_.emplace(*extras.positions, "key_positions");
    }
    if (extras.rope_cos_sin) {
      rope_.emplace(*extras.rope_cos_sin, q.scalar_type());
      rope_rows_ = extras.rope_cos_sin->size(0);
      rope_interleaved_ = extras.rope_interleaved;
      KVBACKEND_CHECK(rope_->rotary_dim() <= q.size(2), "rope_cos_sin rotates ", rope_->rotary_dim(),
                      " dims but keys have ", q.size(2), "; it must be at most that: pass the table of this model");
      KVBACKEND_CHECK(rope_rows_ > 0,
                      "rope_cos_sin has 0 rows; it must have one for each position: ", "pass the table of this model");
    }
    if (bias_) {
      expect_shape(*bias_, "key_bias", {num_blocks, block_size, kv_heads_});
      expect_dtype(*bias_, "key_bias", ScalarType::Float);
    }
  }

  int64_t heads() const { return heads_; }
  int64_t kv_heads() const { return kv_heads_; }
  int64_t dim() const { return keys_.size(); }
  int64_t value_dim() const { return values_ ? values_->size() : 0; }
  const CachedRows<T>& keys() const { return keys_; }
  const CachedRows<T>& values() const { return *values_; }

  bool in_place() const { return stored() && keys_.in_place() && (!values_ || values_->in_place()); }
  bool stored() const { return !rope_ && keys_.factored(); }

  template <class E>
  void load_query(int64_t token, int64_t head, E* out) const {
    load_row(q_ + token * q_token_ + head * q_head_, q_dim_, keys_.size(), out);
  }

  bool in_order() const { return !positions_; }
  int64_t position(int64_t block, int64_t slot) const { return (*positions_)(block, slot); }

  void locate(Keys& keys, int64_t n, int64_t count) const {
    keys_.locate(keys.block[n], keys.slot[n], n, count, keys.key);
    if (values_) values_->locate(keys.block[n], keys.slot[n], n, count, keys.value);
  }

  template <class E>
  void load_key(const Keys& keys, int64_t n, int64_t head, RowBuffer& buffer, E* out) const {
    keys_.load(keys.key, n, head, buffer, out);
    if constexpr (std::is_same_v<E, float>) {
      if (rope_) turn(keys.position[n], out);
    }
  }

  template <class E>
  void load_value(const Keys& keys, int64_t n, int64_t head, RowBuffer& buffer, E* out) const {
    values_->load(keys.value, n, head, buffer, out);
  }

  StoredRows<T> part(const Keys& keys, int) const { return {&keys_, keys.key.row}; }

  void prefetch(const Keys& keys, const Wanted& wanted, Prefetcher& ahead) const {
    keys_.prefetch(keys.key.row, wanted, ahead);
    if (values_) values_->prefetch(keys.value.row, wanted, ahead);
  }

  bool bias(const Keys& keys, int64_t head, float* out) const {
    if (!bias_) return false;
    const float* data = static_cast<const float*>(bias_->const_data_ptr()) + head * bias_->stride(2);
    for (int64_t n = 0; n < keys.count; ++n)
      out[n] = data[keys.block[n] * bias_->stride(0) + keys.slot[n] * bias_->stride(1)];
    return true;
  }

 private:
  void turn(int64_t position, float* key) const {
    std::vector<float> cos_sin(rope_->rotary_dim());
    rope_->load(std::clamp<int64_t>(position, 0, rope_rows_ - 1), cos_sin.data());
    rotate(key, cos_sin.data(), rope_->rotary_dim(), rope_interleaved_);
  }

  const T* q_;
  int64_t q_token_, q_head_, q_dim_, heads_, kv_heads_;
  CachedRows<T> keys_;
  std::optional<CachedRows<T>> values_;
  std::optional<Ids> positions_;
  std::optional<RotaryTable> rope_;
  int64_t rope_rows_ = 0;
  bool rope_interleaved_ = false;
  std::optional<Tensor> bias_;
};

// In paged_attention.cpp.
extern template void attend_to<float>(const PagedSource<float>&, const Pages&, const LogitRule&, const Plan&,
                                      const Results&);
extern template void attend_to<bf16>(const PagedSource<bf16>&, const Pages&, const LogitRule&, const Plan&,
                                     const Results&);
extern template void attend_to<fp16>(const PagedSource<fp16>&, const Pages&, const LogitRule&, const Plan&,
                                     const Results&);

inline std::vector<float> read_sinks(const std::optional<Tensor>& sinks, int64_t heads) {
  if (!sinks) return {};
  expect_shape(*sinks, "sinks", {heads});
  std::vector<float> values(heads);
  with_dtype(*sinks, "sinks", [&](auto zero) {
    load_row(static_cast<const decltype(zero)*>(sinks->const_data_ptr()), sinks->stride(0), heads, values.data());
  });
  return values;
}

}  // namespace kvbackend::KVBACKEND_ISA
