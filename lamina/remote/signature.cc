// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/signature.h"

#include <functional>
#include <unordered_map>

#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/device/role.h"
#include "lamina/remote/outputs.h"
#include "lamina/value/bytes.h"

namespace lamina::remote {
namespace {

using value::Value;

void put_spec(value::Writer& out, const value::TensorSpec& spec, bool requires_grad) {
  out.put(spec.dtype);
  out.put(devices::role_of(spec.device, "a tensor on ", spec.device));
  out.put(requires_grad);
  out.put<std::uint64_t>(spec.sizes.size());
  for (const auto size : spec.sizes) out.put(size);
  for (const auto stride : spec.strides) out.put(stride);
}

class SignatureWriter {
 public:
  void write(const Value& tree) {
    out_.put(static_cast<std::uint8_t>(tree.variant().index()));
    std::visit([this](const auto& held) { write_held(held); }, tree.variant());
  }
  std::string take() { return out_.take(); }

 private:
  void write_held(value::None) {}
  void write_held(bool flag) { out_.put(flag); }
  void write_held(std::int64_t number) { out_.put(number); }
  void write_held(double number) { out_.put(number); }
  void write_held(const std::string& text) { out_.put_block(text); }
  void write_held(const value::Reference& reference) { out_.put(reference.argument); }
  void write_held(at::ScalarType dtype) { out_.put(dtype); }
  void write_held(at::Device device) { out_.put(devices::role_of(device, "the device ", device)); }
  void write_held(const value::Slice& slice) { write_all(slice.bounds); }
  void write_held(const value::List& list) { write_all(list.items); }
  void write_held(const value::Tuple& tuple) { write_all(tuple.items); }
  void write_held(const value::Dict& dict) {
    out_.put<std::uint64_t>(dict.items.size());
    for (const auto& [key, item] : dict.items) {
      write(key);
      write(item);
    }
  }
  void write_held(const value::Opaque& opaque) {
    out_.put_block(opaque.codec);
    out_.put_block(opaque.bytes);
    for (const auto& tensor : opaque.tensors) write_held(tensor);
  }
  void write_held(const at::Tensor& tensor) {
    const auto [place, fresh] = index_.try_emplace(tensor.unsafeGetTensorImpl(), index_.size());
    out_.put<std::uint64_t>(place->second);
    if (!fresh) return;
    out_.put(tensor.defined());
    if (tensor.defined()) put_spec(out_, value::spec_of(tensor), tensor.requires_grad());
  }
  void write_all(const std::vector<Value>& items) {
    out_.put<std::uint64_t>(items.size());
    for (const auto& item : items) write(item);
  }

  value::Writer out_;
  std::unordered_map<const void*, std::size_t> index_;
};

// Visits every value that holds no other, but for the keys of dictionaries.
void for_each_item(Value& tree, const std::function<void(Value&)>& visit) {
  const auto all = [&](std::vector<Value>& items) {
    for (auto& item : items) for_each_item(item, visit);
  };
  if (auto* list = tree.get_if<value::List>()) return all(list->items);
  if (auto* tuple = tree.get_if<value::Tuple>()) return all(tuple->items);
  if (auto* dict = tree.get_if<value::Dict>()) {
    for (auto& [key, item] : dict->items) for_each_item(item, visit);
    return;
  }
  visit(tree);
}

bool can_be_predicted(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

std::uint64_t fingerprint(const OutputSpec& output_spec) {
  value::Writer out;
  out.put_block(signature(output_spec.tree));
  for (const auto& [spec, requires_grad] : output_spec.outputs) put_spec(out, spec, requires_grad);
  out.put_block(output_spec.views);
  return base::hash64(out.take()) | 1;
}

}  // namespace

std::vector<at::Tensor> distinct_tensors(const Value& tree) {
  std::vector<at::Tensor> tensors;
  std::unordered_map<const void*, std::size_t> seen;
  value::for_each_tensor(tree, [&](const at::Tensor& tensor) {
    if (tensor.defined() && seen.try_emplace(tensor.unsafeGetTensorImpl(), seen.size()).second) {
      tensors.push_back(tensor);
    }
  });
  return tensors;
}

std::string signature(const Value& tree) {
  SignatureWriter writer;
  writer.write(tree);
  return writer.take();
}

std::optional<OutputSpec> output_spec(const Value& outputs, std::string views) {
  OutputSpec made{.tree = outputs, .views = std::move(views)};
  bool possible = true;
  std::unordered_map<const void*, std::int64_t> index;
  for_each_item(made.tree, [&](Value& leaf) {
    if (leaf.get_if<value::None>() || leaf.get_if<value::Reference>()) return;
    const at::Tensor* tensor = leaf.get_if<at::Tensor>();
    if (tensor == nullptr || !can_be_predicted(*tensor)) {
      possible = false;
      return;
    }
    const auto [place, fresh] = index.try_emplace(tensor->unsafeGetTensorImpl(), std::ssize(made.outputs));
    if (fresh) made.outputs.push_back({delivered_spec(*tensor), tensor->requires_grad()});
    leaf = place->second;
  });
  if (!possible) return std::nullopt;
  made.fingerprint = fingerprint(made);
  return made;
}

Value filled(const OutputSpec& output_spec, const std::vector<at::Tensor>& tensors) {
  Value tree = output_spec.tree;
  for_each_item(tree, [&](Value& leaf) {
    if (const auto* number = leaf.get_if<std::int64_t>()) leaf = at::Tensor(tensors.at(*number));
  });
  return tree;
}

}  // namespace lamina::remote
