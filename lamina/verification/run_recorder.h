// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/digests/recording.h"
#include "lamina/environment/environment.h"
#include "lamina/model/call_hooks.h"
#include "lamina/verification/digest_of.h"
#include "lamina/verification/parameter_gradients.h"

// Runs that are recorded to be compared with others: what each module computed, and what became of the model.
namespace lamina::verification {

// The words of `lamina verify` to the ranks that it starts.
struct RecordingOptions {
  std::string folder;      // for the recordings; "" keeps them in memory
  std::int64_t steps = 3;  // after so many the script ends
  std::int64_t first = 0;  // the number of the first step
  bool bits = false;
  std::string layout;               // keys that replace the script's, see config::in_layout()
  bool collapsed = false;           // the layout is taken away, see config::collapsed()
  std::set<std::string> looked_at;  // modules and parameters: of what their calls and updates read it is recorded
  bool one_microbatch = false;      // the first of each step alone is recorded, and nothing of the model
};
// Nothing where this process is not to be recorded. Throws base::ConfigError.
std::optional<RecordingOptions> read_terms(const environment::Environment& environment);

// [Note: recorded runs] What one rank of a run computes, as digests in a file of its own. It hears of calls by the
// hooks around them, on the rank that runs the module; tensors that lie elsewhere are their owner's to record. A step
// is a call of a step function or, in a script that has none, all up to an update. What an update and the script
// between two steps have made of the model is recorded where the next step begins. Thread-safe.
class RunRecorder : public model::CallHook {
 public:
  // Throws base::Error where the folder cannot be written to.
  RunRecorder(RecordingOptions recording_options, digests::RankRecording about);
  ~RunRecorder() override;

  // True where as many steps have ended as are wanted.
  bool is_over() const { return steps_ >= terms_.steps; }
  // True where the script's layout was taken away: places that it gives modules do not count.
  bool is_collapsed() const { return terms_.collapsed; }

  // Modules and parameters of which it is recorded what their calls and updates read.
  const std::set<std::string>& looked_at() const { return terms_.looked_at; }

  // A call of a step function.
  void begin_step() { has_step_functions_ = true; }
  // The microbatch whose body this thread runs from now on, where no ExecutionContext says so.
  void begin_microbatch(base::Microbatch microbatch) { microbatch_ = microbatch.value; }
  std::int64_t microbatch() const;  // whose body this thread runs
  // Sees the tensors of what a step function returned for a microbatch.
  void see_result(base::Microbatch microbatch, std::span<const at::Tensor> tensors);
  void end_step();
  // With one microbatch: makes the gradient of a parameter of this name what is recorded of it.
  using Recorded = std::function<at::Tensor(const std::string& name, const at::Tensor& gradient)>;
  void end_step_of(const Recorded& recorded);
  // With one microbatch: a step begins, of which these parameters' gradients are recorded. Forgets the step before.
  void begin_step_of(std::span<const ParameterGradients::Named> parameters);
  // With one microbatch: gradients of parameters, by their names, of whose steps begin_step_of() knows none.
  void see_gradients(std::span<const ParameterGradients::Named> gradients);
  std::int64_t steps() const { return steps_; }

  // A tensor, or the part of it that is here.
  struct Held {
    std::string name;
    at::Tensor tensor;
    PartOf part;
  };
  // Options of the update of a parameter that comes next.
  void see_options(const std::string& parameter, const std::map<std::string, std::string>& options);
  // The gradients that an optimizer is about to update with.
  void see_update(std::span<const Held> gradients);
  // A variable that a call reads, in words or as a hash, the numbers that lie in it, and another module that uses it.
  struct Variable {
    std::string name, value;
    std::vector<at::Tensor> tensors;
    std::string user;
  };
  // The variables that the call of this module that has begun last reads, in its microbatch.
  void see_reads(const std::string& module, std::span<const Variable> variables);
  // True where a step has ended since see_state().
  bool has_news() const { return steps_ > seen_; }
  // The model, its optimizers and generators after a step, or before the first.
  void see_state(std::span<const std::pair<digests::RecordedKind, Held>> state);
  // Nothing comes any more.
  void end();

  // True where the recording is a file's; else text() is all of it, of one microbatch that of one step.
  bool writes() const { return !terms_.folder.empty(); }
  std::string text();
  // Nothing comes any more, and what is kept in memory goes.
  void let_go();
  // With one microbatch: the gradients that what the model returned in it had, by its number; undefined: none.
  std::vector<at::Tensor> gradients_of_model();

  // model::CallHook.
  bool wants_tensors() const override { return true; }
  void before_forward(const model::ModuleCall& call) override;
  void after_forward(const model::ModuleCall& call) override;
  void see_inputs(const model::ModuleCall& call, std::span<const at::Tensor> inputs) override;
  void see_outputs(const model::ModuleCall& call, std::span<const at::Tensor> outputs) override;
  void see_gradient(const model::ModuleCall& call, std::int64_t output, const at::Tensor& gradient) override;

 private:
  struct Call {
    digests::CallName name;
    digests::Surroundings surroundings;
    std::int64_t began = 0;  // its place in the order
    // Inputs that had no value when it began, by their place, with their version then; undefined: seen.
    std::vector<std::pair<at::Tensor, std::uint32_t>> awaited;
  };
  // Elements that were seen a moment ago: the output of one module is often the input of the next one.
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    at::ScalarType type = at::kFloat;
    std::int64_t offset = 0;
    std::vector<std::int64_t> strides;
    std::int64_t version = -1;
    digests::Digest digest;
  };
  void write(digests::RecordedKind kind, const digests::CallName& call, std::int64_t index, std::int64_t order,
             const at::Tensor& tensor);
  Call* begun(const model::ModuleCall& call);        // under the lock; nullptr where its beginning was not recorded
  digests::Digest digest(const at::Tensor& tensor);  // under the lock
  void forget();                                     // under the lock: all that is kept of a step
  void write_gradient(const std::string& name, const at::Tensor& gradient);  // under the lock, of a parameter
  void close_step();                                                         // under the lock
  std::int64_t step_of_update() const;                                       // that comes next
  void keep(std::int64_t output, const at::Tensor& gradient);                // under the lock

  const RecordingOptions terms_;
  const pid_t process_;                  // whose copies, such as workers that load data, record nothing
  std::atomic<std::int64_t> steps_ = 0;  // that have ended
  std::atomic<std::int64_t> seen_ = 0;   // of them, those after which the state was seen
  std::atomic<bool> has_step_functions_ = false;
  std::atomic<std::int64_t> microbatch_ = 0;
  std::mutex mutex_;
  std::ostringstream kept_;
  std::string beginning_;  // of what is kept
  digests::Writer writer_;
  std::vector<Known> known_;  // a ring
  std::size_t next_known_ = 0;
  std::int64_t order_ = 0;
  std::int64_t updates_ = 0;  // in this step, or since the last one
  bool is_over_ = false;
  std::vector<at::Tensor> gradients_of_model_;
  std::unique_ptr<ParameterGradients> parameters_;
  std::unordered_map<std::int64_t, Call> calls_;                           // of this step, by their numbers
  std::map<std::pair<std::int64_t, std::string>, std::int64_t> calls_of_;  // of a module in a microbatch, so far
};

}  // namespace lamina::verification
