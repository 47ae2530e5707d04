// Rows of sequences out of a paged cache.
#include "box_copy.h"
#include "code_pages.h"
#include "decode.h"

namespace kvbackend::KVBACKEND_ISA {

// Which rows of a cache the rows of the output are.
class Ragged {
 public:
  Ragged(const Tensor& cache, const Tensor& block_table, const Tensor& cu_seqlens,
         const std::optional<Tensor>& seq_starts)
      : num_blocks_(cache.size(0)),
        block_size_(cache.size(1)),
        max_blocks_(block_table.size(1)),
        num_seqs_(block_table.size(0)),
        blocks_(block_table, "block_table"),
        bounds_(cu_seqlens, "cu_seqlens") {
    if (seq_starts) starts_.emplace(*seq_starts, "seq_starts");
    KVBACKEND_CHECK(bounds_[0] == 0, "cu_seqlens starts with ", bounds_[0],
                    "; it is the running sum of lengths and must start with 0: prepend a 0");
  }

  // For the rows [token, end) of the output, in stretches that end with a block, a sequence or the range:
  // found(token, count, block, slot) where they are in the cache, missing(token, count) where they are not.
  template <class F, class G>
  void visit(int64_t token, int64_t end, F&& found, G&& missing) const {
    int64_t sequence = 0, count;
    for (; token < end; token += count) {
      count = end - token;
      if (token < bounds_[num_seqs_]) {
        while (sequence + 1 < num_seqs_ && bounds_[sequence + 1] <= token) ++sequence;
        const int64_t position = token - bounds_[sequence] + (starts_ ? (*starts_)[sequence] : 0);
        count = std::clamp<int64_t>(bounds_[sequence + 1] - token, 1, count);
        if (position >= 0 && block_size_ > 0 && position / block_size_ < max_blocks_) {
          const int64_t slot = position % block_size_, block = blocks_(sequence, position / block_size_);
          count = std::min(count, block_size_ - slot);
          if (block >= 0 && block < num_blocks_) {
            found(token, count, block, slot);
            continue;
          }
        } else {
          count = 1;  // the next position may be in the table
        }
      }
      missing(token, count);
    }
  }

 private:
  int64_t num_blocks_, block_size_, max_blocks_, num_seqs_;
  Ids blocks_, bounds_;
  std::optional<Ids> starts_;
};

// Copies one stretch of bytes after the other, each when the next is known: lines are asked for some way ahead, from
// one stretch into the next, as a core's own prefetching begins anew with each page.
class Stretches {
 public:
  void add(char* to, const char* from, int64_t bytes) {
    copy(from, bytes);
    to_ = to, from_ = from, bytes_ = bytes;
  }

  void finish() {
    copy(nullptr, 0);
    bytes_ = 0;
  }

 private:
  static constexpr int64_t kAhead = 4096, kPiece = 256;

  void copy(const char* next, int64_t next_bytes) {
    for (int64_t i = 0; i < bytes_; i += kPiece) {
      const int64_t until = std::min(i + kPiece + kAhead, bytes_ + next_bytes);
      for (; asked_ < until; asked_ += 64)
        __builtin_prefetch(asked_ < bytes_ ? from_ + asked_ : next + (asked_ - bytes_), 0, 2);
      if (bytes_ - i >= kPiece) {
        std::memcpy(to_ + i, from_ + i, kPiece);
      } else {
        std::memcpy(to_ + i, from_ + i, bytes_ - i);
      }
    }
    asked_ = std::max<int64_t>(asked_ - bytes_, 0);
  }

  char* to_ = nullptr;
  const char* from_ = nullptr;
  int64_t bytes_ = 0, asked_ = 0;  // asked_: of these and the next
};

// Rows as they are. Parallel over rows of the output.
inline void copy_rows(const Tensor& cache, const Ragged& ragged, const Tensor& out) {
  const BoxCopy row(cache, 2, out, 1);
  const int64_t element = static_cast<int64_t>(cache.element_size()), row_bytes = row.bytes();
  const int64_t block_bytes = cache.stride(0) * element, slot_bytes = cache.stride(1) * element;
  const bool dense = row.is_one_run() && slot_bytes == row_bytes;
  const char* from = static_cast<const char*>(cache.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, out.size(0), grain(row_bytes), [&](int64_t begin, int64_t end) {
    Stretches stretches;
    const auto found = [&](int64_t token, int64_t count, int64_t block, int64_t slot) {
      const char* slots = from + block * block_bytes + slot * slot_bytes;
      if (dense) {
        stretches.add(to + token * row_bytes, slots, count * row_bytes);
      } else {
        for (int64_t i = 0; i < count; ++i) row(slots + i * slot_bytes, to + (token + i) * row_bytes);
      }
    };
    const auto missing = [&](int64_t token, int64_t count) {
      std::memset(to + token * row_bytes, 0, count * row_bytes);
    };
    ragged.visit(begin, end, found, missing);
    stretches.finish();
  });
}

// Codes as numbers. Parallel over rows of the output.
template <class Code, class Out>
void decode_rows(CodePages pages, const Ragged& ragged, int64_t num_tokens, Out* out) {
  const bool merged = pages.dense() && pages.scales.merge_heads(pages.heads);
  const int64_t heads = merged ? 1 : pages.heads, row = merged ? pages.heads * pages.dim : pages.dim;
  const int64_t row_codes = row / kPerByte<Code>, token_row = heads * row;
  torch::stable::parallel_for(0, num_tokens, grain(token_row * 4), [&](int64_t begin, int64_t end) {
    std::vector<float> values(pages.scales.count()), lows(kHasMinimum<Code> ? values.size() : 0);
    std::vector<Code> dense(pages.stride() == 1 ? 0 : row_codes);
    int64_t read = -1;
    const auto found = [&](int64_t token, int64_t count, int64_t block, int64_t slot) {
      for (int64_t i = 0; i < count * heads; ++i) {
        const int64_t head = i % heads;
        const Code* from = pages.at<Code>(block, slot + i / heads, head);
        if (pages.stride() != 1) {
          for (int64_t j = 0; j < row_codes; ++j) dense[j] = from[j * pages.stride()];
          from = dense.data();
        }
        const int64_t scale = pages.scales.offset(block, slot + i / heads, head);
        if (scale != read) pages.scales.read(scale, values.data(), lows.data());
        read = scale;
        decode_row(from, pages.scales.span(), pages.scales.count(), values.data(), lows.data(), pages.global,
                   out + token * token_row + i * row);
      }
    };
    const auto missing = [&](int64_t token, int64_t count) {
      std::memset(out + token * token_row, 0, count * token_row * sizeof(Out));
    };
    ragged.visit(begin, end, found, missing);
  });
}

Tensor gather_cache(const Tensor& cache, const Tensor& block_table, const Tensor& cu_seqlens, int64_t num_tokens,
                    const std::optional<Tensor>& seq_starts, const std::string& kv_format,
                    const std::optional<Tensor>& scale, const std::optional<Tensor>& scale_cache,
                    const std::string& out_format) {
  KVBACKEND_CHECK(cache.dim() > 1, "cache has ", cache.dim(), " dims; it must have blocks and slots: reshape it");
  KVBACKEND_CHECK(num_tokens >= 0, "num_tokens is ", num_tokens,
                  "; it must be at least 0: pass the rows of the output");
  expect_rank(block_table, "block_table", 2);
  const int64_t num_seqs = block_table.size(0);
  expect_shape(cu_seqlens, "cu_seqlens", {num_seqs + 1});
  expect_dtype(cu_seqlens, "cu_seqlens", ScalarType::Int);
  if (seq_starts) {
    expect_shape(*seq_starts, "seq_starts", {num_seqs});
    expect_dtype(*seq_starts, "seq_starts", ScalarType::Int);
  }
  const Ragged ragged(cache, block_table, cu_seqlens, seq_starts);
  const KVFormat* format = format_pair(kv_format).first;
  std::vector<int64_t> shape{num_tokens};
  for (int64_t dim = 2; dim < cache.dim(); ++dim) shape.push_back(cache.size(dim));
  if (!is_quantized(format)) {
    Tensor out = new_result(cache, shape);
    copy_rows(cache, ragged, out);
    return out;
  }
  KVBACKEND_CHECK(cache.dim() == 3 || cache.dim() == 4, "cache has ", cache.dim(),
                  " dims; one of codes has 3, or 4 with heads: reshape it");
  shape.back() *= format->per_byte();
  const KVFormat* wanted = format_pair(out_format).first;
  Tensor out = new_result(cache, shape, wanted ? wanted->storage : ScalarType::Float);
  const CodePages pages(*format, false, cache, "cache", scale, scale_cache);
  with_dtype(out, "out", [&](auto number) {
    with_codes(*format, [&](auto code) {
      decode_rows<decltype(code)>(pages, ragged, num_tokens, static_cast<decltype(number)*>(out.mutable_data_ptr()));
    });
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(gather_cache)
