// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "lamina/base/error.h"
#include "lamina/frontend/serializer.h"

namespace lamina {

// A stretch of a training in which the same processes are its ranks.
struct Epoch {
  std::int64_t updates = 0;  // of the optimizer that count: those before it
};

// The part of a loop's state that goes to copies that have not come as far as another one: what `state` gives there
// `take` is called with, as the steps of a schedule.
struct RunOptions {
  std::function<Value()> state = {};
  std::function<void(const Value&)> take = {};
};

// A training of copies of a model, which goes on where ranks are lost, as long as most of the last ones are left:
//
//     lamina::Run run;
//     lamina::elastic(run, [&](lamina::Epoch& epoch) {  // called again after each loss
//       for (auto number = epoch.updates; number < kSteps; ++number) { ... }
//     });
//
// It is of the job's DistributedModel, a whole copy on each rank, and of its only DistributedOptimizer. A step of that
// ends a batch. After a loss the copies that are left have the model and the states of the optimizer as they were
// after the updates of the one that has come furthest. An update that one of them has made counts, and any other one is
// made again. Buffers are as they were then, and random numbers with `seed`. A batch has as many microbatches as
// before, which the copies that are left share out.
//
// Throws UsageError for a model in parts, or with parts of states: what a lost rank had nobody else has.
class Run {
 public:
  explicit Run(RunOptions options = {});
  ~Run();
  Run(const Run&) = delete;

  std::int64_t updates() const;  // of the optimizer that count
  // Goes on after the error that is being handled, where a lost rank is behind it, or throws it again. Collective over
  // those who are left.
  void go_on();

 private:
  class Training;
  std::unique_ptr<Training> training_;
};

// Calls `train` with the first epoch, and again with the next one after each loss. Returns what it returns. Throws
// PeerError where a rank was lost, and too few are left, or what it had is lost with it.
template <class Train>
auto elastic(Run& run, Train&& train) {
  while (true) {
    try {
      Epoch epoch{run.updates()};
      return train(epoch);
    } catch (const base::Error&) {
      run.go_on();
    }
  }
}

}  // namespace lamina
