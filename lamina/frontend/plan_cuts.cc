// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/plan_cuts.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Type.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/frontend/calls.h"
#include "lamina/frontend/slicing_plan.h"
#include "lamina/tensor_parallel/dropout.h"
#include "lamina/tensor_parallel/forwards.h"
#include "lamina/tensor_parallel/operators.h"
#include "lamina/tensor_parallel/slices.h"
#include "lamina/tensor_parallel/team.h"
#include "lamina/value/guarded.h"
#include "lamina/value/slice_layer.h"

namespace lamina::frontend {
namespace {

namespace tp = tensor_parallel;
using tp::LayerCut;
using tp::PlannedLayer;

// The name of a class as its program says it: "Attention" for "(anonymous namespace)::AttentionImpl<double>".
std::string type_of(const torch::nn::Module& module) {
  auto name = c10::demangle(typeid(module).name());
  name.resize(std::min(name.find('<'), name.size()));
  if (const auto colon = name.rfind(':'); colon != std::string::npos) name.erase(0, colon + 1);
  constexpr std::string_view kEnd = "Impl";
  if (name.size() > kEnd.size() && name.ends_with(kEnd)) name.resize(name.size() - kEnd.size());
  return name;
}

// The whole name of a class, in Python's words where the engine knows it by them.
std::string class_of(const torch::nn::Module& module) {
  const auto& type = typeid(module);
  if (type == typeid(torch::nn::LinearImpl)) return "torch.nn.modules.linear.Linear";
  if (type == typeid(torch::nn::EmbeddingImpl)) return "torch.nn.modules.sparse.Embedding";
  const auto name = c10::demangle(type.name());
  const bool is_list = type == typeid(torch::nn::ModuleListImpl) || type == typeid(torch::nn::ModuleDictImpl) ||
                       name.starts_with("lamina::ChildListImpl<");
  return is_list ? "torch.nn.modules.container.ModuleList" : name;
}

tp::ModelModule row_of(const torch::nn::Module& module, bool is_marked) {
  tp::ModelModule row;
  row.type = type_of(module);
  row.classes = {class_of(module)};
  for (const auto& own : module.named_parameters(/*recurse=*/false)) {
    row.parameters.emplace_back(own.key(), reinterpret_cast<std::uintptr_t>(own.value().unsafeGetTensorImpl()));
  }
  row.is_marked = is_marked;
  if (auto given = plan_of(module)) {
    row.plan = std::move(given->styles);
    row.heads = std::move(given->heads);
  }
  return row;
}

// The modules under plans, and the engine's rows of all.
struct Rows {
  explicit Rows(const torch::nn::Module& root) {
    std::set<const torch::nn::Module*> marked;
    const auto named = root.named_modules();
    for (const auto& each : named) {
      if (!plan_of(*each.value())) continue;
      for (const auto& part : each.value()->modules()) marked.insert(part.get());
    }
    std::map<const torch::nn::Module*, std::size_t> numbers;
    for (const auto& each : named) {
      const auto [number, is_new] = numbers.emplace(each.value().get(), modules.size());
      model.names.emplace_back(each.key(), number->second);
      if (!is_new) continue;
      modules.push_back(each.value());
      model.modules.push_back(row_of(*each.value(), marked.contains(each.value().get())));
    }
  }

  tp::ModelModules model;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  // by number
};

std::map<std::string, std::int64_t*> numbers_of(torch::nn::Module& module) {
  auto* with_heads = dynamic_cast<WithHeads*>(&module);
  return with_heads == nullptr ? std::map<std::string, std::int64_t*>() : with_heads->numbers();
}

// Fills a row with what is known of its layer, and of the module around it.
void read_layer(PlannedLayer& row, const torch::nn::Module& layer, torch::nn::Module& parent, const Slicings& now) {
  if (const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(&layer)) {
    row.shape = sizes_of_whole(now, linear->weight);
    row.has_bias = linear->bias.defined();
  } else if (const auto* words = dynamic_cast<const torch::nn::EmbeddingImpl*>(&layer)) {
    const auto& options = words->options;
    row.shape = sizes_of_whole(now, words->weight);
    row.padding = options.padding_idx();
    row.has_options = options.max_norm() || options.scale_grad_by_freq() || options.sparse();
  }
  if (!row.heads || row.heads->name.empty()) return;
  const auto numbers = numbers_of(parent);
  const auto found = numbers.find(row.heads->name);
  row.heads->count = found == numbers.end() ? 0 : std::max<std::int64_t>(*found->second, 0);
}

void require_child(const LayerCut& cut, const torch::nn::Module& layer) {
  if (!cut.chosen || find_child(&layer) != nullptr) return;
  throw base::UsageError(base::str(cut.name,
                                   " gives heads of keys that several ranks have, and is no lamina::Child, "
                                   "whose calls alone are known: declare the member that calls it so, as "
                                   "lamina::Child<torch::nn::",
                                   type_of(layer), ">"),
                         base::Code{"cpp-no-child"});
}

// True for a layer's parameter, as that is.
bool is_own(const at::Tensor& given, const at::Tensor& parameter) {
  return given.is_alias_of(parameter) && given.sizes() == parameter.sizes() && given.strides() == parameter.strides();
}

// Puts the parts along the last dimension of a tensor together.
Forward::Function of_parts(const std::vector<layout::Section>& sections, const std::string& team) {
  return [=](const at::Tensor& part) {
    const auto ranks = tp::find_team(team);
    return tp::whole_of(*ranks, part, {static_cast<int>(part.dim()) - 1, sections, ranks->size()});
  };
}

// Adds up outputs of which some may be on several ranks.
at::Tensor sum_of_chosen(const at::Tensor& part, const std::vector<std::int64_t>& chosen, std::int64_t extent,
                         const std::string& team) {
  const at::NoGradGuard no_grad;
  auto shape = part.sizes().vec();
  shape.back() = extent;
  const auto places = at::tensor(chosen, at::TensorOptions(at::kLong).device(part.device()));
  return tp::all_reduce(at::zeros(shape, part.options()).index_add(part.dim() - 1, places, part), team);
}

// The forward of a layer, with what it takes and gives in parts.
Forward forward_of(const LayerCut& cut, const std::string& team, std::int64_t outputs, Forward::Function call) {
  Forward forward{std::move(call)};
  if (cut.chosen) {
    const auto sum = [=, chosen = *cut.chosen](const at::Tensor& part) {
      return sum_of_chosen(part, chosen, outputs, team);
    };
    forward.whole_output = [=](const at::Tensor& part) { return sum(part) / sum(at::ones_like(part)); };
    forward.whole_gradient = sum;
  } else if (tp::is_by_columns(cut.style)) {
    forward.whole_output = forward.whole_gradient = of_parts(cut.slices.front().second.sections, team);
  } else if (cut.style == "rowwise" && cut.slices.front().second.dim == 1) {
    forward.whole_input = of_parts(cut.slices.front().second.sections, team);
  }
  return forward;
}

}  // namespace

PlanCuts::PlanCuts(const torch::nn::Module& root, const Member& member, const Slicings& now) : team_(member.team) {
  Rows rows(root);
  planned_ = tp::plan_layers(rows.model, member.degree, /*in_parts=*/false);
  for (auto& [number, parent] : planned_.parents) {
    for (const auto& [name, value] : numbers_of(*rows.modules[number])) {
      if (*value > 0) parent.numbers[name] = *value;
    }
  }
  for (auto* layers : {&planned_.layers, &planned_.elsewhere}) {
    for (auto& row : *layers) read_layer(row, *rows.modules[row.layer], *rows.modules[row.parent], now);
  }
  cuts_ = tp::cut_layers(planned_, member.degree, member.index);
  modules_ = std::move(rows.modules);
  model_ = std::move(rows.model);
  for (const auto& row : planned_.layers) rows_.emplace(row.name, &row);
  for (const auto& cut : cuts_.layers) {
    require_child(cut, layer(cut));
    by_layer_.emplace(&layer(cut), &cut);
  }
}

std::vector<std::string> PlanCuts::whole(std::set<std::string> sliced) const {
  for (const auto& cut : cuts_.layers) sliced.insert(cut.name);
  return tp::marked_but_whole(model_, sliced);
}

torch::nn::Module& PlanCuts::layer(const LayerCut& cut) const { return *modules_[rows_.at(cut.name)->layer]; }

// The heads here of the module around a layer; none of one without.
std::optional<tp::SlicePart> PlanCuts::heads_of(const LayerCut& cut) const {
  const auto around = std::ranges::find(cuts_.parents, rows_.at(cut.name)->parent, &tp::ParentCut::parent);
  return around == cuts_.parents.end() ? std::nullopt : around->heads;
}

std::optional<layout::Slicing> PlanCuts::slicing(const torch::nn::Module& module, const std::string& parameter) const {
  const auto cut = by_layer_.find(&module);
  if (cut == by_layer_.end()) return std::nullopt;
  for (const auto& [name, slicing] : cut->second->slices) {
    if (name == parameter) return slicing;
  }
  return std::nullopt;
}

void PlanCuts::begin() {
  for (const auto& cut : cuts_.layers) begin(cut);
  for (const auto& parent : cuts_.parents) {
    const auto numbers = numbers_of(*modules_[parent.parent]);
    for (const auto& [name, number] : parent.numbers) set(*numbers.at(name), number);
  }
}

void PlanCuts::end() {
  for (const auto& undo : std::exchange(undo_, {})) undo();
}

template <class Value>
void PlanCuts::set(Value& place, const Value& value) {
  undo_.push_back([&place, before = place] { place = before; });
  place = value;
}

void PlanCuts::replace(const torch::nn::Module& layer, Forward forward) {
  if (find_child(&layer) == nullptr) return;
  replace_forward(&layer, std::move(forward));
  undo_.push_back([&layer] { replace_forward(&layer, {}); });
}

void PlanCuts::begin(const LayerCut& cut) {
  auto& module = layer(cut);
  if (cut.style == tp::kReplicated) {  // each rank computes a part with it, and gradients are added
    for (auto& parameter : module.parameters(/*recurse=*/false)) {
      const bool has_gradient = parameter.requires_grad();
      const auto hook = parameter.requires_grad_(true).register_hook(
          [team = team_](const at::Tensor& gradient) { return tp::all_reduce(gradient, team); });
      parameter.requires_grad_(has_gradient);
      undo_.push_back([parameter, hook] { parameter.remove_hook(hook); });
    }
    return;
  }
  if (auto* words = dynamic_cast<torch::nn::EmbeddingImpl*>(&module)) {
    begin_embedding(cut, *words);
  } else {
    begin_linear(cut, *dynamic_cast<torch::nn::LinearImpl*>(&module));
  }
}

void PlanCuts::begin_embedding(const LayerCut& cut, torch::nn::EmbeddingImpl& layer) {
  for (const auto& [name, number] : cut.numbers) {
    if (name == "num_embeddings") set(layer.options.num_embeddings(), *number);
    if (name == "embedding_dim") set(layer.options.embedding_dim(), *number);
    if (name == "padding_idx") set(layer.options.padding_idx(), number);
  }
  const auto call = [cut, team = team_, &layer](const at::Tensor& words) {
    return tp::embedding(cut, team, words, layer.weight);
  };
  replace(layer, forward_of(cut, team_, 0, call));
  if (!value::is_slice(layer.weight)) return;
  value::layer_of(layer.weight).embedding = [call, &layer, alive = layer.weak_from_this()](
                                                const at::Tensor& weight,
                                                const at::Tensor& words) -> std::optional<at::Tensor> {
    const auto held = alive.lock();
    if (held == nullptr || !is_own(weight, layer.weight)) return std::nullopt;
    return call(words);
  };
}

void PlanCuts::begin_linear(const LayerCut& cut, torch::nn::LinearImpl& layer) {
  for (const auto& [name, number] : cut.numbers) {
    if (name == "in_features") set(layer.options.in_features(), *number);
    if (name == "out_features") set(layer.options.out_features(), *number);
  }
  auto ready = cut;
  ready.by_parent = tp::is_by_columns(cut.style) || cut.chosen;  // its input is copied once for all that are given it
  const auto call = [cut = ready, team = team_, heads = heads_of(cut), &layer](const at::Tensor& given,
                                                                               const at::Tensor& bias) {
    const auto input = cut.by_parent ? tp::copied(given, team) : given;
    const auto output = tp::linear(cut, team, input, layer.weight, bias);
    if (cut.by_parent) tp::note_given(cut.part, heads);
    if (cut.style == "rowwise") tp::note_taken();
    return output;
  };
  const auto child = [call, &layer](const at::Tensor& given) { return call(given, layer.bias); };
  replace(layer, forward_of(cut, team_, layer.weight.size(0), child));
  if (!value::is_slice(layer.weight)) return;
  value::layer_of(layer.weight).linear = [call, &layer, alive = layer.weak_from_this()](
                                             const at::Tensor& weight, const at::Tensor& given,
                                             const at::Tensor& bias) -> std::optional<at::Tensor> {
    const auto held = alive.lock();
    if (held == nullptr || !is_own(weight, layer.weight)) return std::nullopt;
    return call(given, bias);
  };
  if (!value::is_slice(layer.bias)) return;
  value::layer_of(layer.bias).addend =
      [cut, team = team_, &layer, alive = layer.weak_from_this()](const at::Tensor& bias) -> std::optional<at::Tensor> {
    const auto held = alive.lock();
    if (held == nullptr || !is_own(bias, layer.bias)) return std::nullopt;
    const auto own = tp::own(bias);
    return tp::is_by_columns(cut.style) ? own : tp::gather(own, {-1, cut.sizes}, team);
  };
}

}  // namespace lamina::frontend
