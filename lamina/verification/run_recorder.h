// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/digests/recording.h"
#include "lamina/environment/environment.h"
#include "lamina/model/call_hooks.h"
#include "lamina/verification/digest_of.h"

// Runs that are recorded to be compared with others: what each module computed, and what became of the model.
namespace lamina::verification {

// What `lamina verify` tells the ranks that it starts.
struct Terms {
  std::string folder;      // for the recordings
  std::int64_t steps = 3;  // after so many the script ends
  bool bits = false;
  bool collapsed = false;  // the layout is taken away, see config::collapsed()
};
constexpr const char* kFolderVariable = "LAMINA_VERIFY_FOLDER";
constexpr const char* kStepsVariable = "LAMINA_VERIFY_STEPS";
constexpr const char* kBitsVariable = "LAMINA_VERIFY_BITS";
constexpr const char* kCollapsedVariable = "LAMINA_VERIFY_COLLAPSED";
// Nothing where this process is not to be recorded. Throws base::ConfigError.
std::optional<Terms> read_terms(const environment::Environment& environment);

// [Note: recorded runs] What one rank of a run computes, as digests in a file of its own. It hears of calls by the
// hooks around them, on the rank that runs the module; tensors that lie elsewhere are their owner's to record. A step
// is a call of a step function or, outside of these, a pass of the model with a backward. What an update and the script
// between two steps have made of the model is recorded where the next step begins. Thread-safe.
class RunRecorder : public model::CallHook {
 public:
  // Throws base::Error where the folder cannot be written to.
  RunRecorder(Terms terms, digests::RankRecording about);
  ~RunRecorder() override;

  // True where as many steps have ended as are wanted.
  bool is_over() const { return steps_ >= terms_.steps; }
  std::int64_t steps() const { return steps_; }
  // True where the script's layout was taken away: places that it gives modules do not count.
  bool is_collapsed() const { return terms_.collapsed; }

  // The microbatch whose body this thread runs from now on, where no ExecutionContext says so.
  void begin_microbatch(base::Microbatch microbatch) { microbatch_ = microbatch.value; }
  void end_step();

  // What a step function returned for a microbatch, of which these are the tensors.
  void see_result(base::Microbatch microbatch, std::span<const at::Tensor> tensors);
  // A tensor of the model, or the part of it that is here. Those that are no gradients belong to the step before.
  void see(digests::Kind kind, const std::string& name, const at::Tensor& tensor, const PartOf& part);

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
  };
  Call begun(const model::ModuleCall& call);
  void write(digests::Kind kind, const digests::CallName& call, std::int64_t index, std::int64_t order,
             const at::Tensor& tensor);

  const Terms terms_;
  std::atomic<std::int64_t> steps_ = 0;
  std::atomic<std::int64_t> microbatch_ = 0;
  std::mutex mutex_;
  digests::Writer writer_;
  std::int64_t order_ = 0;
  std::unordered_map<std::int64_t, Call> calls_;                           // of this step, by their numbers
  std::map<std::pair<std::int64_t, std::string>, std::int64_t> calls_of_;  // of a module in a microbatch, so far
};

}  // namespace lamina::verification
