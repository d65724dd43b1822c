// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "lamina/config/config.h"

namespace lamina::model {

// torch's name of a type of the configuration; none where each tensor keeps its own.
inline std::optional<at::ScalarType> scalar_type(std::optional<config::FloatType> type) {
  switch (type.value_or(config::FloatType::kOwn)) {
    case config::FloatType::kFp32:
      return at::kFloat;
    case config::FloatType::kFp16:
      return at::kHalf;
    case config::FloatType::kBf16:
      return at::kBFloat16;
    case config::FloatType::kOwn:
      break;
  }
  return {};
}

struct FloatTypes {
  std::optional<at::ScalarType> parameters, buffers;  // none: each keeps its own
};

// The types that the configuration gives a model's tensors of floating-point numbers.
inline FloatTypes float_types(const config::Config& config) {
  using Type = std::optional<at::ScalarType>;
  const auto half = config.bf16 ? Type(at::kBFloat16) : config.fp16 || config.fp16_params ? Type(at::kHalf) : Type();
  return {half, config.buffer_dtype ? scalar_type(config.buffer_dtype) : half};
}

}  // namespace lamina::model
