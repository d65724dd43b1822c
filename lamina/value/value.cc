// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/value.h"

#include <array>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::value {
namespace {

// One walk for both constnesses: Tree is Value or const Value.
template <class Tree, class Visit>
void walk(Tree& tree, const Visit& visit) {
  auto all = [&](auto& items) {
    for (auto& item : items) walk(item, visit);
  };
  if (auto* list = tree.template get_if<List>()) {
    all(list->items);
  } else if (auto* tuple = tree.template get_if<Tuple>()) {
    all(tuple->items);
  } else if (auto* slice = tree.template get_if<Slice>()) {
    all(slice->bounds);
  } else if (auto* dict = tree.template get_if<Dict>()) {
    for (auto& [key, item] : dict->items) {
      walk(key, visit);
      walk(item, visit);
    }
  } else {
    visit(tree);
  }
}

template <class Tree, class Visit>
void walk_tensors(Tree& tree, const Visit& visit) {
  walk(tree, [&](auto& leaf) {
    if (auto* tensor = leaf.template get_if<at::Tensor>()) visit(*tensor);
    if (auto* opaque = leaf.template get_if<Opaque>()) {
      for (auto& tensor : opaque->tensors) visit(tensor);
    }
  });
}

}  // namespace

const char* Value::kind() const {
  constexpr std::array kNames = {"None",  "bool",   "int",   "float", "string", "tensor", "reference",
                                 "dtype", "device", "slice", "list",  "tuple",  "dict",   "opaque"};
  static_assert(kNames.size() == std::variant_size_v<Variant>);
  return kNames[held_.index()];
}

void Value::throw_wrong_kind(const char* wanted) const {
  throw base::FormatError(base::str("expected a ", wanted, ", got a ", kind()));
}

void for_each_tensor(const Value& tree, const std::function<void(const at::Tensor&)>& visit) {
  walk_tensors(tree, visit);
}
void for_each_tensor(Value& tree, const std::function<void(at::Tensor&)>& visit) { walk_tensors(tree, visit); }

void for_each_leaf(const Value& tree, const std::function<void(const Value&)>& visit) { walk(tree, visit); }
void for_each_leaf(Value& tree, const std::function<void(Value&)>& visit) { walk(tree, visit); }

}  // namespace lamina::value
