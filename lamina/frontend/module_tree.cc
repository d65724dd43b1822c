// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/module_tree.h"

#include <c10/util/Type.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <array>

#include "lamina/frontend/batch_norms.h"
#include "lamina/frontend/calls.h"

namespace lamina::frontend {
namespace {

// [Note: drawing modules] Which modules run in a random stream of their own: those that may draw random numbers, and
// those above them. Only of torch's own classes is it known which do not, so the rule looks at names of classes: it is
// then the same in every layout.
bool may_draw(const std::string& type) {
  constexpr std::array kDraw = {"Dropout", "RReLU", "FractionalMaxPool", "RNN",
                                "LSTM",    "GRU",   "Transformer",       "MultiheadAttention"};
  if (type.starts_with("lamina::nn::Sliced")) return false;  // they stand for torch's
  return !type.starts_with("torch::nn::") ||
         std::ranges::any_of(kDraw, [&](const char* word) { return type.find(word) != std::string::npos; });
}

}  // namespace

TorchModuleTree::TorchModuleTree(std::shared_ptr<torch::nn::Module> root, bool scopes_count, const Slicings& slicings)
    : scopes_count_(scopes_count) {
  visit(root, "", true, slicings);
}

void TorchModuleTree::visit(const std::shared_ptr<torch::nn::Module>& module, const std::string& path, bool is_node,
                            const Slicings& slicings) {
  model::Module met{.path = path, .id = reinterpret_cast<std::uintptr_t>(module.get())};
  met.type = c10::demangle(typeid(*module).name());
  met.role = is_node ? model::Role::kCalled : model::Role::kPart;
  met.same_everywhere = met.type.starts_with("torch::nn::");
  met.draws = may_draw(met.type);
  met.keeps_statistics = !batch_norms(*module).empty();
  if (const RegisteredChild* known = frontend::find_child(module.get())) {
    met.dynamic = known->dynamic;
    met.placed_at = known->partition || !scopes_count_ ? known->partition : known->scope;
  }
  for (const auto& own : module->named_parameters(/*recurse=*/false))
    met.tensors.push_back({.name = own.key(), .value = own.value(), .whole = whole_shape(slicings, own.value())});
  for (const auto& own : module->named_buffers(/*recurse=*/false)) {
    met.tensors.push_back({own.key(), own.value(), /*buffer=*/true});
  }
  if (add(met)) modules_.push_back(module);
  // torch's Sequential calls what it holds by itself, not as a Child.
  const bool by_itself = dynamic_cast<const torch::nn::SequentialImpl*>(module.get()) != nullptr;
  for (const auto& child : module->named_children()) {
    const bool is_called = !by_itself && frontend::find_child(child.value().get()) != nullptr;
    visit(child.value(), path.empty() ? child.key() : path + "." + child.key(), is_called, slicings);
  }
}

std::vector<std::string> TorchModuleTree::names() const {
  std::vector<std::string> names;
  for (const auto& node : nodes()) names.push_back(node.name);
  return names;
}

std::vector<std::pair<std::string, at::Tensor>> TorchModuleTree::named() const {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto& item : root()->named_parameters()) named.emplace_back(item.key(), item.value());
  for (const auto& item : root()->named_buffers()) named.emplace_back(item.key(), item.value());
  return named;
}

}  // namespace lamina::frontend
