// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/backwards.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/remote/graph.h"
#include "lamina/remote/thread_backwards.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/rng_streams.h"

namespace lamina::pipeline {
namespace {

thread_local int own_backwards = 0;  // that run in this thread

}  // namespace

bool Backwards::counts() const {
  const auto loss_scale = loss_scale_.lock();
  return counts_others_ || (loss_scale && loss_scale->is_on());
}

void Backwards::watch(std::span<const at::Tensor> parameters, bool forgets) {
  if (!counts()) return watch_.reset();
  if (!watch_) {
    watch_ = std::make_unique<model::GradientWatch>([plain = plain_](const at::Tensor&) {
      const auto* context = runtime::ExecutionContext::current();  // of a request: the body's thread tells of it
      if (own_backwards == 0 && (context == nullptr || context->leads())) ++*plain;
    });
  }
  watch_->watch(parameters);
  if (forgets && std::ranges::none_of(parameters, [](const auto& each) { return each.grad().defined(); })) {
    forget_plain();
  }
}

void Backwards::add_up() {
  averages_ = false;
  seen_ = true;
}

StepResult Backwards::run_step(StepSpec spec, const Parameters& parameters, const Run& run) {
  if (!job_.leads()) return run(std::move(spec));
  announced_ = false;
  step_ = {spec.microbatches, spec.samples, spec.tell_samples};
  if (alone_) {
    spec.body = [this, body = std::move(spec.body)](base::Microbatch microbatch) {
      step_.inline_body = microbatch;
      return body(microbatch);
    };
  }
  if (counts()) {
    spec.body = [plain = plain_, body = std::move(spec.body)](base::Microbatch microbatch) {
      const auto before = remote::thread_backwards();
      auto output = body(microbatch);
      *plain += std::exchange(remote::thread_backwards(), before) - before;
      return output;
    };
  }
  const bool looks = !seen_ && job_.microbatches() > 1;
  const auto before = looks ? look(job_, parameters) : Found();
  auto result = run(std::move(spec));
  if (!looks) return result;
  seen_ = announced_ || had_backward(job_, before, parameters);
  if (seen_ && !announced_) tell();
  return result;
}

void Backwards::run(const remote::Tensors& tensors, const remote::Tensors& gradients) {
  const bool inside = runtime::in_step();
  announced_ = true;
  ++count_;
  const double scale = inside ? scale_in_step() : loss_scale();
  ++own_backwards;
  const auto over = c10::make_scope_exit([before = remote::thread_backwards()] {
    remote::thread_backwards() = before;
    --own_backwards;
  });
  alone_ ? remote::run_backward(tensors, gradients, scale) : job_.backward(tensors, gradients, scale);
}

double Backwards::loss_scale() const {
  const auto scale = loss_scale_.lock();
  return scale ? scale->value() : 1;
}

double Backwards::scale_in_step() {
  if (!averages_) return loss_scale();
  if (!job_.leads()) return loss_scale() / job_.microbatches();  // of a module's own loss: its batch is known elsewhere
  if (!step_.copies) {
    const auto own = std::reduce(step_.samples.begin(), step_.samples.end(), std::int64_t{0});
    const auto told = step_.samples.empty() ? -1 : own;
    step_.copies = step_.tell_samples ? step_.tell_samples(told) : Copies{1, told};
  }
  const auto* context = runtime::ExecutionContext::current();
  const auto microbatch = context != nullptr ? context->microbatch() : step_.inline_body;
  return share(step_.samples, microbatch, step_.microbatches, *step_.copies, loss_scale());
}

Backwards::Found Backwards::look(const Job& job, const Parameters& parameters) {
  Found found{{}, job.backwards()};
  for (const auto& parameter : parameters()) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    const auto version = gradient.is_inference() ? 0 : gradient._version();
    found.gradients[parameter.unsafeGetTensorImpl()] = {gradient.unsafeGetTensorImpl(), version};
  }
  return found;
}

bool Backwards::had_backward(const Job& job, const Found& before, const Parameters& parameters) {
  const auto after = look(job, parameters);
  return after.elsewhere != before.elsewhere || std::ranges::any_of(after.gradients, [&](const auto& gradient) {
           const auto was = before.gradients.find(gradient.first);
           return was == before.gradients.end() || was->second != gradient.second;
         });
}

void Backwards::tell() const {
  base::log_warning(
      base::str("a step has called loss.backward(), which adds up the gradients of its ", job_.microbatches(),
                " microbatches: model.backward(loss) divides them by their number, as the plain loop over the batch "
                "has them. Call "
                "that, or make the model with average_grads_across_microbatches=False if the sum is wanted"));
}

}  // namespace lamina::pipeline
