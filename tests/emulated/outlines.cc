// SPDX-License-Identifier: Apache-2.0
#include "tests/emulated/outlines.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>

#include <bit>
#include <mutex>
#include <string>
#include <unordered_map>

#include "tests/emulated/device.h"
#include "tests/emulated/tensors.h"

namespace emulated {
namespace {

using torch::jit::Stack;

constexpr std::size_t kMostKnown = 20'000;

// Writes all of a call that its results depend on, one number after the other.
class Key {
 public:
  Key(const c10::OperatorHandle& operation, const Stack& arguments) {
    put(reinterpret_cast<std::uintptr_t>(&operation.schema()));
    put(static_cast<std::uint64_t>(c10::get_default_dtype_as_scalartype()));
    for (const auto& argument : arguments) {
      put_value(argument);
    }
  }

  // Empty if an argument is of a kind that it does not know.
  std::string text() const { return is_known_ ? text_ : std::string(); }

 private:
  void put(std::uint64_t number) { text_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }

  void put_tensor(const at::Tensor& tensor) {
    put(tensor.defined());
    if (!tensor.defined()) {
      return;
    }
    put(static_cast<std::uint64_t>(tensor.scalar_type()));
    put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    put(tensor.dim());
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
      put(tensor.size(i));
      put(tensor.stride(i));
    }
  }

  void put_list(const c10::IValue& value) {
    const auto list = value.toListRef();
    put(list.size());
    for (const auto& element : list) {
      put_value(element);
    }
  }

  void put_value(const c10::IValue& value) {
    put(value.isNone()     ? 0
        : value.isTensor() ? 1
        : value.isDouble() ? 2
        : value.isBool()   ? 3
        : value.isInt()    ? 4
        : value.isString() ? 5
                           : 6);
    if (value.isTensor()) {
      put_tensor(value.toTensor());
    } else if (value.isDouble()) {
      put(std::bit_cast<std::uint64_t>(value.toDouble()));
    } else if (value.isBool()) {
      put(value.toBool());
    } else if (value.isInt()) {
      put(value.toInt());
    } else if (value.isString()) {
      put(value.toStringRef().size());
      text_ += value.toStringRef();
    } else if (value.isDevice()) {
      put(static_cast<std::uint64_t>(value.toDevice().type()));
    } else if (value.isList()) {
      put_list(value);
    } else if (!value.isNone() && !value.isGenerator()) {
      is_known_ = false;
    }
  }

  std::string text_;
  bool is_known_ = true;
};

struct Known {
  std::mutex mutex;
  std::unordered_map<std::string, Stack> calls;
};

Known& known() {
  static auto& made = *new Known;
  return made;
}

Stack on_meta(const c10::OperatorHandle& operation, const Stack& arguments) {
  Stack stack;
  for (const auto& value : arguments) {
    if (value.isDevice() && value.toDevice().type() == kType) {
      stack.emplace_back(c10::Device(c10::kMeta));
    } else if (value.isGenerator()) {
      stack.emplace_back();
    } else {
      stack.push_back(changed(value, [](const at::Tensor& tensor) { return outline(tensor); }));
    }
  }
  as_kernel([&] { operation.callBoxed(stack); });
  return stack;
}

}  // namespace

Stack outline_call(const c10::OperatorHandle& operation, const Stack& arguments) {
  const auto key = Key(operation, arguments).text();
  if (key.empty()) {
    return on_meta(operation, arguments);
  }
  {
    std::lock_guard lock(known().mutex);
    if (const auto found = known().calls.find(key); found != known().calls.end()) {
      return found->second;
    }
  }
  auto outlined = on_meta(operation, arguments);  // which may wait for Python's lock
  std::lock_guard lock(known().mutex);
  if (known().calls.size() >= kMostKnown) {
    known().calls.clear();
  }
  known().calls.emplace(key, outlined);
  return outlined;
}

}  // namespace emulated
