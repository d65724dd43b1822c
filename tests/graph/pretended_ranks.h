// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "lamina/graph/border.h"
#include "lamina/graph/segments.h"
#include "lamina/graph/step.h"

// Ranks that run a graph of numbers together, in one process.
namespace lamina::graph::testing {

// Each operation has one output, the sum of what it reads, each times a weight, and of a number of its own that goes
// with the microbatch. So has each gradient one right value.
struct NumberGraph {
  std::vector<Placed> operations;
  std::vector<OperationOutput> results;
  int partitions = 1;

  static NumberGraph random(std::mt19937_64& draw, int most_operations, int partitions);
  static std::uint64_t weight(int reader, int read);
  static std::uint64_t own(int operation, int microbatch);
  std::vector<std::uint64_t> outputs(int microbatch) const;
  std::vector<std::uint64_t> gradients() const;  // of the sum of the results by each output
  std::vector<std::string> names() const;
};

// Work that is to be done at some time, by whoever takes it.
class Actions {
 public:
  void push(std::function<void()> action);
  std::function<void()> take(std::mt19937_64& draw);  // any of them; nothing where there is none
  // By one thread, until there are none; `before` is called before each.
  void run(std::mt19937_64& draw, const std::function<void()>& before = [] {});
  // By four, until there are none, and nobody makes any.
  void run_by_threads(std::uint64_t seed);

 private:
  std::mutex mutex_;
  std::vector<std::function<void()>> actions_;
};

struct StepOptions {
  std::string schedule = "interleaved";
  int active_microbatches = 3;
  int microbatches = 1;
  bool backward = true;
  base::Clock::duration timeout = std::chrono::seconds(60);
  observe::Recorder* recorder = nullptr;
};

// Does what TensorFlow would, on one rank: goes through the segments of each microbatch, and back.
class PretendedRank {
 public:
  // `post` takes what is to happen at any time later.
  PretendedRank(const NumberGraph& graph, int rank, const StepOptions& options,
                std::function<void(std::function<void()>)> post);

  void connect(std::vector<PretendedRank*> ranks) { links_.ranks = std::move(ranks); }
  void begin(const StepArguments& arguments = {});
  void end();            // throws the step's error
  void lose(int other);  // what is sent to it from then on throws

  Border& border() { return border_; }
  std::shared_ptr<GraphStep> step() const { return step_; }
  int open_entries();  // that were told nothing yet
  // Called as a replica begins to run, and as it is over.
  std::function<void(const Replica&)> begins = [](const Replica&) {}, ends = [](const Replica&) {};
  // Has what follows the begin of a replica wait: by default it is posted.
  std::function<void(const Replica&, std::function<void()>)> compute;

  // Per microbatch and operation of this rank, or a result of another.
  std::map<std::pair<int, int>, std::uint64_t> outputs, gradients;
  std::vector<Replica> order;  // as they began
  std::string wrong;           // that was noticed; "" for nothing
  std::mutex mutex;            // of all these

 private:
  struct Network : Links {
    explicit Network(PretendedRank& rank) : own(rank) {}
    void send(base::Rank to, const ValueName& name, const TensorBytes& value) override;
    void tell_failure(base::Step step, const std::string& why) override;
    PretendedRank& own;
    std::vector<PretendedRank*> ranks;
  };

  void enter(const Replica& replica);
  void go(const Replica& replica, std::vector<TensorBytes> values);
  std::vector<TensorBytes> run(const Replica& replica, const std::vector<TensorBytes>& values);
  std::vector<TensorBytes> run_back(const Replica& replica, const std::vector<TensorBytes>& values);
  void over(const Replica& replica, const std::vector<TensorBytes>& made);
  int source_of(int value) const { return values_[value]; }

  const NumberGraph& graph_;
  const int rank_;
  const StepOptions options_;
  std::function<void(std::function<void()>)> post_;
  GraphCut cut_;
  std::vector<int> own_;     // segments of the cut
  std::vector<int> values_;  // operations by the number of their value
  Network links_;
  Border border_;
  std::shared_ptr<GraphStep> step_;
  int computing_ = 0;
  int open_ = 0;
  std::map<int, int> forwards_;
  std::optional<base::Loss> loss_;
};

// All ranks of a graph, and what they post.
struct PretendedJob {
  PretendedJob(NumberGraph graph, const StepOptions& options);
  PretendedJob(const PretendedJob&) = delete;  // ranks refer to it
  void begin();
  std::string difference();  // from what one rank alone computes; "" for none

  const NumberGraph graph;
  const StepOptions options;
  Actions actions;
  std::vector<std::unique_ptr<PretendedRank>> ranks;
};

}  // namespace lamina::graph::testing
