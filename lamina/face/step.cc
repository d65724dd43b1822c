// SPDX-License-Identifier: Apache-2.0
#include "lamina/face/step.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina {
namespace {

at::Tensor piece(const at::Tensor& tensor, base::Microbatch microbatch, int microbatches, std::int64_t axis,
                 int place) {
  if (!tensor.defined() || tensor.dim() == 0) return tensor;
  const auto argument = base::str("argument ", place, " of shape ", tensor.sizes());
  if (axis < -tensor.dim() || axis >= tensor.dim()) {
    throw base::UsageError(base::str(argument, " has no axis ", axis, " to split it along"));
  }
  const auto size = tensor.size(axis);
  if (size % microbatches != 0) {
    throw base::UsageError(base::str(argument, " cannot be split into ", microbatches, " microbatches: its size ", size,
                                     " along axis ", axis, " is not a multiple of ", microbatches,
                                     ". Change the batch size or `microbatches`, or pass lamina::whole(argument)"));
  }
  const auto length = size / microbatches;
  const auto part = tensor.narrow(axis, microbatch.value * length, length);
  // A body may write its piece. Views count the writes to all of the batch together, and autograd would take those of
  // other microbatches for a write to this one.
  return tensor.requires_grad() ? part : part.variable_data();
}

}  // namespace

Value face::split(const Value& argument, base::Microbatch microbatch, int microbatches, std::int64_t axis, int place) {
  Value part = argument;
  value::for_each_tensor(part,
                         [&](at::Tensor& tensor) { tensor = piece(tensor, microbatch, microbatches, axis, place); });
  return part;
}

Value face::detached(Value output) {
  value::for_each_tensor(output, [](at::Tensor& tensor) {
    if (tensor.defined()) tensor = tensor.detach();
  });
  return output;
}

base::Call face::step_call(const std::string& name, const CallSite& site) {
  const auto made = base::str(site.file_name(), ":", site.line());
  return {name.empty() ? base::str("made at ", made) : name, name.empty() ? "" : made, ""};
}

at::Tensor StepOutput::reduce_mean() const {
  auto stacked = stack();
  if (!stacked.is_floating_point() && !stacked.is_complex()) {
    stacked = stacked.to(c10::typeMetaToScalarType(c10::get_default_dtype()));
  }
  return stacked.mean(0);
}
at::Tensor StepOutput::reduce_sum() const { return stack().sum(0); }
at::Tensor StepOutput::concat() const { return outputs.front().dim() == 0 ? stack() : at::cat(outputs, 0); }
at::Tensor StepOutput::stack() const { return at::stack(outputs, 0); }

}  // namespace lamina
