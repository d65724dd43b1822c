// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/outputs.h"

#include <c10/core/GradMode.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <functional>
#include <map>

namespace lamina::remote {
namespace {

// Puts what `made` makes of a tensor in its place, the same wherever the tensor stands in the tree.
void replace_tensors(value::Value& tree, const std::function<at::Tensor(const at::Tensor&)>& made) {
  std::map<const void*, at::Tensor> replaced;
  value::for_each_tensor(tree, [&](at::Tensor& tensor) {
    if (!tensor.defined()) return;
    auto& replacement = replaced[tensor.unsafeGetTensorImpl()];
    if (!replacement.defined()) replacement = made(tensor);
    tensor = replacement;
  });
}

}  // namespace

std::vector<std::uint32_t> versions(const Tensors& tensors) {
  std::vector<std::uint32_t> versions;
  for (const auto& tensor : tensors) versions.push_back(value::version_of(tensor));
  return versions;
}

value::List written(const Tensors& arguments, const std::vector<std::uint32_t>& before) {
  value::List pairs;
  const auto after = versions(arguments);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (after[i] != before[i]) pairs.items.push_back(value::Tuple{{static_cast<std::int64_t>(i), arguments[i]}});
  }
  return pairs;
}

void replace_arguments(value::Value& outputs, const Tensors& arguments) {
  value::for_each_leaf(outputs, [&](value::Value& leaf) {
    const auto* tensor = leaf.get_if<at::Tensor>();
    if (tensor == nullptr || !tensor->defined()) return;
    const auto same = [&](const at::Tensor& argument) { return argument.is_same(*tensor); };
    const auto found = std::ranges::find_if(arguments, same);
    if (found != arguments.end()) leaf = value::Reference{{}, found - arguments.begin(), false};
  });
}

void copy_what_others_hold(value::Value& outputs) {
  std::map<at::TensorImpl*, std::size_t> leaves;
  std::map<const void*, std::size_t> tensors;
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.defined() && !tensor.requires_grad() && tensor.layout() == at::kStrided && !value::is_pending(tensor);
  };
  value::for_each_tensor(outputs, [&](const at::Tensor& tensor) {
    if (!is_plain(tensor) || ++leaves[tensor.unsafeGetTensorImpl()] > 1) return;
    ++tensors[tensor.storage().unsafeGetStorageImpl()];
  });
  std::erase_if(leaves, [&](const auto& leaf) {
    const auto& [impl, count] = leaf;
    const auto& storage = impl->storage();
    return c10::raw::intrusive_ptr::use_count(impl) <= count &&
           storage.use_count() <= tensors.at(storage.unsafeGetStorageImpl());
  });
  if (leaves.empty()) return;
  replace_tensors(outputs, [&](const at::Tensor& tensor) {
    return leaves.contains(tensor.unsafeGetTensorImpl()) ? tensor.clone() : tensor;
  });
}

at::Tensor dense(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_non_overlapping_and_dense()) return tensor;
  const at::NoGradGuard no_grad;
  return tensor.contiguous();
}

value::TensorSpec delivered_spec(const at::Tensor& tensor) {
  value::TensorSpec spec = value::spec_of(tensor);
  if (tensor.is_non_overlapping_and_dense()) return spec;
  const auto strides = c10::contiguous_strides(spec.sizes);
  spec.strides.assign(strides.begin(), strides.end());
  return spec;
}

void make_dense(value::Value& tree) {
  replace_tensors(tree, [](const at::Tensor& tensor) {
    at::Tensor copy = dense(tensor);
    if (!copy.is_same(tensor)) copy.set_requires_grad(tensor.requires_grad());
    return copy;
  });
}

}  // namespace lamina::remote
