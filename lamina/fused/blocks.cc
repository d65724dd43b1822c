// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/blocks.h"

#include "lamina/base/error.h"
#include "lamina/layout/half.h"

namespace lamina::fused {
namespace {

using layout::DType;

template <class T>
struct PlainBlocks {
  using Stored = T;
  static T widen(T value) { return value; }
  template <class Wide>
  static T narrow(Wide value) {
    return static_cast<T>(value);
  }
};

// Calls `work` with the way in which elements of `dtype` lie.
template <class Work>
void with_type(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::kFloat32:
      return work(PlainBlocks<float>());
    case DType::kFloat64:
      return work(PlainBlocks<double>());
    case DType::kFloat16:
      return work(layout::Float16());
    case DType::kBFloat16:
      return work(layout::BFloat16());
    default:
      throw base::InternalError("an update of elements that are no floats");
  }
}

}  // namespace

template <class T>
void load(DType dtype, const void* memory, std::size_t begin, std::size_t count, T* out, Vectors vectors) {
  with_type(dtype, [&]<class Type>(Type) {
    const auto* from = static_cast<const typename Type::Stored*>(memory) + begin;
    with_vectors(vectors, [&] {
      for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<T>(Type::widen(from[i]));
    });
  });
}

template <class T>
void store(const T* values, DType dtype, void* memory, std::size_t begin, std::size_t count, Vectors vectors) {
  with_type(dtype, [&]<class Type>(Type) {
    auto* to = static_cast<typename Type::Stored*>(memory) + begin;
    with_vectors(vectors, [&] {
      for (std::size_t i = 0; i < count; ++i) to[i] = Type::narrow(values[i]);
    });
  });
}

template void load<float>(DType, const void*, std::size_t, std::size_t, float*, Vectors);
template void load<double>(DType, const void*, std::size_t, std::size_t, double*, Vectors);
template void store<float>(const float*, DType, void*, std::size_t, std::size_t, Vectors);
template void store<double>(const double*, DType, void*, std::size_t, std::size_t, Vectors);

}  // namespace lamina::fused
