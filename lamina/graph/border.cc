// SPDX-License-Identifier: Apache-2.0
// Threads: those of the library that runs the graphs begin and end steps, the transport's brings values, failures and
// losses. Locks: mutex_, under which nothing is called.
#include "lamina/graph/border.h"

#include <utility>

#include "lamina/base/str.h"
#include "lamina/graph/step.h"

namespace lamina::graph {
namespace {

// StepArguments are compared in the first steps of each graph, and in every 100th step.
constexpr int kFirstRuns = 3;
constexpr std::int64_t kEvery = 100;

std::exception_ptr failed(const std::string& why) { return std::make_exception_ptr(base::Error(why)); }

}  // namespace

Border::~Border() = default;

std::int64_t Border::add(Program program) {
  if (options_.schedule == "zero_bubble") {
    throw base::ConfigError(
        "schedule: \"zero_bubble\" is of steps in which torch computes, not of graphs; use \"interleaved\"");
  }
  std::lock_guard guard(mutex_);
  const auto graph = static_cast<std::int64_t>(programs_.size());
  program.graph = graph;
  programs_.emplace(graph, std::make_unique<const Program>(std::move(program)));
  return graph;
}

const Program& Border::program(std::int64_t graph) {
  std::lock_guard guard(mutex_);
  const auto found = programs_.find(graph);
  base::internal_check(found != programs_.end(), "a graph that nobody added");
  return *found->second;
}

std::shared_ptr<GraphStep> Border::begin(std::int64_t graph, int microbatches, bool backward,
                                         const StepArguments& arguments) {
  const Program& program = this->program(graph);
  std::shared_ptr<GraphStep> before;  // its end waits for its watcher: without the lock
  std::shared_ptr<GraphStep> begun;
  Coming coming;
  std::vector<base::Loss> losses;
  bool compares = false;
  {
    std::lock_guard guard(mutex_);
    compares = runs_[graph]++ < kFirstRuns || (last_.value + 1) % kEvery == 0;
  }
  auto checksums = compares && arguments && program.ranks.size() > 1 ? arguments() : Checksums();
  {
    std::lock_guard guard(mutex_);
    if (open_ && !open_->error()) {
      throw base::UsageError(base::str("a step of ", options_.of, " inside step ", open_->number(),
                                       ": steps of one process follow each other; call one step function after the "
                                       "other"));
    }
    last_ = base::Step(last_.value + 1);
    losses = losses_;
    begun = std::make_shared<GraphStep>(options_, links_, program, last_, microbatches, backward, std::move(checksums));
    before = std::exchange(open_, begun);
    if (auto node = coming_.extract(last_)) coming = std::move(node.mapped());
  }
  for (const auto& loss : losses) begun->lose(loss);
  if (coming.failure) begun->fail(failed(*coming.failure), GraphStep::Tell::kNobody);
  begun->announce();
  for (auto& [name, value] : coming.values) hand(begun, name, std::move(value));
  return begun;
}

void Border::abandon(const std::string& why) {
  base::Step step;
  {
    std::lock_guard guard(mutex_);
    if (open_ && !open_->error()) return;  // it has that one's failure to tell
    step = last_ = base::Step(last_.value + 1);
    coming_.erase(step);
  }
  links_.tell_failure(step, why);
}

std::shared_ptr<GraphStep> Border::step() {
  std::lock_guard guard(mutex_);
  if (!open_) throw base::UsageError("an operation of a graph outside a step: run it in a step function");
  return open_;
}

void Border::end(const std::shared_ptr<GraphStep>& step) {
  step->end();
  std::lock_guard guard(mutex_);
  if (open_ == step) open_ = nullptr;
}

void Border::receive(const ValueName& name, TensorBytes value) {
  std::shared_ptr<GraphStep> open;
  {
    std::lock_guard guard(mutex_);
    if (name.step > last_) {
      coming_[name.step].values.emplace_back(name, std::move(value));
      return;
    }
    if (open_ && open_->number() == name.step) open = open_;
  }
  if (open) hand(open, name, std::move(value));
}

void Border::hand(const std::shared_ptr<GraphStep>& step, const ValueName& name, TensorBytes value) {
  const auto own = step->program().graph;
  if (name.graph == own) return step->receive(name, std::move(value));
  step->fail(std::make_exception_ptr(base::DesyncError(base::str(
                 "step ", step->number(), " of ", options_.of, ": rank ", name.from, " runs ", title(name.graph),
                 " in it, and rank ", options_.rank, " runs ", title(own),
                 "; all ranks call the same step functions in the same order, with arguments of the same shapes"))),
             GraphStep::Tell::kOthers);
}

std::string Border::title(std::int64_t graph) {
  std::lock_guard guard(mutex_);
  const auto found = programs_.find(graph);
  return base::str("graph ", graph, found == programs_.end() ? "" : base::str(" (", found->second->title, ")"));
}

void Border::hear_failure(base::Step step, const std::string& why) {
  std::shared_ptr<GraphStep> open;
  {
    std::lock_guard guard(mutex_);
    if (step > last_) {
      auto& failure = coming_[step].failure;
      if (!failure) failure = why;
      return;
    }
    if (open_ && open_->number() == step) open = open_;
  }
  if (open) open->fail(failed(why), GraphStep::Tell::kNobody);
}

void Border::lose(const base::Loss& loss) {
  std::shared_ptr<GraphStep> open;
  {
    std::lock_guard guard(mutex_);
    losses_.push_back(loss);
    open = open_;
  }
  if (open) open->lose(loss);
}

void Border::interrupt(const std::string& why) {
  std::shared_ptr<GraphStep> open;
  {
    std::lock_guard guard(mutex_);
    open = open_;
  }
  if (open) open->fail(std::make_exception_ptr(base::CancelledError(why)), GraphStep::Tell::kOthers);
}

}  // namespace lamina::graph
