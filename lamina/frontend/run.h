// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/frontend/job.h"
#include "lamina/frontend/serializer.h"

namespace lamina {

// A stretch of a training in which the same processes are its ranks.
struct Epoch {
  std::int64_t updates = 0;  // of the optimizer that count: those before it
};

// Keys of change() that say who does what: LayoutKeys{{"partitions", 2}}.
struct LayoutKeys {
  LayoutKeys(Settings settings) : json(frontend::to_json(settings)) {}
  explicit LayoutKeys(std::string its) : json(std::move(its)) {}  // the same as a JSON object
  std::string json;
};

// `state` and `take`: the part of a loop's state that goes to ranks that have not come as far as another one, or goes
// back with them, as the steps of a schedule. What `state` gave `take` is called with. `keep_every` and `layouts` are
// for ranks that have parts of the model, or of states, which others have not.
struct RunOptions {
  std::function<Value()> state = {};
  std::function<void(const Value&)> take = {};
  std::optional<int> keep_every = 1;  // updates lie between two versions; std::nullopt: as few as take 2 % of the time
  std::vector<LayoutKeys> layouts = {};  // in which they may go on: the first that fits their number is taken
};

// Ends an epoch before a step, on all ranks after the same update: others join, or some leave. Let it pass.
class EpochOver : public std::exception {
 public:
  const char* what() const noexcept override { return "ranks join or leave, which lamina::Run sees to: let it pass"; }
};

// A training that goes on where ranks are lost, as long as most of the last ones are left, and where others join:
//
//     lamina::Run run;
//     lamina::elastic(run, [&](lamina::Epoch& epoch) {  // called again after each loss, and when others join
//       for (auto number = epoch.updates; number < kSteps; ++number) { ... }
//     });
//
// It is of the job's DistributedModel, and of its only DistributedOptimizer. A step of that ends a batch. After a loss
// copies of a model have the model and the states of the optimizer as they were after the updates of the one that has
// come furthest. An update that one of them has made counts, and any other one is made again. Buffers are as they were
// then, and random numbers with `seed`. A batch has as many microbatches as before, which the copies that there are
// share out. A process that joins them runs the program up to elastic() in a world of its own, and has there what the
// others have. After SIGTERM a rank leaves after an update, as by std::exit(), and the others go on.
//
// Ranks with partitions, shards or parts of states keep what they have in the memory of the host, each `keep_every`
// updates, and beside the next step each sends to another one what nobody else has. After a loss all go on from the
// newest version of which nothing is lost, in the first of `layouts` that fits their number. Without one that does, the
// model is in as many parts as the program has asked for, or in the nearest number that fits. So do they where others
// join or leave, with what they have then.
//
// Throws UsageError for a model in slices, or several machines; without `ddp`; ConfigError for a layout that no number
// of ranks allows.
class Run {
 public:
  explicit Run(RunOptions options = {});
  ~Run();
  Run(const Run&) = delete;

  std::int64_t updates() const;  // of the optimizer that count
  // For elastic(), which calls these. The training begins: a process that is to join those who train does. It is over.
  void begin();
  void end();
  // Goes on after the error that is being handled, where a lost rank is behind it, or throws it again. Collective over
  // those who are left.
  void go_on();
  // Goes on after EpochOver. Collective over all, and newcomers.
  void go_on_with_others();

 private:
  std::shared_ptr<session::Session> open_after(config::Config config);
  static void stop_watching();

  class Training;
  template <class Face>
  class Loop;
  class Copies;
  class Parts;
  std::unique_ptr<Training> training_;
};

// Calls `train` with the first epoch, and again with the next one after each loss, and when others have joined. Returns
// what it returns. Throws PeerError where a rank was lost, and too few are left, or what it had is lost with it;
// ConfigError in a process that was to join a job from which it differs.
template <class Train>
auto elastic(Run& run, Train&& train) {
  run.begin();
  while (true) {
    try {
      Epoch epoch{run.updates()};
      if constexpr (std::is_void_v<decltype(train(epoch))>) {
        train(epoch);
        return run.end();
      } else {
        auto result = train(epoch);
        run.end();
        return result;
      }
    } catch (const base::Error&) {
      run.go_on();
    } catch (const EpochOver&) {
      run.go_on_with_others();
    }
  }
}

}  // namespace lamina
