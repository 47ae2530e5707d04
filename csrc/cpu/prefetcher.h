// What is fetched from memory while other rows are worked on.
#pragma once

#include "attention_batch.h"

namespace kvbackend::KVBACKEND_ISA {

inline constexpr int64_t kHere = 0;  // the offset of a row that is named by itself

// Rows wanted next, a few cache lines at a time, as evenly as the work on others goes: a core drops requests while too
// many wait.
#if defined(__AVX512F__)
// Lines go to L2: L1 is left to what is worked on.
class Prefetcher {
 public:
  // Rows of another list follow. What is left of the last one is given up. Those that lie apart may be `touched` at
  // once: their first and last lines asked for. A request for a page that no TLB knows holds up all that follows until
  // its address is found, unless others that wait for theirs come with it.
  void clear(bool touched = false) {
    count_ = at_ = due_ = each_ = 0;
    streams_ = 1;
    pace_ = 1 << kShift;
    touched_ = touched;
    end_ = nullptr;
  }

  // `count` rows at these offsets. Beyond what the list holds rows are so long that a core follows them by itself.
  void add(const void* rows, int64_t bytes, const int64_t* offsets = &kHere, int64_t count = 1) {
    const char* first = static_cast<const char*>(rows);
    for (int64_t n = 0; touched_ && n < count; ++n) touch(first + offsets[n], bytes);
    for (int64_t n = 0; n < count; ++n) {  // a row's last piece ends with it: what follows may never be wanted
      for (int64_t at = 0; at < bytes && count_ < kMost; at += kPiece)
        pieces_[count_++] = first + offsets[n] + std::min(at, bytes - kPiece);
    }
    each_ = count_;
  }

  // All of the list in that many steps, perhaps in parts side by side: a core reads four streams faster than one.
  void finish_within(int64_t steps, int64_t streams = 1) {
    while (count_ % streams && count_ < kMost) pieces_[count_] = pieces_[count_ - 1], ++count_;
    streams_ = streams;
    each_ = count_ / streams;
    pace_ = ((each_ << kShift) + steps - 1) / steps;
  }

  void step(int64_t steps = 1) {
    due_ += steps * pace_;
    int64_t at = at_;
    for (const int64_t end = std::min(due_ >> kShift, each_); at < end; ++at) {
      for (int line = 0; line < kPiece; line += kLine) {
        for (int64_t stream = 0; stream < streams_; ++stream)
          __builtin_prefetch(pieces_[at + stream * each_] + line, 0, 2);
      }
    }
    at_ = at;
  }

 private:
  void touch(const char* row, int64_t bytes) {
    if (row != end_) {
      __builtin_prefetch(row, 0, 2);
      __builtin_prefetch(row + bytes - 1, 0, 2);
    }
    end_ = row + bytes;
  }

  static constexpr int64_t kPiece = 4 * kLine, kMost = 8 * kMostKeys;
  static constexpr int kShift = 16;  // of the pieces that are due at each step
  const char* pieces_[kMost];
  int64_t count_ = 0, at_ = 0, due_ = 0, pace_ = 1 << kShift;
  int64_t streams_ = 1, each_ = 0;  // pieces of each
  bool touched_ = false;
  const char* end_ = nullptr;  // of the row before
};
#else
// Bytes that follow each other are one run, along which the steps go: a step takes as few instructions as it can.
class Prefetcher {
 public:
  void clear(bool /*touched*/ = false) {
    count_ = next_ = bytes_ = 0;
    pace_ = kLine;
    each_ = 4;
    at_ = end_ = reinterpret_cast<const char*>(this);  // is there anyway
  }

  void add(const void* rows, int64_t bytes, const int64_t* offsets = &kHere, int64_t count = 1) {
    const char* first = static_cast<const char*>(rows);
    for (int64_t n = 0; n < count; ++n) {
      const char* row = first + offsets[n];
      if (count_ > 0 && runs_[count_ - 1].end == row) {
        runs_[count_ - 1].end += bytes;
      } else if (count_ < kMost) {
        runs_[count_++] = {row, row + bytes};
      } else {
        break;
      }
      bytes_ += bytes;
    }
  }

  // Less than a line at a step where there are more steps than lines.
  void finish_within(int64_t steps, int64_t /*streams*/ = 1) {
    const int64_t parts = 2 * count_, lines = bytes_ / kLine + parts;  // runs may begin and end within a line
    each_ = std::max<int64_t>(1, (lines + steps - 1) / steps);
    pace_ = std::min(kLine, bytes_ / std::max<int64_t>(1, each_ * steps - parts) + 1);
  }

  void step(int64_t steps = 1) {
    for (int64_t line = steps * each_; line > 0; --line) {
      __builtin_prefetch(at_, 0, 3);
      at_ += pace_;
      if (at_ >= end_) next_run();
    }
  }

 private:
  struct Run {
    const char *at, *end;
  };

  void next_run() {
    if (next_ < count_) {
      const Run& run = runs_[next_++];
      at_ = run.at - reinterpret_cast<uintptr_t>(run.at) % kLine;
      end_ = run.end;
    } else {  // no end to it
      at_ = reinterpret_cast<const char*>(this);
      end_ = reinterpret_cast<const char*>(std::numeric_limits<uintptr_t>::max());
      pace_ = 0;
    }
  }

  static constexpr int64_t kMost = 8 * kMostKeys;
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t pace_ = kLine, each_ = 4;
  int64_t count_ = 0, next_ = 0, bytes_ = 0;
  Run runs_[kMost];
};
#endif

// Rows that are attended to in the order of memory (Heads in attention_loops.h). Lines go to L2, from which a core
// takes such rows by itself; asked for into L1, they would be twice as slow.
class RowsAhead {
 public:
  void clear() { count_ = next_ = lines_ = due_ = 0, row_ = end_ = nullptr, rows_ = 0; }

  // `count` rows at these offsets, which stay there, in units of `unit` bytes.
  void add(const char* first, int64_t bytes, const int64_t* offsets, int64_t count, int64_t unit = 1) {
    if (count == 0 || count_ == kMost) return;
    lists_[count_++] = {first, offsets, unit, count, bytes};
    lines_ += count * ((bytes + kLine - 1) / kLine);
  }

  void finish_within(int64_t steps) { pace_ = (lines_ << kShift) / std::max<int64_t>(1, steps) + 1; }

  void step(int64_t steps = 1) {
    due_ += steps * pace_;
    int64_t lines = due_ >> kShift;
    due_ -= lines << kShift;
    while (lines > 0 && (row_ < end_ || next_row())) {
      const int64_t some = std::min(lines, (end_ - row_ + kLine - 1) / kLine);
      for (int64_t line = 0; line < some; ++line) __builtin_prefetch(row_ + line * kLine, 0, 2);
      row_ += some * kLine;
      lines -= some;
    }
  }

 private:
  struct List {
    const char* first;
    const int64_t* offsets;
    int64_t unit, count, bytes;
  };

  bool next_row() {
    if (rows_ == 0) {
      if (next_ == count_) return false;
      rows_ = lists_[next_++].count;
    }
    const List& list = lists_[next_ - 1];
    row_ = list.first + list.offsets[list.count - rows_--] * list.unit;
    end_ = row_ + list.bytes;
    row_ -= reinterpret_cast<uintptr_t>(row_) % kLine;
    return true;
  }

  static constexpr int64_t kMost = 8 * kRows;  // rows and scales of two tiles' keys and values, each head apart
  static constexpr int kShift = 16;            // of the lines that are due at each step
  List lists_[kMost];
  int64_t count_ = 0, next_ = 0, rows_ = 0;  // lists; of the list at hand those to come
  const char *row_ = nullptr, *end_ = nullptr;
  int64_t lines_ = 0, pace_ = 0, due_ = 0;
};

// For loops that are a step by themselves.
struct FetchNothing {
  void step(int64_t = 1) {}
};

}  // namespace kvbackend::KVBACKEND_ISA
