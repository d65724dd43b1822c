// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/step_check.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/memory.h"
#include "lamina/digests/comparison.h"
#include "lamina/environment/memory.h"
#include "lamina/messaging/agreement.h"
#include "lamina/session/slicing.h"
#include "lamina/tensor_parallel/slices.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::session {
namespace {

using digests::RankRecording;

std::map<std::string, int> calls_of_modules(const RankRecording& rank) {
  std::map<std::string, int> calls;
  for (const auto& [call, surroundings] : rank.calls) ++calls[std::get<2>(call)];
  return calls;
}

// True where a module was called more often than in the plain model, as where the step calls the model twice: then
// gradients of parameters are not those of one call.
bool has_other_calls(const std::vector<RankRecording>& ranks, const RankRecording& plain) {
  const auto known = calls_of_modules(plain);
  return std::ranges::any_of(ranks, [&](const auto& rank) {
    return std::ranges::any_of(calls_of_modules(rank), [&](const auto& module) {
      const auto plainly = known.find(module.first);
      return plainly == known.end() || module.second > plainly->second;
    });
  });
}

// Leaves out what has no like in a layout. A part that a checkpoint runs again in the backward is a call as any other
// where it runs for another rank.
void leave_out_unlike(RankRecording& plain, const std::vector<RankRecording>& ranks) {
  const bool has_others = has_other_calls(ranks, plain);
  std::erase_if(plain.seen, [&](const auto& seen) {
    return seen.kind == digests::RecordedKind::kGradient ? has_others : seen.call < 0;
  });
}

// The bytes of a model by where its tensors lie.
struct ModelBytes {
  std::int64_t on_host = 0, on_device = 0;
  std::int64_t all() const { return on_host + on_device; }
};

// True where the ranks that lead copies have memory for such a model, and what it computes, beside the job.
bool has_room(Session& session, const ModelBytes& bytes) {
  constexpr std::int64_t kParts = 3;  // values, gradients, and what lies between layers
  const auto leading = std::max(1, session.world().local_size / session.topology().size(topology::kPartitions));
  const auto on_host = environment::available_memory();
  const auto on_device = bytes.on_device > 0 ? devices::free_memory() : std::nullopt;
  const bool lacks =
      (on_host && *on_host / kParts / leading < bytes.on_host) || (on_device && *on_device / kParts < bytes.on_device);
  return messaging::largest(session.mailbox(), session.members(topology::Group::kWorld), {lacks ? 1.0 : 0.0},
                            session.patience())
             .front() == 0;
}

std::string with_thousands(std::int64_t number) {
  auto text = base::str(number);
  for (auto place = std::ssize(text) - 3; place > 0; place -= 3) text.insert(static_cast<std::size_t>(place), ",");
  return text;
}

}  // namespace

std::unique_ptr<StepCheck> StepCheck::of_job(Session& session) {
  const auto& recorder = session.run_recorder();
  if (session.config().verify_steps == 0 || (recorder != nullptr && recorder->writes())) return nullptr;
  if (recorder != nullptr) return std::make_unique<StepCheck>(session);
  if (session.world().rank == base::Rank(0)) {
    base::log_info(
        "verify_steps: nothing is compared, for the layout takes no model apart, over partitions, slices or shards");
  }
  return nullptr;
}

StepCheck::StepCheck(Session& session) : session_(session), left_(session.config().verify_steps) {}

bool StepCheck::leads() const { return session_.job().leads() && takes_batch(); }

// True where no other rank of the TP_GROUP calls the plain model with the same batch.
bool StepCheck::takes_batch() const {
  const auto place = session_.topology().index(topology::Group::kTp, session_.world().rank);
  return place == 0 || !session_.config().prescaled_batch;
}

bool StepCheck::sees_calls() const { return session_.run_recorder()->microbatch() == 0; }

void StepCheck::look_for_room(std::span<const CheckedTensor> tensors) {
  if (has_room_) return;
  ModelBytes bytes;
  for (const auto& [name, tensor, slicing] : tensors) {
    if (tensor.is_meta()) continue;
    const auto shape = slicing ? tensor_parallel::whole_shape(tensor, *slicing) : tensor.sizes().vec();
    auto& place = devices::is_host(tensor) ? bytes.on_host : bytes.on_device;
    place += c10::multiply_integers(shape) * static_cast<std::int64_t>(tensor.element_size());
  }
  has_room_ = has_room(session_, bytes);
  if (*has_room_) return;
  if (session_.job().leads()) {
    leave_out(
        base::str("there is no room for the plain model of ", with_thousands(bytes.all()), " bytes and its gradients"));
  }
  end();
}

void StepCheck::take_first_values(std::span<const CheckedTensor> tensors) {
  forget();
  values_ = values_of_first(session_, tensors);
}

void StepCheck::take_values(OwnValues own) {
  forget();
  values_ = values_of_owners(session_, std::move(own), takes_batch());
}

void StepCheck::run_plainly(const std::optional<PlainCall>& call) {
  const auto values = std::exchange(values_, std::nullopt);
  if (!call) return leave_out("the step calls no model, or a part of it before the model");
  gradients_ = std::make_unique<verification::CallGradients>(call->parameters, call->given);
  const auto copy = session_.topology().index(topology::kReplicas, session_.world().rank);
  const auto run = std::make_shared<verification::PlainRun>(call->modules, copy, session_.run_recorder()->steps());
  if (values) {
    auto hooked_elsewhere = values->hooked;
    for (const auto& name : call->hooked) hooked_elsewhere.erase(name);
    run->leave_out(std::move(hooked_elsewhere));
  }
  const auto failed = call->model->run_forward(run, values);
  if (!failed.empty()) return leave_out("the plain model could not be run: " + failed);
  plain_ = Plain{call->model, run};
}

void StepCheck::begin_step(std::span<const CheckedTensor> parameters) {
  std::vector<verification::ParameterGradients::Named> named;
  for (const auto& [name, tensor, slicing] : parameters) {
    named.emplace_back(name, tensor);
    if (slicing) slicings_.emplace(name, *slicing);
  }
  session_.run_recorder()->begin_step_of(named);
}

void StepCheck::see_outputs(std::span<const at::Tensor> outputs) {
  if (gradients_ != nullptr) gradients_->see_outputs(outputs);
}

void StepCheck::see_backward(std::span<const at::Tensor> tensors) {
  if (gradients_ != nullptr && sees_calls()) gradients_->see_backward(tensors);
}

void StepCheck::run_backward(std::string unknown) {
  if (!plain_) return;
  auto& [model, run] = *plain_;
  run->leave_out(gradients_->used_beside());
  auto why = std::move(unknown);
  const auto found = gradients_->gradients(session_.run_recorder()->gradients_of_model());
  if (why.empty() && !found) why = "the step uses a result, and what the model made of it";
  if (why.empty()) {
    why = model->run_backward(*found);
    if (!why.empty()) why = "the plain backward failed: " + why;
  }
  if (!why.empty()) {
    tell_once("gradients are not", why);
    run->forget_gradients();
  }
  run->end();
}

void StepCheck::end_step() {
  const auto plain = std::exchange(plain_, std::nullopt);
  --left_;
  const auto over = c10::make_scope_exit([&] {
    forget();
    if (is_over()) end();
  });
  messaging::act_together(
      session_.mailbox(), session_.ranks().everyone(), [&] { compare(plain ? plain->run.get() : nullptr); },
      session_.patience());
}

void StepCheck::compare(const verification::PlainRun* plain) {
  auto& recorder = *session_.run_recorder();
  recorder.end_step_of([&](const std::string& name, const at::Tensor& gradient) {
    const auto slicing = slicings_.find(name);
    return slicing == slicings_.end() ? gradient : whole_of(session_, gradient, slicing->second);
  });
  std::vector<model::NamedValue> own;
  own.emplace_back("recording", recorder.text());
  const bool have_one_batch = session_.topology().resolved(topology::kReplicas) == topology::kSameParts;
  const auto group = have_one_batch ? topology::kOneCopy : topology::kPartitions;
  const auto told = model::gather(std::move(own), /*to_first=*/true, session_.members(group), session_.mailbox(),
                                  session_.patience());
  if (plain == nullptr) return;
  std::vector<RankRecording> ranks;
  for (const auto& [what, text] : told) ranks.push_back(digests::read_text(text.as<std::string>()));
  auto recording = plain->recording();
  leave_out_unlike(recording, ranks);
  const auto comparison = digests::compare(ranks, {recording}, {});
  if (comparison.differences.empty()) return;
  throw base::UsageError(
      base::str("this step is not that of the plain model, and nothing was updated: ", digests::describe(comparison),
                "run the script by `lamina verify -n ", session_.world().size, "`, which compares more and says why"),
      base::Code{"step-differs"});
}

void StepCheck::forget() {
  plain_.reset();
  values_.reset();
  gradients_.reset();
  slicings_.clear();
}

// Calls of modules have no hooks of it any more, and what was recorded is gone.
void StepCheck::end() {
  left_ = 0;
  const auto& recorder = session_.run_recorder();
  session_.job().call_hooks().remove(recorder);
  recorder->let_go();
}

void StepCheck::tell_once(const std::string& what, const std::string& why) {
  auto line = base::str("verify_steps: ", what, " compared, for ", why);
  if (told_.insert(line).second) base::log_info(line);
}

}  // namespace lamina::session
