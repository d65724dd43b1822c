// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lamina/frontend/job.h"
#include "lamina/frontend/model.h"
#include "lamina/frontend/serializer.h"
#include "lamina/frontend/step_output.h"
#include "lamina/pipeline/lists.h"

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

// Remarks on the batches of a step function, each made once.
struct Said {
  std::atomic<bool> split = false, nothing = false, fewer = false;
  std::map<std::string, pipeline::BatchPart::Known> lists;  // what was decided of them, by name; of one call at a time
};

// How the arguments are cut into microbatches: see [Note: uneven batches] in lamina/pipeline/pieces.h. One that does
// not fit beside the others is refused, and one that holds offsets: [Note: offsets] in lamina/pipeline/offsets.h. On
// ranks that follow, whose arguments are not looked at, there are as many microbatches as configured.
Batch batch_of(const std::vector<Argument>& arguments, Said& said);

// An argument of a step, by its number, and the microbatch that gets a part of it.
struct PartOf {
  const pipeline::Pieces& pieces;
  base::Microbatch microbatch;
  int argument;
  bool by_elements = false;  // it is a list with an element for each sample
};
// Makes that part of `argument`: of each tensor in it a piece along the axis, a view; 0-dimensional ones, and all else,
// whole. Throws base::UsageError for a tensor without that axis.
Value split(const Value& argument, std::int64_t axis, const PartOf& part);
// Detached from their graphs.
Value detached(Value output);
// How messages name a step function, and ranks compare it.
base::Call step_call(const std::string& name, const CallSite& site);

// An argument for one microbatch.
template <class T>
T part_of(const T& held, const PartOf& part, std::int64_t axis = 0) {
  if constexpr (Serializable<T>) {
    return from_value<T>(split(to_value(held), axis, part));
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
  return part_of(argument.held, part, argument.axis);
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
      return function_(frontend::part_of(args, {batch.pieces, microbatch, static_cast<int>(I), batch.cuts_list(I)})...);
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
