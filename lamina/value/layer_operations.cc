// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/layer_operations.h"

#include <string>

#include "lamina/value/guarded.h"
#include "lamina/value/slice_layer.h"

namespace lamina::value {
namespace {

bool is_one(const c10::IValue& value) { return value.toScalar().equal(1); }

at::Tensor tensor_in(const c10::IValue& value) { return value.isNone() ? at::Tensor() : value.toTensor(); }

// The result of an operation that a layer makes; nothing for any other.
std::optional<at::Tensor> result_of(const std::string& name, c10::ArrayRef<c10::IValue> given) {
  const auto layer = [](const c10::IValue& slice) -> const SliceLayer* {
    return slice.isTensor() && is_guarded(slice.toTensor()) ? &layer_of(slice.toTensor()) : nullptr;
  };
  const auto linear = [&](const c10::IValue& weight, bool is_turned, const c10::IValue& input,
                          const at::Tensor& bias) -> std::optional<at::Tensor> {
    const auto* const of = layer(weight);
    if (of == nullptr || !of->linear || weight.toTensor().dim() != 2) return std::nullopt;
    return of->linear(is_turned ? weight.toTensor().t() : weight.toTensor(), input.toTensor(), bias);
  };
  if (name == "aten::linear") return linear(given[1], /*is_turned=*/false, given[0], tensor_in(given[2]));
  if (name == "aten::matmul") return linear(given[1], /*is_turned=*/true, given[0], {});
  if (name == "aten::addmm" && is_one(given[3]) && is_one(given[4])) {
    return linear(given[2], /*is_turned=*/true, given[1], given[0].toTensor());
  }
  if (name == "aten::embedding") {
    const auto* const of = layer(given[0]);
    return of != nullptr && of->embedding ? of->embedding(given[0].toTensor(), given[1].toTensor()) : std::nullopt;
  }
  if (name == "aten::add_" && !is_guarded(given[0].toTensor()) && is_one(given[2])) {
    const auto* const of = layer(given[1]);
    const auto addend = of != nullptr && of->addend ? of->addend(given[1].toTensor()) : std::nullopt;
    if (addend) return given[0].toTensor().add_(*addend);
  }
  return std::nullopt;
}

}  // namespace

bool call_layer(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (!schema.overload_name().empty() && schema.overload_name() != "Tensor") return false;
  auto result = result_of(schema.name(), torch::jit::last(*stack, schema.arguments().size()));
  if (!result) return false;
  torch::jit::drop(*stack, schema.arguments().size());
  torch::jit::push(*stack, std::move(*result));
  return true;
}

}  // namespace lamina::value
