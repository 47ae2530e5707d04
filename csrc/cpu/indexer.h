// The lightning indexer's scores, tile by tile: what indexer_logits, lightning_indexer and candidate_blocks share.
//
// A task is a few queries of one sequence x a range of its keys. An op names the tasks, the tiles of each, and brings a
// Collector for each thread; score_keys.cpp does the rest.
#pragma once

#include <functional>
#include <memory>

#include "attention.h"
#include "record_rows.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t kQueries = 4;  // of a task: they share the loading of a tile

// -------------------------------------------------------------------------------------------------------- the batch

struct IndexTask {
  int64_t sequence;              // row of block_table
  int64_t first_token, queries;  // rows of q
  int64_t begin, end;            // keys
  int64_t part = 0, parts = 1;   // which of the ranges that the keys were cut into

  int64_t cost() const { return queries * (end - begin); }
};

struct IndexerCall {
  const Tensor &q, &weights, &key_cache, &block_table, &seq_lens, &cu_seqlens_q;
  int64_t max_seqlen_q, compress_ratio;
  const std::string& kv_format;
  int64_t block_size;
};

// How many keys each row of q sees, and whose.
struct IndexRows {
  IndexRows(const IndexerCall& call, const Pages& pages)
      : batch(read_batch(pages, call.seq_lens, call.cu_seqlens_q, call.max_seqlen_q, call.q.size(0),
                         call.compress_ratio)),
        visible(call.q.size(0), 0) {
    for (const Sequence& sequence : batch) {
      for (int64_t i = 0; i < sequence.queries; ++i)
        visible[sequence.first_token + i] = std::max<int64_t>(0, sequence.start + i + 1) / call.compress_ratio;
    }
  }

  // Tasks of at most `queries` rows. Where they are fewer than threads, their keys are cut, at multiples of `align`.
  std::vector<IndexTask> tasks(int64_t queries, int64_t align) const {
    std::vector<IndexTask> whole, found;
    for (const Sequence& sequence : batch) {
      for (int64_t i = 0; i < sequence.queries; i += queries) {
        const int64_t count = std::min(queries, sequence.queries - i), token = sequence.first_token + i;
        whole.push_back({sequence.index, token, count, 0, visible[token + count - 1]});
      }
    }
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t wanted = static_cast<int64_t>(whole.size()) < 2 * threads ? threads : 1;
    for (IndexTask task : whole) {
      const int64_t keys = task.end, step = round_up(std::max(keys / wanted, kSplit) + 1, align);
      task.parts = std::max<int64_t>(1, (keys + step - 1) / step);
      for (task.part = 0; task.part < task.parts; ++task.part) {
        task.begin = task.part * step;
        task.end = std::min(keys, task.begin + step);
        found.push_back(task);
      }
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const IndexTask& a, const IndexTask& b) { return a.cost() > b.cost(); });
    return found;
  }

  std::vector<Sequence> batch;
  std::vector<int64_t> visible;  // of each row of q
};

// --------------------------------------------------------------------------------------------------------- the tiles

// Neighbouring keys of a tile.
struct Segment {
  int64_t at, count, first;  // within the tile; how many; index of the first
};

// Keys of a tile that lie one after the other in a block.
struct Run {
  int64_t at, count, block, slot;

  int64_t end() const { return at + count; }
};

struct KeyTile {
  int64_t count = 0, segments = 0, runs = 0;
  Segment segment[kTile];
  Run run[kTile];

  void clear() { count = segments = runs = 0; }

  // Appends keys from `first` on, as many as there is room for, at most `wanted`; returns how many.
  int64_t append(const Pages& pages, int64_t sequence, int64_t first, int64_t wanted) {
    const int64_t some = std::min(wanted, kTile - count), at = count;
    pages.visit_runs(sequence, first, first + some, [&](int64_t index, int64_t size, int64_t block, int64_t slot) {
      const int64_t n = at + index - first;
      Run* last = runs > 0 ? &run[runs - 1] : nullptr;
      if (last && last->end() == n && last->block == block && last->slot + last->count == slot) {
        last->count += size;
      } else {
        run[runs++] = {n, size, block, slot};
      }
    });
    segment[segments++] = {at, some, first};
    count += some;
    return some;
  }
};

// Yields tiles of keys; when there are no more, an empty one.
class Tiles {
 public:
  virtual ~Tiles() = default;
  virtual void next(KeyTile& tile) = 0;
};

// Those of a range of keys.
class RangeTiles final : public Tiles {
 public:
  RangeTiles(const Pages& pages, const IndexTask& task) : pages_(pages), task_(task), next_(task.begin) {}

  void next(KeyTile& tile) override {
    tile.clear();
    if (next_ < task_.end) next_ += tile.append(pages_, task_.sequence, next_, task_.end - next_);
  }

 private:
  const Pages& pages_;
  const IndexTask& task_;
  int64_t next_;
};

// Those of the candidate blocks of one query, in ascending order, each block once.
class CandidateTiles final : public Tiles {
 public:
  CandidateTiles(const Pages& pages, const IndexTask& task, std::vector<int64_t> blocks, int64_t size)
      : pages_(pages), task_(task), blocks_(std::move(blocks)), size_(size) {
    std::sort(blocks_.begin(), blocks_.end());
    blocks_.erase(std::unique(blocks_.begin(), blocks_.end()), blocks_.end());
  }

  void next(KeyTile& tile) override {
    tile.clear();
    while (turn_ < blocks_.size() && tile.count < kTile) {
      const int64_t start = blocks_[turn_] * size_, first = start + done_;
      const int64_t end = start < 0 ? start : std::min(task_.end, start + size_);
      if (first < end) done_ += tile.append(pages_, task_.sequence, first, end - first);
      if (start + done_ < end) continue;
      ++turn_;
      done_ = 0;
    }
  }

 private:
  const Pages& pages_;
  const IndexTask& task_;
  std::vector<int64_t> blocks_;
  int64_t size_, done_ = 0;
  size_t turn_ = 0;
};

// -------------------------------------------------------------------------------------------------------- the whole

inline void expect_indexer(const IndexerCall& call) {
  expect_rank(call.q, "q", 3);
  expect_shape(call.weights, "weights", {call.q.size(0), call.q.size(1)});
  expect_rank(call.block_table, "block_table", 2);
  KVBACKEND_CHECK(call.compress_ratio >= 1, "compress_ratio is ", call.compress_ratio,
                  "; it must be at least 1: pass how many tokens share a key");
}

// Where the keys lie: rows of a page, and pages.
inline Pages index_pages(const IndexerCall& call) {
  if (call.kv_format == "auto") {
    expect_rank(call.key_cache, "key_cache", 3);
    return Pages(call.block_table, call.key_cache.size(0), call.key_cache.size(1));
  }
  const RecordPages pages(call.key_cache, "key_cache", record_named(call.kv_format, "kv_format"), call.block_size);
  return Pages(call.block_table, pages.num_blocks(), pages.block_size());
}

// Takes the scores of a thread's tasks.
class Collector {
 public:
  virtual ~Collector() = default;
  virtual void begin(const IndexTask& task) = 0;
  // Of the task's query, by the keys first, first + 1, ...
  virtual void take(int64_t query, const float* scores, int64_t count, int64_t first) = 0;
  virtual void end(const IndexTask& task) = 0;
};

using TilesOf = std::function<std::unique_ptr<Tiles>(const IndexTask&)>;
using MakeCollector = std::function<std::unique_ptr<Collector>()>;

// Parallel over tasks: a thread that has done one takes the next. score_keys.cpp.
extern void score_keys(const IndexerCall& call, const IndexRows& rows, const std::vector<IndexTask>& tasks,
                       const TilesOf& tiles_of, const MakeCollector& make_collector);

}  // namespace kvbackend::KVBACKEND_ISA
