// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/guarded_calls.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/value/guarded.h"
#include "lamina/value/reference_tensor.h"
#include "lamina/value/wrapper_key.h"

namespace lamina::value {
namespace {

// Kinds of operations, by what they do with the elements of a slice.
enum class OperationKind {
  kParts,   // consists of other operations, which are judged
  kView,    // gives the same memory
  kEach,    // takes each element alone
  kAcross,  // takes them together
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
  constexpr std::array<std::string_view, 17> kAll{"aten::clone",          "aten::_to_copy",  "aten::copy_",
                                                  "aten::copy",           "aten::cat",       "aten::stack",
                                                  "aten::zero_",          "aten::fill_",     "aten::set_",
                                                  "aten::is_same_size",   "aten::is_set_to", "aten::record_stream",
                                                  "aten::_pin_memory",    "aten::is_pinned", "aten::lift_fresh",
                                                  "aten::_reshape_alias", kNewEmpty};
  constexpr std::array<std::string_view, 5> kUpdates{"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_",
                                                     "aten::_fused_adagrad_", "aten::_copy_from"};
  constexpr std::array<std::string_view, 3> kOfLists{"aten::_foreach_norm", "aten::_foreach_max",
                                                     "aten::_foreach_powsum"};
  if (begins_with(name, "aten::_foreach_")) return !is_among(kOfLists, name);
  return is_among(kAll, name) || is_among(kUpdates, name) || !begins_with(name, "aten::");
}

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
  if (gives_views(schema)) return OperationKind::kView;
  if (op.hasTag(at::Tag::data_dependent_output)) return OperationKind::kAcross;  // equal() is marked as pointwise, too
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return OperationKind::kDraws;
  return op.hasTag(at::Tag::pointwise) || takes_each_alone(name) ? OperationKind::kEach : OperationKind::kAcross;
}

[[noreturn]] void refuse(const at::Tensor& slice, const std::string& operation, OperationKind kind,
                         const std::string& torchs = "") {
  const std::string_view remedy =
      kind == OperationKind::kDraws
          ? "initialise it before the model is wrapped, or in lamina.gathered_parameters([parameter], write_back=True)"
          : "lamina.get_full_parameter(parameter) is the whole, lamina.gathered_parameters([parameter]) has it around "
            "what reads it, and with write_back=True what writes it";
  throw base::UsageError(base::str(why_guarded(slice), "; it is no whole weight outside of its layer's forward: ",
                                   remedy, " (", operation, torchs.empty() ? "" : ": ", torchs, ")"),
                         base::Code{"tp-away"});
}

template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) visit(each);
  }
}

// Guards what an operation gave: all, or views, which have the key of what they are of.
void guard_results(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const at::Tensor& slice, bool all) {
  const bool is_memory = op.schema().name() == kNewEmpty;
  for (const auto& result : torch::jit::last(stack, op.schema().returns().size())) {
    for_each_tensor(result, [&](const at::Tensor& made) {
      const bool is_plain = made.has_storage() && !made.key_set().has(c10::DispatchKey::Python);
      if (!is_plain || is_slice(made) || (is_memory && made.numel() != slice.numel())) return;
      if (all || made.key_set().has(kWrapperKey)) guard_like(made, slice);
    });
  }
}

}  // namespace

void call_guarded(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
                  const at::Tensor& given) {
  const at::Tensor slice = given;  // which the stack may let go
  // A backward has what layers have saved.
  if (Unguarded::here() || torch::autograd::get_current_graph_task_id() >= 0) {
    const c10::impl::ExcludeDispatchKeyGuard as_it_is(kWrapperKey);
    op.callBoxed(stack);
    return guard_results(op, *stack, slice, /*all=*/false);
  }
  const auto kind = kind_of(op);
  if (kind == OperationKind::kParts) {
    return op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kWrapperKey), stack);
  }
  std::string torchs;
  if (kind == OperationKind::kView || kind == OperationKind::kEach) {
    try {
      const c10::impl::ExcludeDispatchKeyGuard as_it_is(kWrapperKey);
      op.callBoxed(stack);
      return guard_results(op, *stack, slice, kind == OperationKind::kView || !is_updating());
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
