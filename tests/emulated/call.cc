// SPDX-License-Identifier: Apache-2.0
#include "tests/emulated/call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "tests/emulated/generator.h"
#include "tests/emulated/outlines.h"
#include "tests/emulated/stream.h"
#include "tests/emulated/tensors.h"

namespace emulated {
namespace {

using torch::jit::Stack;

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  changed(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

bool is_written(const c10::AliasInfo* alias) { return alias != nullptr && alias->isWrite(); }

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::ListType) {
    return holds_tensors(*type.castRaw<c10::ListType>()->getElementType());
  }
  return type.kind() == c10::TypeKind::TensorType;
}

c10::Device device_of(const Stack& arguments) {
  std::optional<c10::Device> found;
  for (const auto& value : arguments) {
    if (value.isDevice() && value.toDevice().type() == kType && !found) {
      found = value.toDevice();
    }
  }
  for (const auto& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        TORCH_CHECK(!found || found->index() < 0 || tensor.device() == *found || tensor.dim() == 0,
                    "emulated: tensors on ", *found, " and ", tensor.device(), " in one operation");
        found = found && found->index() >= 0 ? *found : tensor.device();
      }
    });
  }
  return {kType, static_cast<c10::DeviceIndex>(device_or_current(found ? found->index() : -1))};
}

// The kernel gets the CPU tensors among the arguments, which are numbers most of the time, as they are now.
at::Tensor kept(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

void copy_results(const std::vector<at::Tensor>& made, const std::vector<at::Tensor>& to,
                  const c10::OperatorName& name) {
  for (std::size_t i = 0; i < made.size(); ++i) {
    // Some kernels return nothing for results that the call does not use.
    if (made[i].defined() && made[i].numel() > 0 && to[i].defined()) {
      TORCH_CHECK(made[i].sizes() == to[i].sizes(), name, " made ", made[i].sizes(), " where its outline said ",
                  to[i].sizes());
      to[i].copy_(made[i]);
    }
  }
}

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !is_written(result.alias_info());
  });
}

bool returns_tensors(const c10::FunctionSchema& schema) {
  return std::all_of(schema.returns().begin(), schema.returns().end(),
                     [](const c10::Argument& result) { return holds_tensors(*result.type()); });
}

// Names operations whose meta kernels say other shapes than the CPU's kernels make.
constexpr const char* kMisdescribed[] = {"aten::_embedding_bag", "aten::_embedding_bag_forward_only"};

bool has_outline(const c10::FunctionSchema& schema) {
  return returns_tensors(schema) && std::ranges::find(kMisdescribed, schema.name()) == std::end(kMisdescribed);
}

// The argument that a result is, if it is one.
std::optional<std::size_t> returned_argument(const c10::FunctionSchema& schema, std::size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  for (std::size_t i = 0; alias != nullptr && i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && *other == *alias) {
      return i;
    }
  }
  return std::nullopt;
}

std::vector<at::Tensor> new_tensors(const c10::FunctionSchema& schema, const Stack& results) {
  std::vector<at::Tensor> tensors;
  for (std::size_t result = 0; result < results.size(); ++result) {
    if (!returned_argument(schema, result)) {
      for_each_tensor(results[result], [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    }
  }
  return tensors;
}

bool makes_tensors(const c10::FunctionSchema& schema) {
  for (std::size_t result = 0; result < schema.returns().size(); ++result) {
    if (!returned_argument(schema, result)) {
      return true;
    }
  }
  return false;
}

}  // namespace

Call::Call(const c10::OperatorHandle& operation, Stack arguments)
    : operation_(operation),
      schema_(operation.schema()),
      arguments_(std::move(arguments)),
      device_(device_of(arguments_)) {}

Stack Call::run() {
  check(device_.index());
  TORCH_CHECK_NOT_IMPLEMENTED(
      operation_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "emulated: no kernel for ",
      schema_.operator_name(),
      ": the CPU, whose kernels it takes, has none either. Those of its own are in tests/emulated/kernels.cc");
  if (is_view(schema_)) {  // says how to read memory; the CPU's kernel does not touch that
    auto stack = arguments_;
    operation_.callBoxedForDispatchKey(c10::DispatchKey::CPU, stack);
    return stack;
  }
  const c10::DeviceGuard guard(device_);
  if (!has_outline(schema_)) {
    return drain();
  }
  std::optional<Stack> outlined;
  try {
    outlined = outline_call(operation_, arguments_);
  } catch (const c10::NotImplementedError&) {
    if (!makes_tensors(schema_) && !has_empty_out()) {
      outlined.emplace();
    }
  } catch (const std::exception&) {  // the CPU's kernel, called now, says what is wrong with the arguments
  }
  return outlined ? enqueue_results(*outlined) : drain();
}

bool Call::is_out(std::size_t argument) const {
  const auto& declared = schema_.arguments()[argument];
  return declared.kwarg_only() && is_written(declared.alias_info()) && arguments_[argument].isTensor() &&
         is_ours(arguments_[argument].toTensor());
}

bool Call::has_empty_out() const {
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    if (is_out(i) && arguments_[i].toTensor().numel() == 0) {
      return true;
    }
  }
  return false;
}

void Call::resize_outs(const Stack& outlined) {
  for (std::size_t result = 0; result < outlined.size(); ++result) {
    const auto argument = returned_argument(schema_, result);
    if (argument && is_out(*argument)) {
      const auto& out = arguments_[*argument].toTensor();
      if (out.sizes() != outlined[result].toTensor().sizes()) {
        out.resize_(outlined[result].toTensor().sizes());
      }
    }
  }
}

Stack Call::twins(std::vector<Out>& outs) const {
  Stack stack;
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    const auto& value = arguments_[i];
    if (schema_.arguments()[i].name() == "generator") {
      const auto given = value.isGenerator() ? std::optional(value.toGenerator()) : std::nullopt;
      stack.emplace_back(kernel_generator(given, device_.index()));
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      stack.emplace_back(c10::Device(c10::kCPU));
    } else if (is_out(i)) {
      const auto& given = value.toTensor();
      stack.emplace_back(at::empty({0}, given.options().device(at::kCPU)));
      outs.push_back({i, given});
    } else {
      const bool written = is_written(schema_.arguments()[i].alias_info());
      stack.push_back(changed(value, [&](const at::Tensor& tensor) {
        TORCH_CHECK(!tensor.defined() || is_ours(tensor) || tensor.is_cpu(), "emulated: ", schema_.operator_name(),
                    " with a tensor on ", tensor.device());
        return is_ours(tensor) ? twin(tensor) : written ? tensor : kept(tensor);
      }));
    }
  }
  return stack;
}

Stack Call::results_for(const Stack& described) const {
  Stack results;
  for (std::size_t result = 0; result < schema_.returns().size(); ++result) {
    if (const auto argument = returned_argument(schema_, result)) {
      results.push_back(arguments_[*argument]);
    } else {
      results.push_back(
          changed(described[result], [this](const at::Tensor& tensor) { return empty_for(tensor, device_); }));
    }
  }
  return results;
}

Stack Call::enqueue_results(const Stack& outlined) {
  resize_outs(outlined);
  auto results = results_for(outlined);
  std::vector<at::Tensor> to;
  for (const auto& tensor : new_tensors(schema_, results)) {
    to.push_back(twin(tensor));
  }
  std::vector<Out> outs;
  const auto stack = twins(outs);
  for (auto& out : outs) {
    out.to = twin(out.to);
  }
  enqueue(current_stream(device_.index()), [operation = operation_, stack, outs, to] {
    auto made = stack;
    as_kernel([&] {
      operation.callBoxed(made);
      copy_results(new_tensors(operation.schema(), made), to, operation.schema().operator_name());
      for (const auto& out : outs) {
        copy_results({stack[out.argument].toTensor()}, {out.to}, operation.schema().operator_name());
      }
    });
  });
  count_enqueued();
  return results;
}

Stack Call::drain() {
  const auto stream = current_stream(device_.index());
  finish(stream);
  check(device_.index());
  count_drained(c10::toString(schema_.operator_name()));
  std::vector<Out> outs;
  const auto given = twins(outs);
  auto stack = given;
  as_kernel([&] { operation_.callBoxed(stack); });
  auto results = results_for(stack);
  auto made = new_tensors(schema_, stack);
  auto to = new_tensors(schema_, results);
  for (const auto& out : outs) {
    made.push_back(given[out.argument].toTensor());
    out.to.resize_(made.back().sizes());
    to.push_back(out.to);
  }
  for (auto& tensor : to) {
    tensor = twin(tensor);
  }
  // The new memory may have been freed just before: what becomes NaN there is in the stream, and so are the results.
  enqueue(stream, [made, to, name = schema_.operator_name()] { as_kernel([&] { copy_results(made, to, name); }); });
  return results;
}

namespace {

void fallback(const c10::OperatorHandle& operation, Stack* stack) {
  const auto count = operation.schema().arguments().size();
  const auto given = torch::jit::last(*stack, count);
  Call call(operation, Stack(given.begin(), given.end()));
  torch::jit::drop(*stack, count);
  for (auto& result : call.run()) {
    stack->push_back(std::move(result));
  }
}

// For operations that change or ask what a tensor is, not what its memory holds: the CPU's kernels never touch that.
void describe(const c10::OperatorHandle& operation, Stack* stack) {
  operation.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
}

constexpr const char* kDescribing[] = {"set_.source_Tensor", "set_.source_Storage",
                                       "set_.source_Storage_storage_offset", "is_set_to"};

// Names operations that accelerators have kernels of their own for: whoever asks for one finds it.
constexpr const char* kOwn[] = {"_fused_adam_",   "_fused_adam_.tensor_lr",  "_fused_adamw_",
                                "_fused_sgd_",    "_fused_adamw_.tensor_lr", "_fused_sgd_.tensor_lr",
                                "_fused_adagrad_"};

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const auto* name : kDescribing) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&describe>());
  }
  for (const auto* name : kOwn) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace
}  // namespace emulated
