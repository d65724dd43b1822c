// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/module_tree.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "lamina/base/error.h"
#include "lamina/base/outer.h"
#include "lamina/base/str.h"

namespace lamina::model {
namespace {

std::string join(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

}  // namespace

std::optional<int> ModuleTree::add(const Module& module) {
  const int above = place_above(module.path);
  Place place{module.path, above};
  const auto [known, is_new] = by_id_.emplace(module.id, static_cast<int>(modules_.size()));
  place.module = known->second;
  if (above >= 0) nodes_[places_[above].node].holds_nothing = false;
  if (is_new) {
    modules_.push_back(enter(module, above < 0 ? nullptr : &places_[above], place));
    hold(module, modules_.back().home);
    if (modules_.back().is_node) module_of_node_.push_back(place.module);
  } else {
    place.node = modules_[place.module].home;
    if (modules_[place.module].is_node) ++nodes_[place.node].places;
  }
  by_path_.emplace(module.path, static_cast<int>(places_.size()));
  places_.push_back(std::move(place));
  if (!is_new || !modules_.back().is_node) return std::nullopt;
  return modules_.back().home;
}

int ModuleTree::place_above(const std::string& path) const {
  if (places_.empty()) return -1;
  const auto found = by_path_.find(std::string(base::outer(path)));
  if (found != by_path_.end() && !path.empty()) return found->second;
  throw base::InternalError(base::str("a tree has no module that holds \"", path, "\""));
}

ModuleTree::Known ModuleTree::enter(const Module& module, const Place* above, Place& place) {
  Known known{0, false, module.draws, module.dynamic, module.keeps_statistics};
  known.line = base::str("module '", module.path, "': ", module.type);
  if (above != nullptr) {
    place.node = above->node;
    place.called = above->called;
    place.closed = above->closed;
    known.home = above->closed ? above->node : above->called;
  }
  known.is_node = above == nullptr || (!above->closed && module.role != Role::kPart);
  if (known.is_node) {
    const bool called = module.role != Role::kContainer;
    known.home = place.node = size();
    if (called) place.called = place.node;
    nodes_.push_back({module.path, above == nullptr ? -1 : above->node, module.id, called, module.placed_at,
                      module.same_everywhere && module.tensors.empty()});
  } else if (!place.closed && module.indivisible) {
    place.node = place.called;  // with what is under it a part of that
  }
  place.closed = place.closed || module.indivisible;
  return known;
}

void ModuleTree::hold(const Module& module, int node) {
  for (const auto& [name, tensor, buffer, has_shape, whole] : module.tensors) {
    if (!tensor.defined()) continue;
    if (!has_shape) {
      throw base::UsageError(
          base::str(join(module.path, name),
                    " has no shape yet (a lazy module): run the model once on an example before it is distributed"),
          base::Code{"model-lazy"});
    }
    auto& all = buffer ? buffers_ : parameters_;
    const auto [found, is_new] =
        holders_.emplace(tensor.unsafeGetTensorImpl(), Holders{static_cast<std::int64_t>(all.size())});
    auto& [number, nodes] = found->second;
    if (is_new) all.push_back({join(module.path, name), tensor, node, whole.empty() ? tensor.sizes().vec() : whole});
    if (std::ranges::find(nodes, node) != nodes.end()) continue;
    nodes.push_back(node);
    if (!buffer) nodes_[node].parameter_ids.push_back(number);
  }
}

std::vector<ModuleTensor> ModuleTree::tensors() const {
  std::vector<ModuleTensor> all = parameters_;
  all.insert(all.end(), buffers_.begin(), buffers_.end());
  return all;
}

const std::vector<int>& ModuleTree::holders(const at::Tensor& tensor) const {
  static const std::vector<int> kNone;
  const auto found = holders_.find(tensor.unsafeGetTensorImpl());
  return found == holders_.end() ? kNone : found->second.nodes;
}

std::unordered_map<std::uintptr_t, int> ModuleTree::homes() const {
  std::unordered_map<std::uintptr_t, int> homes;
  for (const auto& [id, module] : by_id_) homes.emplace(id, modules_[module].home);
  return homes;
}

int ModuleTree::node(std::uintptr_t id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() || !modules_[found->second].is_node ? -1 : modules_[found->second].home;
}

std::vector<std::pair<std::string, int>> ModuleTree::paths() const {
  std::vector<std::pair<std::string, int>> paths;
  for (const auto& place : places_) paths.emplace_back(place.path, modules_[place.module].home);
  return paths;
}

std::vector<bool> ModuleTree::with_any(std::vector<bool> marked) const {
  for (auto place = places_.rbegin(); place != places_.rend(); ++place) {
    if (marked[place->module] && place->parent >= 0) marked[places_[place->parent].module] = true;
  }
  return marked;
}

std::vector<bool> ModuleTree::of_nodes(const std::vector<bool>& of_modules) const {
  std::vector<bool> nodes;
  for (const int module : module_of_node_) nodes.push_back(of_modules[module]);
  return nodes;
}

std::vector<bool> ModuleTree::starts_rng_stream() const {
  std::vector<bool> draws;
  for (const auto& module : modules_) draws.push_back(module.draws);
  return of_nodes(with_any(std::move(draws)));
}

std::vector<bool> ModuleTree::waited_for() const {
  std::vector<bool> waited, statistics;
  std::vector<std::set<int>> parents(modules_.size());
  for (const auto& place : places_) {
    if (place.parent >= 0) parents[place.module].insert(modules_[places_[place.parent].module].home);
  }
  for (const auto& module : modules_) statistics.push_back(module.keeps_statistics);
  statistics = with_any(std::move(statistics));
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    waited.push_back(modules_[i].dynamic || (statistics[i] && parents[i].size() > 1));
  }
  return of_nodes(with_any(std::move(waited)));
}

std::string ModuleTree::description() const {
  std::ostringstream lines;
  for (const auto& module : modules_) lines << module.line << "\n";
  for (const auto& held : tensors()) {
    lines << "tensor '" << held.name << "': (";
    for (std::size_t i = 0; i < held.shape.size(); ++i) lines << (i > 0 ? ", " : "") << held.shape[i];
    lines << ") " << held.tensor.scalar_type() << "\n";
  }
  return lines.str();
}

}  // namespace lamina::model
