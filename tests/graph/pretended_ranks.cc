// SPDX-License-Identifier: Apache-2.0
#include "tests/graph/pretended_ranks.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <utility>

#include "lamina/base/str.h"

namespace lamina::graph::testing {
namespace {

TensorBytes value_of(std::uint64_t number) {
  return {.type = 1, .shape = {}, .data = std::make_shared<const std::uint64_t>(number), .size_bytes = sizeof number};
}

std::uint64_t number_of(const TensorBytes& value) { return *static_cast<const std::uint64_t*>(value.data.get()); }

int draw_below(std::mt19937_64& draw, int end) { return static_cast<int>(draw() % static_cast<std::uint64_t>(end)); }

std::vector<base::Rank> owners(int partitions) {
  std::vector<base::Rank> ranks;
  for (int i = 0; i < partitions; ++i) ranks.emplace_back(i);
  return ranks;
}

}  // namespace

NumberGraph NumberGraph::random(std::mt19937_64& draw, int most_operations, int partitions) {
  NumberGraph graph;
  graph.partitions = partitions;
  const int size = 1 + draw_below(draw, most_operations);
  std::set<int> unread;
  for (int i = 0; i < size; ++i) {
    Placed operation{base::Partition(draw_below(draw, partitions)), {}, {}, {true}};
    const int inputs = i == 0 ? 0 : draw_below(draw, 4);
    for (int k = 0; k < inputs; ++k) {
      const int input = std::max(0, i - 1 - draw_below(draw, 6));
      operation.inputs.push_back({input, 0});
      unread.erase(input);
    }
    if (i > 0 && draw_below(draw, 5) == 0) operation.after.push_back(draw_below(draw, i));
    graph.operations.push_back(std::move(operation));
    unread.insert(i);
  }
  for (const int one : unread) graph.results.push_back({one, 0});
  return graph;
}

std::uint64_t NumberGraph::weight(int reader, int read) { return 3 + 7 * reader + 11 * read; }

std::uint64_t NumberGraph::own(int operation, int microbatch) { return 1 + 13 * operation + 1009 * microbatch; }

std::vector<std::uint64_t> NumberGraph::outputs(int microbatch) const {
  std::vector<std::uint64_t> numbers;
  for (int i = 0; i < static_cast<int>(operations.size()); ++i) {
    std::uint64_t sum = own(i, microbatch);
    for (const OperationOutput& input : operations[i].inputs)
      sum += weight(i, input.operation) * numbers[input.operation];
    numbers.push_back(sum);
  }
  return numbers;
}

std::vector<std::uint64_t> NumberGraph::gradients() const {
  std::vector<std::uint64_t> numbers(operations.size());
  for (const OperationOutput& result : results) numbers[result.operation] += 1;
  for (int i = static_cast<int>(operations.size()) - 1; i >= 0; --i) {
    for (const OperationOutput& input : operations[i].inputs)
      numbers[input.operation] += weight(i, input.operation) * numbers[i];
  }
  return numbers;
}

std::vector<std::string> NumberGraph::names() const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < operations.size(); ++i) names.push_back(base::str("operation", i));
  return names;
}

void Actions::push(std::function<void()> action) {
  std::lock_guard guard(mutex_);
  actions_.push_back(std::move(action));
}

std::function<void()> Actions::take(std::mt19937_64& draw) {
  std::lock_guard guard(mutex_);
  if (actions_.empty()) return nullptr;
  std::swap(actions_[draw_below(draw, static_cast<int>(actions_.size()))], actions_.back());
  auto action = std::move(actions_.back());
  actions_.pop_back();
  return action;
}

void Actions::run(std::mt19937_64& draw, const std::function<void()>& before) {
  while (const auto action = take(draw)) {
    before();
    action();
  }
}

void Actions::run_by_threads(std::uint64_t seed) {
  constexpr int kThreads = 4;
  std::atomic<int> idle = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 draw(seed * kThreads + i);
      bool counted = false;
      while (idle < kThreads) {
        if (counted) {
          idle -= 1;
          counted = false;
        }
        if (const auto action = take(draw)) {
          action();
        } else {
          idle += 1;
          counted = true;
        }
        std::this_thread::yield();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

PretendedRank::PretendedRank(const NumberGraph& graph, int rank, const StepOptions& options,
                             std::function<void(std::function<void()>)> post)
    : compute([this](const Replica&, std::function<void()> rest) { post_(std::move(rest)); }),
      graph_(graph),
      rank_(rank),
      options_(options),
      post_(std::move(post)),
      cut_(cut(graph.operations, graph.results, graph.partitions)),
      links_(*this),
      border_({base::Rank(rank), options.schedule, options.active_microbatches, options.timeout, options.recorder},
              links_) {
  for (int i = 0; i < static_cast<int>(cut_.segments.size()); ++i) {
    if (cut_.segments[i].partition.value == rank) own_.push_back(i);
  }
  for (const auto& crossing : cut_.crossings) {
    if (values_.empty() || values_.back() != crossing.value.operation) values_.push_back(crossing.value.operation);
  }
  border_.add(
      program_of(cut_, graph.results, base::Partition(rank), owners(graph.partitions), graph.names(), "numbers"));
}

void PretendedRank::Network::send(base::Rank to, const ValueName& name, const TensorBytes& value) {
  if (own.loss_ && own.loss_->rank == to) throw base::PeerError(own.loss_->text(), own.loss_);
  auto* other = ranks[to.value];
  own.post_([other, name, value] { other->border().receive(name, value); });
}

void PretendedRank::Network::tell_failure(base::Step step, const std::string& why) {
  for (auto* other : ranks) {
    if (other != &own) own.post_([other, step, why] { other->border().hear_failure(step, why); });
  }
}

void PretendedRank::begin(const StepArguments& arguments) {
  {
    std::lock_guard guard(mutex);
    outputs.clear();
    gradients.clear();
    order.clear();
    forwards_.clear();
    computing_ = 0;
  }
  step_ = border_.begin(0, options_.microbatches, options_.backward, arguments);
  for (int i = 0; i < options_.microbatches; ++i) {
    post_([this, i] { enter({Direction::kForward, 0, base::Microbatch(i)}); });
  }
}

void PretendedRank::lose(int other) {
  loss_ = base::Loss{base::Rank(other), "its process ended", ""};
  border_.lose(*loss_);
}

void PretendedRank::end() { border_.end(step_); }

int PretendedRank::open_entries() {
  std::lock_guard guard(mutex);
  return open_;
}

void PretendedRank::enter(const Replica& replica) {
  {
    std::lock_guard guard(mutex);
    ++open_;
  }
  const auto told = [this] {
    std::lock_guard guard(mutex);
    --open_;
  };
  step_->enter(replica, {[this, replica, told](std::vector<TensorBytes> values) {
                           told();
                           go(replica, std::move(values));
                         },
                         [told](std::exception_ptr) { told(); }});
}

void PretendedRank::go(const Replica& replica, std::vector<TensorBytes> values) {
  const bool is_outside = replica.segment == step_->program().outside();
  {
    std::lock_guard guard(mutex);
    order.push_back(replica);
    if (!is_outside && ++computing_ > 1) wrong = "two segments compute at the same time";
    if (!is_outside && replica.pass == Direction::kForward &&
        forwards_[replica.segment]++ != replica.microbatch.value) {
      wrong = "microbatches out of their order";
    }
  }
  begins(replica);
  compute(replica, [this, replica, values = std::move(values)] {
    std::vector<TensorBytes> made;
    {
      std::lock_guard guard(mutex);
      made = replica.pass == Direction::kForward ? run(replica, values) : run_back(replica, values);
      if (replica.segment != step_->program().outside()) --computing_;
    }
    ends(replica);
    over(replica, made);
  });
}

void PretendedRank::over(const Replica& replica, const std::vector<TensorBytes>& made) {
  const int outside = step_->program().outside();
  const auto back_from = [&](int segment) {
    if (segment >= 0) enter({Direction::kBackward, segment, replica.microbatch});
  };
  try {
    if (replica.pass == Direction::kBackward) {
      step_->leave(replica, made);
      return back_from(replica.segment - 1);
    }
    if (replica.segment != outside) {
      step_->leave(replica, made);
      return enter({Direction::kForward, replica.segment + 1, replica.microbatch});
    }
    if (!options_.backward) return;
    step_->leave({Direction::kBackward, outside, replica.microbatch}, {});
    back_from(outside - 1);
  } catch (const base::Error&) {  // the step's, which its end throws
  }
}

std::vector<TensorBytes> PretendedRank::run(const Replica& replica, const std::vector<TensorBytes>& values) {
  const int microbatch = static_cast<int>(replica.microbatch.value);
  const auto& own = step_->program().segments[replica.segment];
  for (std::size_t i = 0; i < values.size(); ++i) {
    outputs[{microbatch, source_of(own.receives[i].value)}] = number_of(values[i]);
  }
  for (const int operation : cut_.segments[own_[replica.segment]].operations) {
    std::uint64_t sum = NumberGraph::own(operation, microbatch);
    for (const OperationOutput& input : graph_.operations[operation].inputs) {
      const auto found = outputs.find({microbatch, input.operation});
      if (found == outputs.end()) {
        wrong = "an operation before what it reads";
        return {};
      }
      sum += NumberGraph::weight(operation, input.operation) * found->second;
    }
    outputs[{microbatch, operation}] = sum;
  }
  std::vector<TensorBytes> sent;
  for (const auto& passage : own.sends) sent.push_back(value_of(outputs.at({microbatch, source_of(passage.value)})));
  return sent;
}

std::vector<TensorBytes> PretendedRank::run_back(const Replica& replica, const std::vector<TensorBytes>& values) {
  const int microbatch = static_cast<int>(replica.microbatch.value);
  const auto awaited = step_->program().awaited(Direction::kBackward, replica.segment);
  for (std::size_t i = 0; i < values.size(); ++i) {
    gradients[{microbatch, source_of(awaited[i].value)}] += number_of(values[i]);
  }
  const auto& operations = cut_.segments[own_[replica.segment]].operations;
  for (auto operation = operations.rbegin(); operation != operations.rend(); ++operation) {
    gradients[{microbatch, *operation}] += std::ranges::count(graph_.results, OperationOutput{*operation, 0});
    for (const OperationOutput& input : graph_.operations[*operation].inputs) {
      gradients[{microbatch, input.operation}] +=
          NumberGraph::weight(*operation, input.operation) * gradients[{microbatch, *operation}];
    }
  }
  std::vector<TensorBytes> sent;
  for (const auto& passage : step_->program().sent(Direction::kBackward, replica.segment)) {
    sent.push_back(value_of(gradients[{microbatch, source_of(passage.value)}]));
  }
  return sent;
}

PretendedJob::PretendedJob(NumberGraph of, const StepOptions& with) : graph(std::move(of)), options(with) {
  std::vector<PretendedRank*> all;
  for (int i = 0; i < graph.partitions; ++i) {
    ranks.push_back(std::make_unique<PretendedRank>(
        graph, i, options, [this](std::function<void()> later) { actions.push(std::move(later)); }));
    all.push_back(ranks.back().get());
  }
  for (auto* rank : all) rank->connect(all);
}

void PretendedJob::begin() {
  for (auto& rank : ranks) rank->begin();
}

std::string PretendedJob::difference() {
  const auto gradients = graph.gradients();
  for (auto& rank : ranks) {
    if (!rank->wrong.empty()) return rank->wrong;
    if (rank->open_entries() > 0) return "somebody waits";
  }
  for (int microbatch = 0; microbatch < options.microbatches; ++microbatch) {
    const auto outputs = graph.outputs(microbatch);
    const auto differs = [&](std::map<std::pair<int, int>, std::uint64_t>& found, const auto& right, int operation) {
      const auto one = found.find({microbatch, operation});
      return one == found.end() || one->second != right[operation];
    };
    for (int i = 0; i < static_cast<int>(graph.operations.size()); ++i) {
      auto& owner = *ranks[graph.operations[i].partition.value];
      if (differs(owner.outputs, outputs, i)) return base::str("output ", i, " of microbatch ", microbatch);
      if (options.backward && differs(owner.gradients, gradients, i)) {
        return base::str("gradient ", i, " of microbatch ", microbatch);
      }
    }
    for (const OperationOutput& result : graph.results) {
      for (auto& rank : ranks) {
        if (differs(rank->outputs, outputs, result.operation)) return base::str("result ", result.operation);
      }
    }
  }
  return "";
}

}  // namespace lamina::graph::testing
