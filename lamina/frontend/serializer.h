// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/value/value.h"

// Which C++ types pass between ranks, as arguments and results of a Child and of a step: tensors, numbers, bool,
// strings, dtypes, devices, and std::optional, vector, pair, tuple and map of these.
namespace lamina {

// How a T becomes a tree of values, and is made from one. A type of your own passes when you specialise this for it:
//
//     template <> struct lamina::Serializer<Output> {
//       static lamina::Value to_value(const Output& o) { return lamina::to_value(std::tie(o.logits, o.loss)); }
//       static Output from_value(const lamina::Value& v) { ... lamina::from_value<std::tuple<...>>(v) ... }
//     };
template <class T>
struct Serializer;

using value::Value;

template <class T>
concept Serializable = requires(const T& held, const Value& tree) {
  { Serializer<T>::to_value(held) } -> std::same_as<Value>;
  { Serializer<T>::from_value(tree) } -> std::same_as<T>;
};

template <class T>
constexpr void require_serializable() {
  static_assert(Serializable<T>,
                "lamina: a value of this type cannot pass between ranks. Pass tensors, numbers, bool, std::string, "
                "and std::optional, vector, pair, tuple or map of these; or specialise lamina::Serializer for it");
}

template <class T>
Value to_value(const T& held) {
  require_serializable<T>();
  if constexpr (Serializable<T>) return Serializer<T>::to_value(held);
}

// Throws base::FormatError when the tree holds something else.
template <class T>
T from_value(const Value& tree) {
  require_serializable<T>();
  if constexpr (Serializable<T>) return Serializer<T>::from_value(tree);
}

// Takes what the tree holds as it is.
template <class T>
  requires(std::same_as<T, bool> || std::same_as<T, at::Tensor> || std::same_as<T, std::string> ||
           std::same_as<T, at::ScalarType> || std::same_as<T, at::Device>)
struct Serializer<T> {
  static Value to_value(const T& held) { return Value(T(held)); }
  static T from_value(const Value& tree) {
    const T* held = tree.get_if<T>();
    if (held == nullptr)
      throw base::FormatError(std::string("a value of another kind was expected, not ") + tree.kind());
    return *held;
  }
};

template <std::integral T>
  requires(!std::same_as<T, bool>)
struct Serializer<T> {
  static Value to_value(T held) { return static_cast<std::int64_t>(held); }
  static T from_value(const Value& tree) { return static_cast<T>(tree.as<std::int64_t>()); }
};

template <std::floating_point T>
struct Serializer<T> {
  static Value to_value(T held) { return static_cast<double>(held); }
  static T from_value(const Value& tree) { return static_cast<T>(tree.as<double>()); }
};

template <Serializable T>
struct Serializer<std::optional<T>> {
  static Value to_value(const std::optional<T>& held) { return held ? Serializer<T>::to_value(*held) : Value(); }
  static std::optional<T> from_value(const Value& tree) {
    if (tree.get_if<value::None>() != nullptr) return std::nullopt;
    return Serializer<T>::from_value(tree);
  }
};

template <Serializable T>
struct Serializer<std::vector<T>> {
  static Value to_value(const std::vector<T>& held) {
    value::List list;
    for (const T& item : held) list.items.push_back(Serializer<T>::to_value(item));
    return list;
  }
  static std::vector<T> from_value(const Value& tree) {
    std::vector<T> held;
    for (const Value& item : tree.as<value::List>().items) held.push_back(Serializer<T>::from_value(item));
    return held;
  }
};

// The items of a tuple that has exactly `count`.
inline const std::vector<Value>& items_of(const Value& tree, std::size_t count) {
  const auto& items = tree.as<value::Tuple>().items;
  if (items.size() != count) throw base::FormatError("a tuple of another length was expected");
  return items;
}

template <Serializable... T>
struct Serializer<std::tuple<T...>> {
  static Value to_value(const std::tuple<T...>& held) {
    return std::apply([](const T&... item) -> Value { return value::Tuple{{Serializer<T>::to_value(item)...}}; }, held);
  }
  static std::tuple<T...> from_value(const Value& tree) {
    return from_items(items_of(tree, sizeof...(T)), std::index_sequence_for<T...>());
  }

 private:
  template <std::size_t... I>
  static std::tuple<T...> from_items(const std::vector<Value>& items, std::index_sequence<I...>) {
    return std::tuple<T...>(Serializer<T>::from_value(items[I])...);
  }
};

template <Serializable A, Serializable B>
struct Serializer<std::pair<A, B>> {
  static Value to_value(const std::pair<A, B>& held) {
    return value::Tuple{{Serializer<A>::to_value(held.first), Serializer<B>::to_value(held.second)}};
  }
  static std::pair<A, B> from_value(const Value& tree) {
    const auto& items = items_of(tree, 2);
    return {Serializer<A>::from_value(items[0]), Serializer<B>::from_value(items[1])};
  }
};

template <class Map>
concept MapOfTravelling = (std::same_as<Map, std::map<typename Map::key_type, typename Map::mapped_type>> ||
                           std::same_as<Map, std::unordered_map<typename Map::key_type, typename Map::mapped_type>>) &&
                          Serializable<typename Map::key_type> && Serializable<typename Map::mapped_type>;

template <MapOfTravelling Map>
struct Serializer<Map> {
  static Value to_value(const Map& held) {
    value::Dict dict;
    for (const auto& [key, item] : held) dict.items.emplace_back(lamina::to_value(key), lamina::to_value(item));
    return dict;
  }
  static Map from_value(const Value& tree) {
    Map held;
    for (const auto& [key, item] : tree.as<value::Dict>().items) {
      held.emplace(lamina::from_value<typename Map::key_type>(key),
                   lamina::from_value<typename Map::mapped_type>(item));
    }
    return held;
  }
};

}  // namespace lamina
