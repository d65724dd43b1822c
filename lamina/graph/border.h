// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/ids.h"
#include "lamina/graph/links.h"
#include "lamina/graph/program.h"

namespace lamina::graph {

class GraphStep;

// One rank's end of all graphs that ranks run together: their programs, the step that is open, and what other ranks say
// of it. A value for a step that this rank has yet to enter waits for it; one for a step that is over is dropped.
// From any thread.
class Border {
 public:
  Border(BorderOptions options, Links& links) : options_(std::move(options)), links_(links) {}
  ~Border();
  Border(const Border&) = delete;

  const BorderOptions& options() const { return options_; }

  // Returns the number that the graph has from now on: ranks add the same graphs in the same order. Throws
  // base::ConfigError where their schedule is one that graphs lack.
  std::int64_t add(Program program);
  const Program& program(std::int64_t graph);

  // Enters the next step, in which each microbatch goes through `graph` once, and back where `backward` says so.
  // It has failed before it begins where a rank is lost that is to take part. Throws base::UsageError inside a step.
  // `arguments` are those of the function that makes the step, see [Note: announcements].
  std::shared_ptr<GraphStep> begin(std::int64_t graph, int microbatches, bool backward,
                                   const StepArguments& arguments = {});
  // The step that is open, or the last one that has failed. Throws base::UsageError where there is none.
  std::shared_ptr<GraphStep> step();
  // Leaves it: its operations here are done.
  void end(const std::shared_ptr<GraphStep>& step);

  // Says that this rank does not enter the next step, to those who do, in these words: it counts as one that has
  // failed.
  void abandon(const std::string& why);

  // From the transport's thread.
  void receive(const ValueName& name, TensorBytes value);
  void hear_failure(base::Step step, const std::string& why);
  void lose(const base::Loss& loss);

  // Ends the step that is open on all ranks: somebody wants this process to stop. From any thread.
  void interrupt(const std::string& why);

 private:
  // Messages of a step that has not begun here.
  struct Coming {
    std::vector<std::pair<ValueName, TensorBytes>> values;
    std::optional<std::string> failure;
  };

  // Gives it to the step, which fails where it belongs to another graph.
  void hand(const std::shared_ptr<GraphStep>& step, const ValueName& name, TensorBytes value);
  std::string title(std::int64_t graph);

  const BorderOptions options_;
  Links& links_;
  std::mutex mutex_;
  std::map<std::int64_t, std::unique_ptr<const Program>> programs_;
  std::map<std::int64_t, int> runs_;  // of each graph
  std::map<base::Step, Coming> coming_;
  std::shared_ptr<GraphStep> open_;
  base::Step last_{-1};  // that has begun here
  std::vector<base::Loss> losses_;
};

}  // namespace lamina::graph
