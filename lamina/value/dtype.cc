// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/dtype.h"

#include <algorithm>
#include <array>
#include <utility>

namespace lamina::value {
namespace {

using layout::DType;

constexpr std::array<std::pair<at::ScalarType, DType>, 24> kDTypes{{{at::kBool, DType::kBool},
                                                                    {at::kByte, DType::kUInt8},
                                                                    {at::kChar, DType::kInt8},
                                                                    {at::kUInt16, DType::kUInt16},
                                                                    {at::kShort, DType::kInt16},
                                                                    {at::kUInt32, DType::kUInt32},
                                                                    {at::kInt, DType::kInt32},
                                                                    {at::kUInt64, DType::kUInt64},
                                                                    {at::kLong, DType::kInt64},
                                                                    {at::kFloat8_e4m3fn, DType::kFloat8E4M3Fn},
                                                                    {at::kFloat8_e5m2, DType::kFloat8E5M2},
                                                                    {at::kFloat8_e4m3fnuz, DType::kFloat8E4M3FnUz},
                                                                    {at::kFloat8_e5m2fnuz, DType::kFloat8E5M2FnUz},
                                                                    {at::kFloat8_e8m0fnu, DType::kFloat8E8M0FnU},
                                                                    {at::kHalf, DType::kFloat16},
                                                                    {at::kBFloat16, DType::kBFloat16},
                                                                    {at::kFloat, DType::kFloat32},
                                                                    {at::kDouble, DType::kFloat64},
                                                                    {at::kComplexHalf, DType::kComplex32},
                                                                    {at::kComplexFloat, DType::kComplex64},
                                                                    {at::kComplexDouble, DType::kComplex128},
                                                                    {at::kQInt8, DType::kQInt8},
                                                                    {at::kQUInt8, DType::kQUInt8},
                                                                    {at::kQInt32, DType::kQInt32}}};

}  // namespace

std::optional<DType> dtype_of(at::ScalarType type) {
  const auto* found = std::ranges::find(kDTypes, type, [](const auto& pair) { return pair.first; });
  return found == kDTypes.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace lamina::value
