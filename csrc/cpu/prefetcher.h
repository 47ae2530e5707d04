// What is fetched from memory while other rows are worked on.
#pragma once

#include "attention_batch.h"

namespace kvbackend::KVBACKEND_ISA {

inline constexpr int64_t kHere = 0;  // the offset of a row that is named by itself

// Rows wanted next, a few cache lines at a time, as evenly as the work on others goes: a core drops requests while too
// many wait.
#if defined(__AVX512F__)
// Loops that are faster than memory ask for each line several times; where it is there already that costs an
// instruction.
class Prefetcher {
 public:
  // Rows of another list follow. What is left of the last one is given up.
  void clear() {
    std::copy_n(pieces_ + count_ - kBefore, kBefore, pieces_);
    count_ = at_ = kBefore;
    due_ = at_ << kShift;
    pace_ = 1 << kShift;
  }

  // `count` rows at these offsets. Beyond what the list holds rows are so long that a core follows them by itself.
  void add(const void* rows, int64_t bytes, const int64_t* offsets = &kHere, int64_t count = 1) {
    const char* first = static_cast<const char*>(rows);
    if (bytes <= kPiece) {
      count = std::min(count, kMost - count_);
      for (int64_t n = 0; n < count; ++n) pieces_[count_ + n] = first + offsets[n];
      count_ += count;
      return;
    }
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t at = 0; at < bytes && count_ < kMost; at += kPiece) pieces_[count_++] = first + offsets[n] + at;
    }
  }

  // All of the list in that many steps, to L2 perhaps in parts side by side: a core reads four streams faster than one.
  void finish_within(int64_t steps, int64_t streams = 1) {
    while (count_ % streams && count_ < kMost) pieces_[count_] = pieces_[count_ - 1], ++count_;
    streams_ = streams;
    each_ = (count_ - kBefore) / streams;
    pace_ = ((each_ << kShift) + steps - 1) / steps;
  }

  // For loops in tiles, which leave L1 to what they multiply: lines go to L2.
  void step_to_l2() {
    due_ += pace_;
    int64_t at = at_;
    const int64_t end = std::min(due_ >> kShift, kBefore + each_);
    for (; at < end; ++at) {
      for (int line = 0; line < kPiece; line += kLine) {
        for (int64_t stream = 0; stream < streams_; ++stream)
          __builtin_prefetch(pieces_[at + stream * each_] + line, 0, 2);
      }
    }
    at_ = at;
  }

  // Asks for a line kAsk times.
  template <int kAsk = 4>
  void step() {
    due_ += pace_;
    int64_t at = at_;
    const int64_t end = std::min(due_ >> kShift, count_);
    for (; at < end; ++at) {
#pragma GCC unroll 4
      for (int ask = 0; ask < kAsk; ++ask) {
        const char* lines = pieces_[at - ask * kLag];
#pragma GCC unroll 4
        for (int line = 0; line < kPiece; line += kLine) __builtin_prefetch(lines + line, 0, 3);
      }
    }
    at_ = at;
  }

 private:
  static constexpr int64_t kPiece = 4 * kLine, kLag = 32, kBefore = 3 * kLag;
  static constexpr int64_t kMost = kBefore + 8 * kMostKeys;
  static constexpr int kShift = 16;  // of the pieces that are due at each step
  const char* pieces_[kMost] = {};   // the last ones of the list before this one come first
  int64_t count_ = kBefore, at_ = kBefore, due_ = kBefore << kShift, pace_ = 1 << kShift;
  int64_t streams_ = 1, each_ = 0;  // pieces of each
};
#else
// Bytes that follow each other are one run, along which the steps go: a step takes as few instructions as it can.
class Prefetcher {
 public:
  void clear() {
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

  void step_to_l2() { step(); }

  template <int = 1>
  void step() {
    for (int64_t line = each_; line > 0; --line) {
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

// For loops that are a step by themselves.
struct FetchNothing {
  void step() {}
};

// For loops that multiply more than they read.
struct FetchOnce {
  Prefetcher& rows;
  bool to_l2 = false;
  void step() { to_l2 ? rows.step_to_l2() : rows.step<1>(); }
};

}  // namespace kvbackend::KVBACKEND_ISA
