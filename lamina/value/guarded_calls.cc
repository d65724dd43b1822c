// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/guarded_calls.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/value/guarded.h"
#include "lamina/value/guarded_joined.h"
#include "lamina/value/guarded_places.h"
#include "lamina/value/layer_operations.h"
#include "lamina/value/reference_tensor.h"
#include "lamina/value/wrapper_key.h"

namespace lamina::value {
namespace {

using Stack = torch::jit::Stack;

// Kinds of operations, by what they do with the elements of a slice.
enum class OperationKind {
  kParts,   // consists of other operations, which are judged
  kView,    // gives the same memory
  kEach,    // takes each element alone
  kJoins,   // puts them into a longer tensor
  kAcross,  // takes them together, or with those of other ranks
  kDraws,   // gives random numbers
};

// Memory of a slice's size, into which numbers are drawn before they are copied.
constexpr std::string_view kNewEmpty = "aten::new_empty";

bool begins_with(std::string_view name, std::string_view with) { return name.substr(0, with.size()) == with; }

template <std::size_t count>
bool is_among(const std::array<std::string_view, count>& all, std::string_view name) {
  return std::ranges::find(all, name) != all.end();
}

// Operations that torch does not mark as taking each element alone.
bool takes_each_alone(std::string_view name) {
  constexpr std::array<std::string_view, 16> kAll{
      "aten::clone",        "aten::_to_copy",   "aten::copy_",          "aten::copy",
      "aten::detach_",      "aten::zero_",      "aten::fill_",          "aten::set_",
      "aten::is_same_size", "aten::is_set_to",  "aten::is_pinned",      "aten::record_stream",
      "aten::_pin_memory",  "aten::lift_fresh", "aten::_reshape_alias", kNewEmpty};
  constexpr std::array<std::string_view, 7> kOthers{
      "aten::_fused_adam_",           "aten::_fused_adamw_", "aten::_fused_sgd_",
      "aten::_fused_adagrad_",        "aten::_copy_from",    "aten::_amp_foreach_non_finite_check_and_unscale_",
      "aten::_has_same_storage_numel"};
  constexpr std::array<std::string_view, 3> kOfLists{"aten::_foreach_norm", "aten::_foreach_max",
                                                     "aten::_foreach_powsum"};
  if (begins_with(name, "aten::_foreach_")) return !is_among(kOfLists, name);
  const bool is_collective = begins_with(name, "c10d::") || begins_with(name, "_c10d_functional::");
  return is_among(kAll, name) || is_among(kOthers, name) || (!begins_with(name, "aten::") && !is_collective);
}

bool joins(std::string_view name) { return name == "aten::cat" || name == "aten::stack"; }

bool gives_views(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.returns(), [](const c10::Argument& given) {
    return given.alias_info() != nullptr && !given.alias_info()->isWrite();
  });
}

OperationKind kind_of(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  if (begins_with(name, "aten::") && op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    return OperationKind::kParts;
  }
  if (joins(name)) return OperationKind::kJoins;
  if (gives_views(schema)) return OperationKind::kView;
  if (op.hasTag(at::Tag::data_dependent_output)) return OperationKind::kAcross;  // equal() is marked as pointwise, too
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return OperationKind::kDraws;
  return op.hasTag(at::Tag::pointwise) || takes_each_alone(name) ? OperationKind::kEach : OperationKind::kAcross;
}

std::string_view remedy(OperationKind kind, bool is_gradient) {
  if (kind == OperationKind::kDraws) {
    return "initialise it before the model is wrapped, or in lamina.gathered_parameters([parameter], write_back=True)";
  }
  if (is_gradient) {
    return "lamina.get_full_gradient(parameter) is the whole; model.grad_norm(), model.clip_grad_norm_() and torch's "
           "clip_grad_norm_() know all slices, and the gradients of copies are averaged in the backward";
  }
  return "lamina.get_full_parameter(parameter) is the whole, lamina.gathered_parameters([parameter]) has it around "
         "what reads it, and with write_back=True what writes it";
}

[[noreturn]] void refuse(const at::Tensor& slice, const std::string& operation, OperationKind kind,
                         const std::string& torchs = "") {
  throw base::UsageError(
      base::str(why_guarded(slice), "; it is no whole weight outside of its layer's forward: ",
                remedy(kind, is_gradient_of_slice(slice)), " (", operation, torchs.empty() ? "" : ": ", torchs, ")"),
      base::Code{"tp-away"});
}

template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor(), 0);
  } else if (value.isTensorList()) {
    std::size_t place = 0;
    for (const at::Tensor& each : value.toTensorVector()) visit(each, place++);
  }
}

// True where tensors that are computed with one another, element by element, are cut along the same dimension.
bool are_cut_alike(const c10::OperatorHandle& op, const Stack& stack, const at::Tensor& slice) {
  const auto from_last = [](const at::Tensor& each) { return where_cut(each).dim - each.dim(); };
  return std::ranges::all_of(torch::jit::last(stack, op.schema().arguments().size()), [&](const c10::IValue& value) {
    if (!value.isTensor() || !is_guarded(value.toTensor())) return true;
    const auto& other = value.toTensor();
    return where_cut(other).dim < 0 || where_cut(slice).dim < 0 || from_last(other) == from_last(slice);
  });
}

// The slices that stand at each place of an operation's lists; none where it gives no list of what it computes.
std::vector<at::Tensor> slices_in_lists(const c10::OperatorHandle& op, const Stack& stack) {
  std::vector<at::Tensor> slices;
  if (!begins_with(op.schema().name(), "aten::_foreach_") || op.schema().returns().empty()) return slices;
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (!value.isTensorList()) continue;
    for_each_tensor(value, [&](const at::Tensor& each, std::size_t place) {
      slices.resize(std::max(slices.size(), place + 1));
      if (is_guarded(each)) slices[place] = each;
    });
  }
  return slices;
}

// Arguments of an operation by which its results are guarded.
struct Taken {
  at::Tensor slice;                  // one of them
  std::vector<PlacesAlong> places;   // of the slice, by result of a view
  std::vector<at::Tensor> in_lists;  // by result of one over lists
  std::vector<at::Tensor> joined;    // the parts of a result
  std::int64_t along = 0;            // and their dimension
};

Taken taken_by(const c10::OperatorHandle& op, OperationKind kind, const Stack& stack, const at::Tensor& slice) {
  Taken taken{slice};
  if (kind == OperationKind::kView) taken.places = places_of(op, stack, slice);
  if (kind == OperationKind::kEach) taken.in_lists = slices_in_lists(op, stack);
  if (kind == OperationKind::kJoins) {
    taken.joined = argument(op.schema(), stack, "tensors")->toTensorVector();
    taken.along = number(argument(op.schema(), stack, "dim"), 0);
  }
  return taken;
}

// Guards one result, which is at that place of a list.
void guard_result(const c10::OperatorHandle& op, const Taken& taken, const at::Tensor& made, std::size_t place,
                  bool all) {
  const auto& schema = op.schema();
  const bool is_plain = made.has_storage() && !made.key_set().has(c10::DispatchKey::Python);
  const auto& of = taken.in_lists.empty() ? taken.slice : taken.in_lists.at(place);
  if (!is_plain || !of.defined() || (schema.name() == kNewEmpty && made.numel() != of.numel())) return;
  if (!all && !made.key_set().has(kWrapperKey)) return;
  if (gives_views(schema)) {
    const bool is_joined = where_cut(of).dim == WhereCut::kJoined && place < taken.places.size();
    return is_joined ? guard_parts(made, of, taken.places[place]) : guard_view(made, of);
  }
  if (is_slice(made)) return;
  if (taken.joined.empty()) return guard_like(made, of);
  guard_joined(made, taken.joined, taken.along, /*stacks=*/schema.name() == "aten::stack");
}

// Guards what an operation gave: all, or views, which have the key of what they are of.
void guard_results(const c10::OperatorHandle& op, const Stack& stack, const Taken& taken, bool all) {
  for (const auto& result : torch::jit::last(stack, op.schema().returns().size())) {
    for_each_tensor(result,
                    [&](const at::Tensor& made, std::size_t place) { guard_result(op, taken, made, place, all); });
  }
}

void call_as_it_is(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard as_it_is(kWrapperKey);
  op.callBoxed(stack);
}

bool is_right_for_slices(const c10::OperatorHandle& op, OperationKind kind, const Stack& stack, const Taken& taken) {
  if (kind == OperationKind::kView) return is_updating() || has_places_of_whole(op, taken.places, taken.slice);
  return kind == OperationKind::kJoins || (kind == OperationKind::kEach && are_cut_alike(op, stack, taken.slice));
}

// A backward has what layers have saved.
bool is_judged() {
  if (Unguarded::here()) return false;
  return Judged::here() || torch::autograd::get_current_graph_task_id() < 0;
}

// Transforms of torch.func take an operation first, and do it for what is in their wrappers, where it is judged.
bool is_transformed(c10::DispatchKeySet keys) {
  return keys.has_any(c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
}

}  // namespace

void call_guarded(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, const at::Tensor& given) {
  const at::Tensor slice = given;  // which the stack may let go
  if (!is_judged()) {
    const bool is_joined = where_cut(slice).dim == WhereCut::kJoined && gives_views(op.schema());
    const auto taken = is_joined ? taken_by(op, OperationKind::kView, *stack, slice) : Taken{slice};
    call_as_it_is(op, stack);
    return guard_results(op, *stack, taken, /*all=*/false);
  }
  if (!is_updating() && call_layer(op, stack)) return;
  const auto kind = kind_of(op);
  if (kind == OperationKind::kParts || is_transformed(keys)) {
    return op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kWrapperKey), stack);
  }
  std::string torchs;
  const auto taken = taken_by(op, kind, *stack, slice);
  if (is_right_for_slices(op, kind, *stack, taken)) {
    try {
      call_as_it_is(op, stack);
      return guard_results(op, *stack, taken, /*all=*/!is_updating());
    } catch (const c10::Error& error) {
      torchs = error.what_without_backtrace();
    }
  }
  for_user([&] { refuse(slice, op.schema().name(), kind, torchs); });
}

void require_whole(const at::Tensor& tensor, const std::string& operation) {
  if (is_guarded(tensor) && !Unguarded::here() && !is_updating()) refuse(tensor, operation, OperationKind::kAcross);
}

}  // namespace lamina::value
