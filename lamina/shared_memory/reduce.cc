// SPDX-License-Identifier: Apache-2.0
// A type has a way to lie in memory and a wider one to be accumulated in, a reduction is a function of two wide values.
// Blocks of elements are accumulated in the processor's nearest cache: each source is read once.
#include "lamina/shared_memory/reduce.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <type_traits>

#include "lamina/base/error.h"
#include "lamina/layout/half.h"

namespace lamina::shared_memory {
namespace {

using layout::DType;

template <class T>
struct Plain {
  using Stored = T;
  using Wide = T;
  static Wide widen(Stored value) { return value; }
  static Stored narrow(Wide value) { return value; }
};

using layout::BFloat16;
using layout::Float16;

// A truth value is a byte: a sum is "any", a product "all".
struct Bool {
  using Stored = std::uint8_t;
  using Wide = std::uint8_t;
  static Wide widen(Stored value) { return value != 0; }
  static Stored narrow(Wide value) { return value != 0; }
};

// An integer of which the mean is wanted.
template <class T>
struct Averaged {
  using Stored = T;
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  static Wide widen(Stored value) { return value; }
  static Stored narrow(Wide value) { return static_cast<Stored>(value); }
};

constexpr std::size_t kBlock = 1024;

// The mean is a sum that is divided at the end.
template <class Type, class Combine>
void reduce_as(std::byte* out, std::span<const std::byte* const> sources, std::size_t count, Combine combine,
               int divisor = 1) {
  using Stored = typename Type::Stored;
  using Wide = typename Type::Wide;
  std::array<Wide, kBlock> sum;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t length = std::min(kBlock, count - begin);
    const auto* first = reinterpret_cast<const Stored*>(sources[0]) + begin;
    for (std::size_t i = 0; i < length; ++i) sum[i] = Type::widen(first[i]);
    for (std::size_t source = 1; source < sources.size(); ++source) {
      const auto* next = reinterpret_cast<const Stored*>(sources[source]) + begin;
      for (std::size_t i = 0; i < length; ++i) sum[i] = static_cast<Wide>(combine(sum[i], Type::widen(next[i])));
    }
    if (divisor != 1) {
      for (std::size_t i = 0; i < length; ++i) sum[i] = static_cast<Wide>(sum[i] / static_cast<Wide>(divisor));
    }
    auto* result = reinterpret_cast<Stored*>(out) + begin;
    for (std::size_t i = 0; i < length; ++i) result[i] = Type::narrow(sum[i]);
  }
}

// Integers wrap.
template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  } else {
    return a + b;
  }
}

template <class T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  } else {
    return a * b;
  }
}

// Calls `work` with the function of two wide values; false where these types have none.
template <class Wide, class Work>
bool with_function(Reduction reduction, bool truth, const Work& work) {
  constexpr bool kOrdered = std::is_arithmetic_v<Wide>, kInteger = std::is_integral_v<Wide>;
  if (truth && (reduction == Reduction::kSum || reduction == Reduction::kMax)) reduction = Reduction::kBitOr;
  if (truth && (reduction == Reduction::kProduct || reduction == Reduction::kMin)) reduction = Reduction::kBitAnd;
  switch (reduction) {
    case Reduction::kSum:
      work([](Wide a, Wide b) { return add(a, b); });
      return true;
    case Reduction::kMean:
      if (!truth) work([](Wide a, Wide b) { return add(a, b); });
      return !truth;
    case Reduction::kProduct:
      work([](Wide a, Wide b) { return multiply(a, b); });
      return true;
    case Reduction::kMin:
      if constexpr (kOrdered) work([](Wide a, Wide b) { return b < a || b != b ? b : a; });
      return kOrdered;
    case Reduction::kMax:
      if constexpr (kOrdered) work([](Wide a, Wide b) { return b > a || b != b ? b : a; });
      return kOrdered;
    case Reduction::kBitAnd:
      if constexpr (kInteger) work([](Wide a, Wide b) { return static_cast<Wide>(a & b); });
      return kInteger;
    case Reduction::kBitOr:
      if constexpr (kInteger) work([](Wide a, Wide b) { return static_cast<Wide>(a | b); });
      return kInteger;
    case Reduction::kBitXor:
      if constexpr (kInteger) work([](Wide a, Wide b) { return static_cast<Wide>(a ^ b); });
      return kInteger;
  }
  return false;
}

// Calls `work` with the way in which elements of `dtype` lie and are accumulated; false for one that has none.
template <class Work>
bool with_type(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::kBool:
      return work(Bool());
    case DType::kUInt8:
      return work(Plain<std::uint8_t>());
    case DType::kInt8:
      return work(Plain<std::int8_t>());
    case DType::kUInt16:
      return work(Plain<std::uint16_t>());
    case DType::kInt16:
      return work(Plain<std::int16_t>());
    case DType::kUInt32:
      return work(Plain<std::uint32_t>());
    case DType::kInt32:
      return work(Plain<std::int32_t>());
    case DType::kUInt64:
      return work(Plain<std::uint64_t>());
    case DType::kInt64:
      return work(Plain<std::int64_t>());
    case DType::kFloat16:
      return work(Float16());
    case DType::kBFloat16:
      return work(BFloat16());
    case DType::kFloat32:
      return work(Plain<float>());
    case DType::kFloat64:
      return work(Plain<double>());
    case DType::kComplex64:
      return work(Plain<std::complex<float>>());
    case DType::kComplex128:
      return work(Plain<std::complex<double>>());
    default:
      return false;
  }
}

template <class Work>
bool with_both(DType dtype, Reduction reduction, const Work& work) {
  return with_type(dtype, [&]<class Type>(Type) {
    const auto with = [&]<class As>(As) {
      return with_function<typename As::Wide>(reduction, dtype == DType::kBool,
                                              [&](auto function) { work(As(), function); });
    };
    if constexpr (std::is_integral_v<typename Type::Wide>) {
      if (reduction == Reduction::kMean) return with(Averaged<typename Type::Stored>());
    }
    return with(Type());
  });
}

}  // namespace

bool reducible(DType dtype, Reduction reduction) {
  return with_both(dtype, reduction, [](auto, auto) {});
}

void reduce(DType dtype, Reduction reduction, std::byte* out, std::span<const std::byte* const> sources,
            std::size_t count) {
  const int divisor = reduction == Reduction::kMean ? static_cast<int>(sources.size()) : 1;
  const bool known = with_both(dtype, reduction, [&]<class Type>(Type, auto function) {
    reduce_as<Type>(out, sources, count, function, divisor);
  });
  base::internal_check(known, "a reduction of a type that has none");
}

}  // namespace lamina::shared_memory
