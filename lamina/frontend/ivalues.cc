// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/ivalues.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::frontend {
namespace {

using c10::IValue;
using value::Value;

template <class Items>
std::vector<Value> values_of(const Items& items, const std::string& what) {
  std::vector<Value> all;
  for (const IValue& each : items) all.push_back(value_of(each, what));
  return all;
}

std::vector<IValue> ivalues_of(const std::vector<Value>& values) {
  std::vector<IValue> all;
  for (const auto& each : values) all.push_back(to_ivalue(each));
  return all;
}

template <class T>
std::optional<IValue> list_of(const std::vector<Value>& values) {
  c10::List<T> list;
  for (const auto& each : values) {
    if (each.get_if<T>() == nullptr) return std::nullopt;
    list.push_back(each.as<T>());
  }
  return IValue(std::move(list));
}

IValue list_value(const std::vector<Value>& values) {
  if (!values.empty()) {
    if (auto whole = list_of<std::int64_t>(values)) return *std::move(whole);
    if (auto numbers = list_of<double>(values)) return *std::move(numbers);
  }
  c10::impl::GenericList list(c10::AnyType::get());
  for (auto& each : ivalues_of(values)) list.push_back(std::move(each));
  return list;
}

IValue dict_value(const value::Dict& held) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& [key, each] : held.items) dict.insert(to_ivalue(key), to_ivalue(each));
  return dict;
}

}  // namespace

Value value_of(const IValue& value, const std::string& what) {
  if (value.isNone() || (value.isTensor() && !value.toTensor().defined())) return {};
  if (value.isTensor()) return value.toTensor();
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return value.toDouble();
  if (value.isString()) return value.toStringRef();
  if (value.isTuple()) return value::Tuple{values_of(value.toTupleRef().elements(), what)};
  if (value.isList()) return value::List{values_of(value.toListRef(), what)};
  if (value.isGenericDict()) {
    value::Dict dict;
    for (const auto& item : value.toGenericDict()) {
      dict.items.emplace_back(value_of(item.key(), what), value_of(item.value(), what));
    }
    return dict;
  }
  throw base::UsageError(base::str(what, " is of type ", value.tagKind(),
                                   ", which has no place in a tree of values: give tensors, numbers, texts, and "
                                   "lists, tuples and dictionaries of these"));
}

IValue to_ivalue(const Value& value) {
  if (value.get_if<value::None>() != nullptr) return {};
  if (const auto* tensor = value.get_if<at::Tensor>()) return *tensor;
  if (const auto* flag = value.get_if<bool>()) return *flag;
  if (const auto* whole = value.get_if<std::int64_t>()) return *whole;
  if (const auto* number = value.get_if<double>()) return *number;
  if (const auto* text = value.get_if<std::string>()) return *text;
  if (const auto* dtype = value.get_if<at::ScalarType>()) return static_cast<std::int64_t>(*dtype);
  if (const auto* device = value.get_if<at::Device>()) return *device;
  if (const auto* tuple = value.get_if<value::Tuple>()) return c10::ivalue::Tuple::create(ivalues_of(tuple->items));
  if (const auto* list = value.get_if<value::List>()) return list_value(list->items);
  if (const auto* dict = value.get_if<value::Dict>()) return dict_value(*dict);
  throw base::UsageError(base::str("a ", value.kind(), " has no value in C++: it was saved by a program in Python"));
}

Value value_of(const Fields& fields, const std::string& what) {
  value::Dict dict;
  for (const auto& [name, field] : fields) dict.items.emplace_back(name, value_of(field, base::str(what, " ", name)));
  return dict;
}

Fields to_fields(const Value& value) {
  Fields fields;
  for (const auto& [name, field] : value.as<value::Dict>().items) fields[name.as<std::string>()] = to_ivalue(field);
  return fields;
}

}  // namespace lamina::frontend
