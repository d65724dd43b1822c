// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lamina/frontend/job.h"
#include "lamina/frontend/model.h"
#include "lamina/frontend/serializer.h"
#include "lamina/frontend/step_output.h"
#include "lamina/pipeline/batch_splitter.h"

namespace lamina {

// An argument of a step that every microbatch gets whole.
template <class T>
struct Whole {
  const T& held;
};
template <class T>
Whole<T> whole(const T& held) {
  return {held};
}

// An argument whose tensors are split along an axis: another one than 0, or 0 where they look as if they were to stay
// whole.
template <class T>
struct Along {
  const T& held;
  std::int64_t axis;
};
template <class T>
Along<T> along(std::int64_t axis, const T& held) {
  return {held, axis};
}

namespace frontend {

// An argument of a call, as far as it is to be split.
struct Argument {
  std::optional<Value> batch;  // nothing: whole to each
  std::int64_t axis = 0;
  bool is_said = false;  // that it is split along that axis
};
template <class T>
Argument argument_of(const T& held) {
  if constexpr (Serializable<T>) {
    return {to_value(held)};
  } else {
    return {};
  }
}
template <class T>
Argument argument_of(const Whole<T>&) {
  return {};
}
template <class T>
Argument argument_of(const Along<T>& argument) {
  return {argument_of(argument.held).batch, argument.axis, true};
}

// Decisions on the batches of a step function, and remarks that were made; of one call at a time.
struct Said {
  pipeline::KnownParts known;
  std::set<pipeline::BatchSplitter::Remark> remarks;
};

// Cuts the arguments of a step into so many microbatches, as the engine decides (pipeline/batch_splitter.h), and takes
// the parts from the host to the rank's device. What it refuses is the error of the step. Returns with it what is to be
// told for the first time.
struct Splitting {
  int microbatches;
  bool needs_all = false;
};
std::pair<Batch, std::vector<std::string>> split(const std::vector<Argument>& arguments, const Splitting& splitting,
                                                 Said& said);
// Does so in this job, and tells it. On ranks that follow, whose arguments are not looked at, there are as many
// microbatches as configured.
Batch batch_of(const std::vector<Argument>& arguments, Said& said);

// Detached from their graphs.
Value detached(Value output);
// How messages name a step function, and ranks compare it.
base::Call step_call(const std::string& name, const CallSite& site);

// An argument, by its number, for one microbatch.
struct PartOf {
  const Batch& batch;
  base::Microbatch microbatch;
  std::size_t argument;
};
template <class T>
T part_of(const T& held, const PartOf& part) {
  if constexpr (Serializable<T>) {
    return from_value<T>(part.batch.parts.at(part.argument).at(part.microbatch.value));
  } else {
    return held;
  }
}
template <class T>
T part_of(const Whole<T>& argument, const PartOf&) {
  return argument.held;
}
template <class T>
T part_of(const Along<T>& argument, const PartOf& part) {
  return part_of(argument.held, part);
}

}  // namespace frontend

// The part of a training loop that runs once per microbatch; see step().
template <class Function>
class StepFunction {
 public:
  StepFunction(Function function, base::Call call) : function_(std::move(function)), call_(std::move(call)) {}

  template <class... Args>
  auto operator()(const Args&... args) const {
    return run(std::index_sequence_for<Args...>(), args...);
  }

 private:
  template <std::size_t... I, class... Args>
  auto run(std::index_sequence<I...>, const Args&... args) const {
    using Result = decltype(function_(frontend::part_of(args, std::declval<frontend::PartOf>())...));
    const auto batch = frontend::batch_of({frontend::argument_of(args)...}, *said_);
    const auto call = [&]([[maybe_unused]] base::Microbatch microbatch) {
      return function_(frontend::part_of(args, {batch, microbatch, I})...);
    };
    if constexpr (std::is_void_v<Result>) {
      frontend::run_step(
          batch,
          [&](base::Microbatch microbatch) -> Value {
            call(microbatch);
            return {};
          },
          call_);
    } else {
      const auto result = frontend::run_step(
          batch, [&](base::Microbatch microbatch) { return frontend::detached(to_value(Result(call(microbatch)))); },
          call_);
      std::vector<std::decay_t<Result>> results;
      for (const Value& output : result.outputs) results.push_back(from_value<std::decay_t<Result>>(output));
      return merge(std::move(results), result.samples);
    }
  }

  Function function_;
  base::Call call_;
  std::shared_ptr<frontend::Said> said_ = std::make_shared<frontend::Said>();
};

// Makes a function a step function. Calling it splits the tensors among its arguments into microbatches along axis 0,
// and says at the first call what it found; whole() and along() change that. A list
// with an element for each sample is cut by elements ([Note: lists of samples] in lamina/pipeline/lists.h). It runs the
// function once for each microbatch, on the rank of partition 0. Of a batch that does not divide, microbatches differ
// by one sample, and each counts as much as its samples in gradients and reduce_mean(). The other ranks of the pipeline
// call it as well, and run what they own of the model; their arguments are not looked at. All of them get the results,
// detached: a StepOutput in the place of each tensor that the function returns (step_output.h). What the function, or a
// module on any rank, throws is thrown on every rank of the pipeline.
//
// The function runs in other threads than the caller's, one at a time. What it writes outside of itself it writes on
// one rank only.
//
// `name` is what the ranks of a pipeline compare as they enter a step: another one there is a DesyncError on all of
// them. Without one it is the place where step() is called.
template <class Function>
StepFunction<Function> step(Function function, const std::string& name = {}, CallSite site = CallSite::current()) {
  return StepFunction<Function>(std::move(function), frontend::step_call(name, site));
}

}  // namespace lamina
