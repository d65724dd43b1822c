// SPDX-License-Identifier: Apache-2.0
// Operations on tensors whose value is not here, or not all of it: see [Note: reference tensors], [Note: released
// tensors], [Note: values that are away] and [Note: guarded slices].
// This is the only file that registers anything for the wrapper key.
#include "lamina/value/wrapper_key.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/detach.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "lamina/value/away.h"
#include "lamina/value/gradient_sums.h"
#include "lamina/value/guarded.h"
#include "lamina/value/guarded_calls.h"
#include "lamina/value/reference_impl.h"
#include "lamina/value/released.h"

namespace lamina::value {
namespace {

// Every tensor in an argument, however deep.
template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_each_tensor(item, visit);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) for_each_tensor(item, visit);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      for_each_tensor(entry.key(), visit);
      for_each_tensor(entry.value(), visit);
    }
  }
}

// Operations that look at a tensor's shape and type alone. Random numbers for a slice, and memory for them, are not
// those of the whole.
bool reads_no_value(std::string_view operation, const at::Tensor& tensor) {
  constexpr std::array<std::string_view, 10> kAll{
      "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros",
      "aten::new_ones",   "aten::new_full",   "aten::new_empty", "aten::rand_like", "aten::randn_like"};
  const auto end = kAll.end() - (is_guarded(tensor) ? 3 : 0);
  return (is_away(tensor) || is_guarded(tensor)) && std::find(kAll.begin(), end, operation) != end;
}

void read_arguments(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  if (arguments.front().isTensor() && reads_no_value(schema.name(), arguments.front().toTensor())) {
    const c10::impl::ExcludeDispatchKeyGuard as_it_is(kWrapperKey);
    return op.callBoxed(stack);
  }
  for_user([&] {
    for (const auto& argument : arguments) {
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        require_value(tensor, schema.name());
        bring(tensor, schema.name());
      });
    }
    for (const auto& argument : arguments) for_each_tensor(argument, materialise);
  });
  at::Tensor slice;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!slice.defined() && is_guarded(tensor)) slice = tensor;
    });
  }
  if (slice.defined()) return call_guarded(op, keys, stack, slice);
  op.callBoxed(stack);
}

at::Tensor detach(const at::Tensor& self) {
  for_user([&] {
    require_value(self, "aten::detach");
    bring(self, "aten::detach");
  });
  if (is_guarded(self)) {
    const c10::impl::ExcludeDispatchKeyGuard as_it_is(kWrapperKey);
    return at::detach(self);
  }
  const auto* reference = pending_impl(self);
  // A mode has a right to see it. And torch makes a normal tensor of a normal one in inference mode too, where a new
  // reference would be an inference tensor.
  const bool usual = self.is_inference() == c10::InferenceMode::is_enabled() && !c10::impl::dispatch_mode_enabled();
  if (reference && usual) {
    if (auto shared = reference->alias(); shared.defined()) return shared;
  }
  for_user([&] { materialise(self); });
  return at::detach(self);
}

bool is_gradient(const at::Tensor& tensor) {
  const auto* reference = pending_impl(tensor);
  return reference && reference->expected_strides() == Strides::kAsTheyArrive;
}

WaitsAlike waits_alike = nullptr;

// True where a sum need not wait for a gradient yet: see [Note: gradient sums].
bool may_wait_later(const at::Tensor& a, const at::Tensor& b) {
  return is_gradient(a) || (is_gradient(b) && (waits_alike == nullptr || !waits_alike()));
}

// The engine adding the gradients of one tensor that is used twice. Anyone else who adds wants the number.
bool adds_gradients(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  return may_wait_later(a, b) && torch::autograd::get_current_graph_task_id() >= 0 && !c10::GradMode::is_enabled() &&
         alpha.equal(1) && a.sizes() == b.sizes() && a.dtype() == b.dtype() && a.device() == b.device() &&
         is_plain(a) && is_plain(b);
}

// The part of `tensor` that a sum keeps. Not the memory of a gradient that is here: the engine may give it to a leaf as
// .grad, to be added to in place, or to the user.
at::Tensor part(const at::Tensor& tensor) { return is_pending(tensor) ? tensor : at::clone(tensor); }

std::shared_ptr<Sum> sum_of(const at::Tensor& tensor) { return std::dynamic_pointer_cast<Sum>(source_of(tensor)); }

// (a + b) + c is the sum of a, b, c, added in this order; so is c + (a + b), to the last bit.
std::shared_ptr<Sum> summed(const at::Tensor& a, const at::Tensor& b) {
  const auto left = sum_of(a);
  const auto right = left ? nullptr : sum_of(b);
  std::vector<at::Tensor> parts;
  if (left) parts = left->parts();
  if (right) parts = right->parts();
  if (!left && !right) parts = {part(a)};
  parts.push_back(part(right ? a : b));
  return std::make_shared<Sum>(std::move(parts));
}

at::Tensor add_slices(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other,
                      const at::Scalar& alpha) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::add", "Tensor");
  torch::jit::Stack stack{self, other, alpha};
  call_guarded(op, keys, &stack, is_guarded(self) ? self : other);
  return stack.front().toTensor();
}

at::Tensor add(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  for_user([&] {
    require_value(self, "aten::add");
    require_value(other, "aten::add");
    bring(self, "aten::add");
    bring(other, "aten::add");
  });
  if (adds_gradients(self, other, alpha)) {
    return make_reference(spec_of(self), summed(self, other), Strides::kAsTheyArrive);
  }
  for_user([&] {
    materialise(self);
    materialise(other);
  });
  if (is_guarded(self) || is_guarded(other)) return add_slices(keys, self, other, alpha);
  return at::add(self, other, alpha);
}

// The slice of a layer's own, for that.
at::Tensor own(const at::Tensor& slice) {
  for_user([&] {
    require_value(slice, "lamina::tp_own");
    bring(slice, "lamina::tp_own");
    materialise(slice);
  });
  return unguarded(slice);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  static_assert(kWrapperKey == c10::DispatchKey::TESTING_ONLY_GenericWrapper);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&read_arguments>());
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, library) {
  library.impl("detach", &detach);
  library.impl("add.Tensor", &add);
}

TORCH_LIBRARY_IMPL(lamina, TESTING_ONLY_GenericWrapper, library) { library.impl("tp_own", &own); }

}  // namespace

void set_waits_alike(WaitsAlike waits) { waits_alike = waits; }

}  // namespace lamina::value
