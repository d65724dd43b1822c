// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string_view>

#include "lamina/archive/budget.h"
#include "lamina/foreign/pickle.h"
#include "lamina/layout/dtype.h"
#include "lamina/layout/region.h"

// Names and shapes of torch's in pickles.
namespace lamina::foreign {

// "torch.bfloat16"
inline std::optional<layout::DType> dtype_of(std::string_view global) {
  constexpr std::string_view kPrefix = "torch.";
  if (!global.starts_with(kPrefix)) return std::nullopt;
  for (int i = 0; i <= static_cast<int>(layout::DType::kComplex128); ++i) {
    const auto dtype = static_cast<layout::DType>(i);
    if (traits(dtype).name == global.substr(kPrefix.size())) return dtype;
  }
  return std::nullopt;
}

// "torch.HalfStorage"
inline std::optional<layout::DType> dtype_of_storage(std::string_view global) {
  using layout::DType;
  constexpr std::pair<std::string_view, DType> kStorages[] = {{"torch.DoubleStorage", DType::kFloat64},
                                                              {"torch.FloatStorage", DType::kFloat32},
                                                              {"torch.HalfStorage", DType::kFloat16},
                                                              {"torch.BFloat16Storage", DType::kBFloat16},
                                                              {"torch.LongStorage", DType::kInt64},
                                                              {"torch.IntStorage", DType::kInt32},
                                                              {"torch.ShortStorage", DType::kInt16},
                                                              {"torch.CharStorage", DType::kInt8},
                                                              {"torch.ByteStorage", DType::kUInt8},
                                                              {"torch.BoolStorage", DType::kBool},
                                                              {"torch.ComplexFloatStorage", DType::kComplex64},
                                                              {"torch.ComplexDoubleStorage", DType::kComplex128}};
  for (const auto& [name, dtype] : kStorages) {
    if (name == global) return dtype;
  }
  return std::nullopt;
}

// A tuple of sizes, or a torch.Size.
inline std::optional<layout::Shape> shape_of(const PickleValue& value) {
  const auto* sizes = &value;
  if (value.is_object("torch.Size")) sizes = value.argument(0);
  if (sizes == nullptr || !sizes->is(PickleValue::Type::kTuple) || sizes->items.size() > archive::kMostDimensions)
    return std::nullopt;
  layout::Shape shape;
  for (const auto* size : sizes->items) {
    if (!size->is(PickleValue::Type::kInteger) || size->integer < 0) return std::nullopt;
    shape.push_back(size->integer);
  }
  return shape;
}

}  // namespace lamina::foreign
