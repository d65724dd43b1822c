// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace lamina::layout {

// The kinds of elements that parameters and buffers have, under torch's names; torch itself is not known here.
enum class DType : std::uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat8E4M3Fn,
  kFloat8E5M2,
  kFloat8E4M3FnUz,
  kFloat8E5M2FnUz,
  kFloat8E8M0FnU,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex32,
  kComplex64,
  kComplex128,
  kQInt8,
  kQUInt8,
  kQInt32,
};

struct DTypeTraits {
  std::string_view name;  // as torch's: "bfloat16"
  int size_bytes = 0;     // of one element
};

constexpr DTypeTraits traits(DType dtype) {
  constexpr std::array<DTypeTraits, 24> kAll{{{"bool", 1},
                                              {"uint8", 1},
                                              {"int8", 1},
                                              {"uint16", 2},
                                              {"int16", 2},
                                              {"uint32", 4},
                                              {"int32", 4},
                                              {"uint64", 8},
                                              {"int64", 8},
                                              {"float8_e4m3fn", 1},
                                              {"float8_e5m2", 1},
                                              {"float8_e4m3fnuz", 1},
                                              {"float8_e5m2fnuz", 1},
                                              {"float8_e8m0fnu", 1},
                                              {"float16", 2},
                                              {"bfloat16", 2},
                                              {"float32", 4},
                                              {"float64", 8},
                                              {"complex32", 4},
                                              {"complex64", 8},
                                              {"complex128", 16},
                                              {"qint8", 1},
                                              {"quint8", 1},
                                              {"qint32", 4}}};
  return kAll[static_cast<std::size_t>(dtype)];
}

}  // namespace lamina::layout
