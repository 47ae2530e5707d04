// The batch that attention works on: sequences, the keys of a tile, which positions a query attends to, and tasks.
#pragma once

#include "kernel.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t kTile = 64;             // keys attended to at once
#if defined(__AVX512BF16__)               // what is read and packed for a tile of keys shall serve many rows
constexpr int64_t kRows = 128;            // rows of a task
constexpr int64_t kMostKeys = 4 * kTile;  // attended to at once by whole strips of rows
#else
constexpr int64_t kRows = 64;
constexpr int64_t kMostKeys = kTile;
#endif
constexpr int64_t kNarrow = 2;            // rows at least of which products in tiles are worth it
constexpr int64_t kPanel = 128;           // dims of keys and queries that are kept in L1
constexpr int64_t kSplit = 512;           // where a sequence's keys may be cut: multiples of it
constexpr int64_t kMostParts = 32;        // of one sequence
constexpr int64_t kThreadWork = 1 << 20;  // multiplications that are worth another thread
constexpr int64_t kLine = 64;             // bytes of a cache line
constexpr float kSlack = 4.0f;            // by which logits may exceed the peak that they are compared with
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ------------------------------------------------------------------------------------------------------- the batch

// Which blocks hold a sequence. A block that the pool lacks, -1 among them, holds nothing.
class Pages {
 public:
  Pages(const Tensor& block_table, int64_t num_blocks, int64_t block_size)
      : table_(block_table, "block_table"),
        sequences_(block_table.size(0)),
        columns_(block_table.size(1)),
        num_blocks_(num_blocks),
        block_size_(block_size) {}

  int64_t sequences() const { return sequences_; }
  int64_t capacity() const { return columns_ * block_size_; }

  // function(index, block, slot) for each key that exists among those of index [begin, end).
  template <class F>
  void visit(int64_t sequence, int64_t begin, int64_t end, F&& function) const {
    visit_runs(sequence, begin, end, [&](int64_t index, int64_t count, int64_t block, int64_t slot) {
      for (int64_t n = 0; n < count; ++n) function(index + n, block, slot + n);
    });
  }

  // function(index, count, block, slot) for those of each block.
  template <class F>
  void visit_runs(int64_t sequence, int64_t begin, int64_t end, F&& function) const {
    while (begin < end) {
      const int64_t column = begin / block_size_;
      const int64_t stop = std::min(end, (column + 1) * block_size_);
      const int64_t block = table_(sequence, column);
      if (block >= 0 && block < num_blocks_) function(begin, stop - begin, block, begin - column * block_size_);
      begin = stop;
    }
  }

 private:
  Ids table_;
  int64_t sequences_, columns_, num_blocks_, block_size_;
};

struct Sequence {
  int64_t index;        // row of block_table
  int64_t first_token;  // row of q
  int64_t queries;
  int64_t length;  // keys
  int64_t start;   // index of its first query; negative where it has more queries than tokens
  int64_t split = 0, first_part = 0, parts = 1;  // where its keys are cut, and what is left to be merged
};

// The sequences that have queries and keys, whatever the numbers say: nothing outside the table nor q is named. A key
// stands for `ratio` tokens, of which the newest may lack their key yet.
inline std::vector<Sequence> read_batch(const Pages& pages, const Tensor& seq_lens, const Tensor& cu_seqlens_q,
                                        int64_t max_seqlen_q, int64_t num_tokens, int64_t ratio = 1) {
  expect_shape(seq_lens, "seq_lens", {pages.sequences()});
  expect_shape(cu_seqlens_q, "cu_seqlens_q", {pages.sequences() + 1});
  const Ids lengths(seq_lens, "seq_lens"), offsets(cu_seqlens_q, "cu_seqlens_q");
  KVBACKEND_CHECK(offsets[0] == 0, "cu_seqlens_q starts with ", offsets[0],
                  "; it is the running sum of lengths and must start with 0: prepend a 0");
  std::vector<Sequence> batch;
  for (int64_t i = 0; i < pages.sequences(); ++i) {
    const int64_t first = std::clamp<int64_t>(offsets[i], 0, num_tokens);
    const int64_t queries = std::max(offsets[i + 1], first) - first;  // more than q has, where it lacks some
    const int64_t length = std::clamp<int64_t>(lengths[i], 0, (pages.capacity() + 1) * ratio - 1);
    const int64_t wanted = std::min({queries, num_tokens - first, std::max<int64_t>(max_seqlen_q, 0)});
    if (wanted > 0 && length > 0) batch.push_back({i, first, wanted, length, length - queries});
  }
  return batch;
}

// ------------------------------------------------------------------------------------------------------- the pieces

// Where the rows of a tile's keys are in one cache, and the scales of each (cached_rows.h): those of kv head 0.
struct Places {
  int64_t row[kMostKeys], scale[kMostKeys];
};

// The keys of a tile: those that exist, so fewer than were asked for where blocks are missing.
struct Keys {
  static constexpr int64_t kRun = 16;

  int64_t count = 0;
  int64_t lowest, highest;                                                           // position
  int64_t index[kMostKeys], block[kMostKeys], slot[kMostKeys], position[kMostKeys];  // index within the sequence
  Places key, value;                                                                 // the source's own

  bool runs[kMostKeys / kRun];  // which keys, kRun at a time, lie side by side in a block

  void look_for_runs() {
    for (int64_t n = 0; n < count; n += kRun) {
      int64_t apart = 0;  // not as soon as it is known: so they are compared some at a time
      for (int64_t k = 0; k < std::min(kRun, count - n); ++k)
        apart |= (block[n + k] - block[n]) | (slot[n + k] - slot[n] - k);
      runs[n / kRun] = n + kRun <= count && !apart;
    }
  }
};

// Rows of a tile: of its keys [first, last), and of `heads` kv heads from `head` on.
struct Wanted {
  int64_t first, last, head, heads;
};

// A query attends to positions in (after, last].
struct Bound {
  int64_t after, last;
};

struct LogitRule {
  float scale;
  bool causal;
  int64_t window;  // -1: none
  float softcap;   // 0: none

  Bound bound(int64_t position) const {
    constexpr int64_t kFirst = std::numeric_limits<int64_t>::min(), kLast = std::numeric_limits<int64_t>::max();
    if (position < 0) return {kLast, kFirst};
    return {window > 0 ? position - window : kFirst, causal ? position : kLast};
  }
};

struct Task {
  int64_t sequence;  // index into the batch
  int64_t first_query, queries;
  int64_t first_head, heads;      // kv heads
  int64_t first_member, members;  // which query heads of each kv head
  int64_t begin, end;             // keys
  int64_t part;                   // -1: the result is final

  int64_t rows() const { return queries * members; }
};

}  // namespace kvbackend::KVBACKEND_ISA
