// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lamina/base/ids.h"

// The tree of values that calls between ranks pass: arguments, results, gradients, errors and plans all have this
// shape. Both faces translate their own objects to it; nothing below the faces knows any other.
namespace lamina::value {

class Value;

struct None {
  friend bool operator==(None, None) = default;
};

// start, stop and step of a slice: exactly three values.
struct Slice {
  std::vector<Value> bounds;
};

struct List {
  std::vector<Value> items;
};

struct Tuple {
  std::vector<Value> items;
};

// In insertion order; a key is any value.
struct Dict {
  std::vector<std::pair<Value, Value>> items;
};

// A tensor that the receiver has, or will get, by other means: in a request one that is delivered under the name
// `name`, in an answer the argument number `argument` of the request.
struct Reference {
  base::CallId name;
  std::int64_t argument = 0;
  bool requires_grad = false;
  friend bool operator==(const Reference&, const Reference&) = default;
};

// An object only a face understands: the name of the codec that wrote it, its bytes, and the tensors it holds, which
// travel as tensors. Codecs are the faces' (python/lamina/job/codec.py is behind the one of Python).
struct Opaque {
  std::string codec;
  std::string bytes;
  std::vector<at::Tensor> tensors;
};

class Value {
 public:
  using Variant = std::variant<None, bool, std::int64_t, double, std::string, at::Tensor, Reference, at::ScalarType,
                               at::Device, Slice, List, Tuple, Dict, Opaque>;

  Value() = default;
  template <class T>
    requires(!std::same_as<std::remove_cvref_t<T>, Value>) &&
            std::constructible_from<Variant, std::in_place_type_t<std::remove_cvref_t<T>>, T>
  Value(T&& held) : held_(std::in_place_type<std::remove_cvref_t<T>>, std::forward<T>(held)) {}
  Value(const char* text) : held_(std::string(text)) {}

  template <class T>
  const T* get_if() const {
    return std::get_if<T>(&held_);
  }
  template <class T>
  T* get_if() {
    return std::get_if<T>(&held_);
  }
  // The held T; throws base::FormatError naming what is held instead.
  template <class T>
  const T& as() const {
    if (const T* held = get_if<T>()) return *held;
    throw_wrong_kind(Value(T()).kind());
  }
  template <class T>
  T& as() {
    return const_cast<T&>(std::as_const(*this).template as<T>());
  }

  // "tensor", "list", ...: for messages.
  const char* kind() const;

  const Variant& variant() const { return held_; }
  Variant& variant() { return held_; }

 private:
  [[noreturn]] void throw_wrong_kind(const char* wanted) const;

  Variant held_;
};

// Calls `visit` for every tensor of the tree, those of opaque objects included, always in the same order. A tensor
// that stands in several places is visited once for each.
void for_each_tensor(const Value& tree, const std::function<void(const at::Tensor&)>& visit);
void for_each_tensor(Value& tree, const std::function<void(at::Tensor&)>& visit);

// Calls `visit` for every value of the tree that holds no other, in the same order as for_each_tensor.
void for_each_leaf(const Value& tree, const std::function<void(const Value&)>& visit);
void for_each_leaf(Value& tree, const std::function<void(Value&)>& visit);

}  // namespace lamina::value
