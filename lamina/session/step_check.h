// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lamina/session/plain_values.h"
#include "lamina/session/session.h"
#include "lamina/verification/call_gradients.h"
#include "lamina/verification/plain_run.h"

namespace lamina::session {

// [Note: step check] With `verify_steps` each copy of the model is called plainly, too, in so many first steps. The
// rank that leads it, the first of a team, does so for the first microbatch, with the same arguments, values and random
// numbers. Without `prescaled_batch` a rank of a team has a copy of its own in this. The step itself is recorded by all
// ranks of the copy. At its end, before the script can update anything, the two are compared module by module and
// parameter by parameter. World rank 0 calls the model of the first step before it is cut, with values that no cut has
// touched. All others, and it in later steps, get those of all owners as they are.

// A model called as if it were not cut, which a face lends to the check of a step. Afterwards all but what it returned
// is as before. Both say why they failed; "" where they did not.
class PlainModel {
 public:
  virtual ~PlainModel() = default;
  // Calls the model. `values`: of what is not here; none before anything is cut.
  virtual std::string run_forward(const std::shared_ptr<verification::PlainRun>& run,
                                  const std::optional<PlainValues>& values) = 0;
  // Runs its backward, from gradients of what it returned, by their numbers.
  virtual std::string run_backward(const std::map<std::int64_t, at::Tensor>& gradients) = 0;
};

// The first call of the model in a step, which is made plainly, too.
struct PlainCall {
  std::shared_ptr<PlainModel> model;
  std::vector<std::string> modules;  // their names, by number
  std::vector<at::Tensor> given;     // to the call
  std::vector<verification::CallGradients::Named> parameters;
  std::set<std::string> hooked;  // names of parameters that have their hooks here
};

// The check of the first steps, on one rank. A face tells it of each step, in this order: look_for_room(),
// take_values() or take_first_values(), run_plainly() where the rank leads(), begin_step(), what the bodies do,
// run_backward(), end_step(). After the last step it is_over(): nothing is left of it then.
class StepCheck {
 public:
  // Gives none where no step is compared, as in a run of `lamina verify`. Where the layout takes no model apart, a line
  // says so.
  static std::unique_ptr<StepCheck> of_job(Session& session);
  explicit StepCheck(Session& session);

  bool is_over() const { return left_ == 0; }
  // True where this rank calls the plain model.
  bool leads() const;
  // True in a thread that works for the microbatch that is compared.
  bool sees_calls() const;

  // Gives up where the whole model has no room, beside the job, on some rank that leads. Collective over the world in
  // the first step.
  void look_for_room(std::span<const CheckedTensor> tensors);
  // Brings values to the ranks that lead, before the model is cut or afterwards; collective: see values_of_first() and
  // values_of_owners().
  void take_first_values(std::span<const CheckedTensor> tensors);
  void take_values(OwnValues own);
  // On a rank that leads: calls the model as the body of the step does. Without a call, or where that fails, nothing
  // of the step is compared, and a line says why.
  void run_plainly(const std::optional<PlainCall>& call);
  // Says, once, why the step is not compared.
  void leave_out(const std::string& why) { tell_once("nothing is", why); }
  // From now on calls, and gradients of these parameters of this rank, are recorded.
  void begin_step(std::span<const CheckedTensor> parameters);
  // The call that run_plainly() had has returned these to its body.
  void see_outputs(std::span<const at::Tensor> outputs);
  // A body begins a backward of these.
  void see_backward(std::span<const at::Tensor> tensors);
  // The bodies are done: on a rank that leads the plain backward runs, with the gradients of the step. `unknown`: why
  // these are not known, where see_backward() did not hear of all backwards; else empty.
  void run_backward(std::string unknown = "");
  // Compares; collective over the world. Throws base::UsageError on all ranks where the step is not the plain model's.
  void end_step();

 private:
  struct Plain {
    std::shared_ptr<PlainModel> model;
    std::shared_ptr<verification::PlainRun> run;
  };

  bool takes_batch() const;
  void forget();
  void end();
  void compare(const verification::PlainRun* plain);
  void tell_once(const std::string& what, const std::string& why);

  Session& session_;
  int left_;
  std::optional<bool> has_room_;  // not known before the first step
  std::set<std::string> told_;
  // The rest is of one step:
  std::optional<PlainValues> values_;
  std::optional<Plain> plain_;
  std::unique_ptr<verification::CallGradients> gradients_;
  std::map<std::string, layout::Slicing> slicings_;  // of parameters whose gradients are recorded
};

}  // namespace lamina::session
