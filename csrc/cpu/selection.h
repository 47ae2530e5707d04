// The best keys of each query, or the best blocks of keys, while the scores go by.
#pragma once

#include <map>

#include "indexer.h"
#include "topk.h"

namespace kvbackend::KVBACKEND_ISA {

// What is selected for all queries of a call: out [T, k], and the parts of rows whose keys were cut.
class Selection {
 public:
  // block: 0 to select keys, else how many keys form a block.
  Selection(const IndexRows& rows, const std::vector<IndexTask>& tasks, int64_t k, bool by_score, int64_t block,
            int32_t* out)
      : rows_(rows), k_(k), by_score_(by_score), block_(block), out_(out) {
    std::fill_n(out, static_cast<int64_t>(rows.visible.size()) * k, -1);
    for (const IndexTask& task : tasks) {
      if (task.parts > 1 && task.part == 0) first_part_[task.first_token] = reserve(task.queries * task.parts);
    }
  }

  class Bests final : public Collector {
   public:
    explicit Bests(Selection& all) : all_(all) { bests_.assign(kQueries, Best(all.k_)); }

    void begin(const IndexTask& task) override {
      for (int64_t i = 0; i < task.queries; ++i) {
        bests_[i].start();
        const int64_t visible = all_.rows_.visible[task.first_token + i];
        open_[i] = -kInfinity;
        newest_[i] = all_.block_ && visible ? (visible - 1) / all_.block_ : -1;
        last_[i] = std::min(visible, task.end);
      }
    }

    void take(int64_t query, const float* scores, int64_t count, int64_t first) override {
      all_.block_ ? take_blocks(query, scores, count, first) : bests_[query].add(scores, count, first);
    }

    void end(const IndexTask& task) override {
      for (int64_t i = 0; i < task.queries; ++i) {
        bests_[i].finish();
        if (task.parts == 1) {
          all_.write(bests_[i], task.first_token + i);
        } else {
          all_.parts_[all_.first_part_.at(task.first_token) + i * task.parts + task.part] = bests_[i];
        }
      }
    }

   private:
    // The highest score of each block; one that the keys seen so far leave open waits for the next.
    void take_blocks(int64_t query, const float* scores, int64_t count, int64_t first) {
      float highest[kTile];
      int64_t n = 0;
      const int64_t block = all_.block_, end = first + count, first_block = first / block;
      for (int64_t index = first; index < end;) {
        const int64_t stop = (index / block + 1) * block;
        float& open = open_[query];
        for (; index < std::min(stop, end); ++index) open = scores[index - first] > open ? scores[index - first] : open;
        if (index < stop && index < last_[query]) break;
        highest[n] = first_block + n == newest_[query] ? kInfinity : open;
        ++n;
        open = -kInfinity;
      }
      bests_[query].add(highest, n, first_block);
    }

    Selection& all_;
    std::vector<Best> bests_;
    float open_[kQueries];  // the highest score of a block that is not yet whole
    int64_t newest_[kQueries], last_[kQueries];
  };

  // Puts together what the parts of a row found, in the order of its keys.
  void merge(const std::vector<IndexTask>& tasks) {
    for (const IndexTask& task : tasks) {
      if (task.parts == 1 || task.part > 0) continue;
      for (int64_t i = 0; i < task.queries; ++i) {
        Best* parts = &parts_[first_part_.at(task.first_token) + i * task.parts];
        for (int64_t part = 1; part < task.parts; ++part) parts[0].add(parts[part]);
        parts[0].finish();
        write(parts[0], task.first_token + i);
      }
    }
  }

 private:
  int64_t reserve(int64_t count) {
    const int64_t first = static_cast<int64_t>(parts_.size());
    parts_.resize(first + count, Best(k_));
    return first;
  }

  void write(Best& best, int64_t token) const { best.write(by_score_, out_ + token * k_); }

  const IndexRows& rows_;
  const int64_t k_;
  const bool by_score_;
  const int64_t block_;
  int32_t* out_;
  std::vector<Best> parts_;
  std::map<int64_t, int64_t> first_part_;  // by first token of a task
};

// Scores the keys and selects the k best, or the best blocks.
inline void select_keys(const IndexerCall& call, const IndexRows& rows, const std::vector<IndexTask>& tasks,
                        const TilesOf& tiles_of, int64_t k, bool by_score, int64_t block, int32_t* out) {
  Selection selection(rows, tasks, k, by_score, block, out);
  score_keys(call, rows, tasks, tiles_of, [&] { return std::make_unique<Selection::Bests>(selection); });
  selection.merge(tasks);
}

}  // namespace kvbackend::KVBACKEND_ISA
