// MLA's latent cache as a source of attention: one kv head, whose key is the latent and the rotary part, whose value is
// the latent part.
#pragma once

#include "attention.h"

namespace kvbackend::KVBACKEND_ISA {

template <class T>
struct QueryRows {  // of queries [T, H, D]
  explicit QueryRows(const Tensor& tensor)
      : data(static_cast<const T*>(tensor.const_data_ptr())),
        first(tensor.stride(0)),
        second(tensor.stride(1)),
        dim(tensor.stride(2)),
        size(tensor.size(2)) {}

  template <class E>
  void load(int64_t offset, E* out) const {
    load_row(data + offset, dim, size, out);
  }

  const T* data;
  int64_t first, second, dim, size;
};

template <class T>
class LatentSource {
 public:
  static constexpr bool kValuesAreKeys = true;
  static constexpr bool kInPlace = false;

  LatentSource(const Tensor& q_nope, const Tensor& q_pe, const CacheArguments& ckv, const CacheArguments& kpe)
      : heads_(q_nope.size(1)), q_nope_(q_nope), q_pe_(q_pe), ckv_(ckv), kpe_(kpe) {
    KVBACKEND_CHECK(ckv_.size() == q_nope.size(2) && kpe_.size() == q_pe.size(2), ckv.name, " and ", kpe.name,
                    " hold rows of ", ckv_.size(), " and ", kpe_.size(), " numbers, q_nope and q_pe have ",
                    q_nope.size(2), " and ", q_pe.size(2), "; they must be equal: pass the caches of this model");
  }

  int64_t heads() const { return heads_; }
  int64_t kv_heads() const { return 1; }
  int64_t dim() const { return ckv_.size() + kpe_.size(); }
  int64_t value_dim() const { return ckv_.size(); }
  const CachedRows<T>& keys() const { return ckv_; }
  const CachedRows<T>& values() const { return ckv_; }
  // Where the latent has a factor, tiles must tell it from the rotary part.
  bool stored() const { return ckv_.factored() && (!ckv_.has_factor() || ckv_.size() % 32 == 0); }

  template <class E>
  void load_query(int64_t token, int64_t head, E* out) const {
    q_nope_.load(token * q_nope_.first + head * q_nope_.second, out);
    q_pe_.load(token * q_pe_.first + head * q_pe_.second, out + ckv_.size());
  }

  bool in_order() const { return true; }
  int64_t position(int64_t /*block*/, int64_t /*slot*/) const { return 0; }

  void locate(Keys& keys, int64_t n, int64_t count) const {
    ckv_.locate(keys.block[n], keys.slot[n], n, count, keys.key);
    kpe_.locate(keys.block[n], keys.slot[n], n, count, keys.value);
  }

  template <class E>
  void load_key(const Keys& keys, int64_t n, int64_t /*head*/, RowBuffer& buffer, E* out) const {
    ckv_.load(keys.key, n, 0, buffer, out);
    kpe_.load(keys.value, n, 0, buffer, out + ckv_.size());
  }
  template <class E>
  void load_value(const Keys&, int64_t, int64_t, RowBuffer&, E*) const {}

  StoredRows<T> part(const Keys& keys, int i) const {
    return i == 0 ? StoredRows<T>{&ckv_, keys.key.row} : StoredRows<T>{&kpe_, keys.value.row};
  }

  // Two parts side by side, as a cache of both has them, are asked for as one row.
  void prefetch(const Keys& keys, const Wanted& wanted, Prefetcher& ahead) const {
    const auto beside = [&](int64_t n) {
      return ckv_.row(keys.key.row[n], 0) + ckv_.row_bytes() == kpe_.row(keys.value.row[n], 0);
    };
    if (wanted.first < wanted.last && beside(wanted.first) && beside(wanted.last - 1)) {
      const int64_t bytes = ckv_.row_bytes() + kpe_.row_bytes();
      return ahead.add(ckv_.row(0, 0), bytes, keys.key.row + wanted.first, wanted.last - wanted.first);
    }
    ckv_.prefetch(keys.key.row, wanted, ahead);
    kpe_.prefetch(keys.value.row, wanted, ahead);
  }

  bool bias(const Keys&, int64_t, float*) const { return false; }

 private:
  int64_t heads_;
  QueryRows<T> q_nope_, q_pe_;
  CachedRows<T> ckv_, kpe_;
};

}  // namespace kvbackend::KVBACKEND_ISA
