// Attention over a paged cache, as a whole: the plan, its tasks on all threads, and what they leave to be merged.
#pragma once

#include <atomic>

#include "attention_worker.h"

namespace kvbackend::KVBACKEND_ISA {

// ------------------------------------------------------------------------------------------------------ the results

// Takes each row's attention: the greatest logit, the sum of e^(logit - peak), and the values weighed alike.
class Results {
 public:
  virtual ~Results() = default;
  virtual void write(int64_t token, int64_t head, float peak, float total, float* values) const = 0;
};

template <class T>
class Output final : public Results {
 public:
  Output(const Tensor& q, int64_t heads, int64_t value_dim, std::vector<float> sinks, bool return_lse)
      : out(new_result(q, {q.size(0), heads, value_dim})),
        lse(new_result(q, return_lse ? std::vector<int64_t>{q.size(0), heads} : std::vector<int64_t>{0},
                       ScalarType::Float)),
        heads_(heads),
        value_dim_(value_dim),
        sinks_(std::move(sinks)),
        out_(static_cast<T*>(out.mutable_data_ptr())),
        lse_(return_lse ? static_cast<float*>(lse.mutable_data_ptr()) : nullptr) {
    std::memset(static_cast<void*>(out_), 0, q.size(0) * heads * value_dim * sizeof(T));  // rows of no sequence
    if (lse_) std::fill_n(lse_, q.size(0) * heads, -kInfinity);
  }

  void write(int64_t token, int64_t head, float peak, float total, float* values) const override {
    const int64_t row = token * heads_ + head;
    if (peak == -kInfinity && total == 0) return;
    if (lse_) lse_[row] = peak + std::log(total);
    if (!sinks_.empty()) total += std::exp(sinks_[head] - peak);
    const float scale = 1.0f / total;
    for (int64_t d = 0; d < value_dim_; ++d) values[d] *= scale;
    store_row(values, value_dim_, out_ + row * value_dim_, 1);
  }

  Tensor out, lse;

 private:
  int64_t heads_, value_dim_;
  std::vector<float> sinks_;
  T* out_;
  float* lse_;
};

// ---------------------------------------------------------------------------------------------------------- the plan

struct Merge {  // a row that several tasks leave parts of
  int64_t sequence, token, head;
};

struct Sizes {
  int64_t heads, kv_heads, dim, value_dim;
  bool in_order;  // positions are indices
};

template <class Source>
Sizes sizes_of(const Source& source) {
  return {source.heads(), source.kv_heads(), source.dim(), source.value_dim(), source.in_order()};
}

class Plan {
 public:
  Plan(const Sizes& sizes, const LogitRule& rule, std::vector<Sequence> sequences)
      : batch(std::move(sequences)), sizes_(sizes), rule_(rule) {
    std::vector<Task> all;  // tasks of all kv heads
    for (int64_t i = 0; i < static_cast<int64_t>(batch.size()); ++i) {
      const std::vector<Task> found = ranges(i);
      if (!found.empty() && found.front().queries == batch[i].queries) plan_parts(found.front());
      for (const Task& task : found) cut(task, all);
    }
    share(all);
  }

  int64_t part_index(const Sequence& sequence, int64_t token, int64_t head, int64_t part) const {
    const int64_t row = (token - sequence.first_token) * sizes_.heads + head;
    return sequence.first_part + row * sequence.parts + part;
  }

  // What a sequence's queries and members are cut into, with all keys that each such range attends to, if any.
  std::vector<Task> ranges(int64_t sequence) const {
    const int64_t members = sizes_.heads / sizes_.kv_heads, queries = std::max<int64_t>(1, kRows / members);
    std::vector<Task> found;
    for (int64_t query = 0; query < batch[sequence].queries; query += queries) {
      Task task{sequence, query, std::min(queries, batch[sequence].queries - query)};
      reach(task);
      if (task.begin >= task.end) continue;
      for (int64_t member = 0; member < members; member += kRows) {
        task.first_member = member;
        task.members = std::min(kRows, members - member);
        found.push_back(task);
      }
    }
    return found;
  }

  std::vector<Sequence> batch;
  std::vector<Task> tasks;  // the costly first
  std::vector<Merge> merges;
  int64_t num_parts = 0;
  int64_t threads = 0;

 private:
  // The keys that any of a task's queries attends to.
  void reach(Task& task) const {
    const Sequence& sequence = batch[task.sequence];
    const int64_t first = std::max<int64_t>(0, sequence.start + task.first_query);
    const int64_t last = sequence.start + task.first_query + task.queries - 1;
    task.begin = 0;
    task.end = last < 0 ? 0 : sequence.length;
    if (!sizes_.in_order) return;
    if (rule_.window > 0) task.begin = std::max<int64_t>(0, first - rule_.window + 1);
    if (rule_.causal) task.end = std::min(task.end, last + 1);
  }

  // For the one range of queries of a sequence: where its keys are cut. A part is small beside the keys it stands for,
  // but two parts are made of what is long enough, for two threads.
  void plan_parts(const Task& task) {
    Sequence& sequence = batch[task.sequence];
    const int64_t part = sequence.queries * sizes_.heads * (sizes_.value_dim + 2);
    const int64_t key = sizes_.kv_heads * (sizes_.dim + sizes_.value_dim);
    const int64_t least = 16 * part / std::max<int64_t>(1, key);  // keys
    sequence.split = round_up(std::max(sequence.length / kMostParts, least) + 1, kSplit);
    if (sequence.length >= 2 * kSplit) sequence.split = std::min(sequence.split, round_up(sequence.length / 2, kSplit));
    sequence.parts = (task.end - 1) / sequence.split - task.begin / sequence.split + 1;
    if (sequence.parts == 1) return;
    sequence.first_part = num_parts;
    num_parts += sequence.parts * sequence.queries * sizes_.heads;
    for (int64_t query = 0; query < sequence.queries; ++query) {
      for (int64_t head = 0; head < sizes_.heads; ++head)
        merges.push_back({task.sequence, sequence.first_token + query, head});
    }
  }

  void cut(Task task, std::vector<Task>& out) const {
    const Sequence& sequence = batch[task.sequence];
    task.part = -1;
    if (sequence.parts == 1) return out.push_back(task);
    const int64_t begin = task.begin, end = task.end, first = begin / sequence.split;
    for (task.part = 0; task.part < sequence.parts; ++task.part) {
      task.begin = std::max(begin, (first + task.part) * sequence.split);
      task.end = std::min(end, (first + task.part + 1) * sequence.split);
      out.push_back(task);
    }
  }

  // Each range becomes tasks of some kv heads: as many as fit in kRows, fewer where threads would have nothing to do.
  void share(const std::vector<Task>& ranges) {
    const int64_t available = torch::stable::get_num_threads(), kv_heads = sizes_.kv_heads;
    const int64_t fair = static_cast<int64_t>(ranges.size()) * kv_heads / (2 * available);
    int64_t work = 0;
    for (Task task : ranges) {
      const int64_t heads = std::clamp<int64_t>(std::min(kRows / width_of(task.rows()), fair), 1, kv_heads);
      for (task.first_head = 0; task.first_head < kv_heads; task.first_head += heads) {
        task.heads = std::min(heads, kv_heads - task.first_head);
        tasks.push_back(task);
        work += cost(task);
      }
    }
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    threads = std::min<int64_t>({available, static_cast<int64_t>(tasks.size()), work / kThreadWork + 1});
  }

  int64_t cost(const Task& task) const {  // few rows cost as much as eight: reading the keys
    return task.heads * (task.end - task.begin) * (sizes_.dim + sizes_.value_dim) * std::max<int64_t>(8, task.rows());
  }

  const Sizes sizes_;
  const LogitRule rule_;
};

// What one of several threads does of items [0, count): when it has done one, it takes the next.
class Turns {
 public:
  Turns(std::atomic<size_t>& taken, size_t count, size_t threads) : taken_(taken), count_(count), threads_(threads) {}

  // The next item, which is this thread's from now on, or count: nobody keeps one of the last, for which a thread that
  // has nothing to do may be waiting.
  size_t upcoming() {
    if (next_ == kNone && taken_ + threads_ < count_) next_ = taken_++;
    return std::min(next_, count_);
  }
  bool take(size_t& item) {
    item = next_ == kNone ? taken_++ : next_;
    next_ = kNone;
    return item < count_;
  }

 private:
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();
  std::atomic<size_t>& taken_;
  const size_t count_, threads_;
  size_t next_ = kNone;
};

// function(worker, item, turns) for items [0, count): each thread has a worker.
template <class T, class Source, class KeyPages, class F>
void share_out(const Source& source, const KeyPages& pages, const LogitRule& rule, int64_t threads, size_t count,
               F&& function) {
  std::atomic<size_t> taken{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    Worker<T, Source, KeyPages> worker(source, pages, rule);
    Turns turns(taken, count, threads);
    for (size_t item; turns.take(item);) function(worker, item, turns);
  });
}

// Each row of a task goes to `results`, or to `parts`, to be merged.
template <class T, class Source, class KeyPages>
void run_tasks(const Source& source, const KeyPages& pages, const LogitRule& rule, const Plan& plan, float* parts,
               const Results& results) {
  const int64_t value_dim = source.value_dim();
  share_out<T>(source, pages, rule, plan.threads, plan.tasks.size(), [&](auto& worker, size_t i, Turns& turns) {
    const Task& task = plan.tasks[i];
    const Sequence& sequence = plan.batch[task.sequence];
    const auto upcoming = [&]() -> Upcoming {
      const size_t next = turns.upcoming();
      if (next == plan.tasks.size()) return {};
      return {plan.tasks[next], &plan.batch[plan.tasks[next].sequence]};
    };
    worker.run(task, sequence, upcoming, [&](int64_t token, int64_t head, float peak, float total, float* values) {
      if (task.part < 0) return results.write(token, head, peak, total, values);
      float* part = parts + plan.part_index(sequence, token, head, task.part) * (value_dim + 2);
      part[0] = peak;
      part[1] = total;
      std::copy_n(values, value_dim, part + 2);
    });
  });
}

// Parallel over rows: the parts of each, in the order of their keys.
inline void merge_parts(const Plan& plan, int64_t value_dim, const float* parts, const Results& results) {
  const int64_t size = value_dim + 2;
  torch::stable::parallel_for(0, plan.merges.size(), grain(size * 64), [&](int64_t begin, int64_t end) {
    std::vector<float> values(value_dim);
    for (int64_t i = begin; i < end; ++i) {
      const Merge& row = plan.merges[i];
      const Sequence& sequence = plan.batch[row.sequence];
      const float* first = parts + plan.part_index(sequence, row.token, row.head, 0) * size;
      float peak = -kInfinity, total = 0;
      for (int64_t n = 0; n < sequence.parts; ++n) peak = std::max(peak, first[n * size]);
      std::fill(values.begin(), values.end(), 0.0f);
      for (int64_t n = 0; n < sequence.parts; ++n) {
        const float* part = first + n * size;
        const float difference = part[0] == peak ? 0.0f : part[0] - peak;  // also where both are +inf
        const float worth = part[0] == -kInfinity ? 0.0f : std::exp(difference);
        total += worth * part[1];
        for (int64_t d = 0; d < value_dim; ++d) values[d] += worth * part[2 + d];
      }
      results.write(row.token, row.head, peak, total, values.data());
    }
  });
}

// All rows of a plan.
template <class T, class Source, class KeyPages>
void attend_to(const Source& source, const KeyPages& pages, const LogitRule& rule, const Plan& plan,
               const Results& results) {
  const std::unique_ptr<float[]> parts(new float[plan.num_parts * (source.value_dim() + 2)]);
  run_tasks<T>(source, pages, rule, plan, parts.get(), results);
  merge_parts(plan, source.value_dim(), parts.get(), results);
}

// The whole of an op, once its source is made: out [T, H, value_dim] and lse [T, H], or empty.
template <class T, class Source, class KeyPages>
std::tuple<Tensor, Tensor> attend(const Source& source, const KeyPages& pages, const LogitRule& rule,
                                  std::vector<Sequence> batch, const Tensor& q, std::vector<float> sinks,
                                  bool return_lse) {
  const Output<T> output(q, source.heads(), source.value_dim(), std::move(sinks), return_lse);
  if (source.heads() > 0 && !batch.empty()) {
    attend_to<T>(source, pages, rule, Plan(sizes_of(source), rule, std::move(batch)), output);
  }
  return {output.out, output.lse};
}

}  // namespace kvbackend::KVBACKEND_ISA
