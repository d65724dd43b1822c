// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/floats.h"

#include <cmath>
#include <cstring>

#include "lamina/base/error.h"
#include "lamina/layout/half.h"

namespace lamina::archive {
namespace {

using layout::DType;

// A kind of elements by how it is stored and read; halves by way of float, as torch does.
template <class Half>
struct HalfKind {
  using Stored = std::uint16_t;
  static float widen(Stored value) { return Half::widen(value); }
  static Stored narrow(double value) { return Half::narrow(static_cast<float>(value)); }
};
template <class Real>
struct RealKind {
  using Stored = Real;
  static Real widen(Stored value) { return value; }
  static Stored narrow(double value) { return static_cast<Real>(value); }
};

template <class Call>
void with_kind(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kFloat16:
      return call(HalfKind<layout::Float16>());
    case DType::kBFloat16:
      return call(HalfKind<layout::BFloat16>());
    case DType::kFloat32:
      return call(RealKind<float>());
    case DType::kFloat64:
      return call(RealKind<double>());
    default:
      throw base::InternalError("elements that are not floating");
  }
}

template <class T>
T at(std::span<const std::byte> bytes, std::size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

void widen(DType dtype, std::span<const std::byte> from, std::vector<double>& to) {
  with_kind(dtype, [&](auto kind) {
    using Stored = typename decltype(kind)::Stored;
    to.resize(from.size() / sizeof(Stored));
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = static_cast<double>(kind.widen(at<Stored>(from, i)));
  });
}

std::size_t convert(DType from, std::span<const std::byte> bytes, DType to, std::vector<std::byte>& converted) {
  std::size_t too_large = 0;
  with_kind(from, [&](auto source) {
    with_kind(to, [&](auto target) {
      using Source = typename decltype(source)::Stored;
      using Target = typename decltype(target)::Stored;
      const auto count = bytes.size() / sizeof(Source);
      converted.resize(count * sizeof(Target));
      for (std::size_t i = 0; i < count; ++i) {
        const auto wide = source.widen(at<Source>(bytes, i));
        const Target value = target.narrow(wide);
        too_large += std::isinf(target.widen(value)) && !std::isinf(wide) ? 1 : 0;
        std::memcpy(converted.data() + i * sizeof(Target), &value, sizeof(Target));
      }
    });
  });
  return too_large;
}

}  // namespace lamina::archive
