// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/plans.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>

#include "lamina/base/error.h"
#include "lamina/base/joined.h"
#include "lamina/base/name_pattern.h"
#include "lamina/base/outer.h"
#include "lamina/base/str.h"
#include "lamina/config/user_value.h"

namespace lamina::tensor_parallel {
namespace {

using StyleOf = std::map<std::string, std::string>;  // by the layer's name in the model

constexpr double kLeastAlike = 0.4;  // for a name to be offered in the place of a wrong one

template <class... Words>
base::UsageError plan_error(const Words&... words) {
  return base::UsageError(base::str(words...), base::Code{"tp-plan"});
}

std::string joined(const std::string& name, std::string_view below) {
  return name.empty() ? std::string(below) : base::str(name, ".", below);
}

std::string parent_name(const std::string& name) { return std::string(base::outer(name)); }

bool is_in(std::string_view name, const std::string& module) {
  return module.empty() || name == module || name.starts_with(module + ".");
}

bool is_in_one_of(std::string_view name, const std::vector<std::string>& modules) {
  return std::ranges::any_of(modules, [&](const auto& each) { return is_in(name, each); });
}

// "*" stands for one part of a name, or for some letters of one.
bool matches(std::string_view pattern, std::string_view name) {
  const auto star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == name;
  if (!name.starts_with(pattern.substr(0, star))) return false;
  for (auto end = star + 1; end <= name.size() && name[end - 1] != '.'; ++end) {
    if (matches(pattern.substr(star + 1), name.substr(end))) return true;
  }
  return false;
}

std::string nearest(std::string_view given, const std::vector<std::string_view>& known) {
  const auto found = known.empty() ? "" : config::nearest_of(given, known, kLeastAlike);
  return found.empty() ? "" : base::str(", the nearest is \"", found, "\"");
}

void require_known(const std::string& style, const std::string& pattern, const std::string& whose) {
  const std::vector<std::string_view> known(std::begin(kStyles), std::end(kStyles));
  if (style == kWhole || std::ranges::find(known, style) != known.end()) return;
  throw plan_error(whose, " has the style \"", style, "\" for \"", pattern, "\"", nearest(style, known), "; known are ",
                   base::joined(known));
}

class Planner {
 public:
  Planner(const ModelModules& model, int degree, bool in_parts) : model_(model), degree_(degree), in_parts_(in_parts) {
    std::set<std::size_t> seen;
    for (std::size_t row = 0; row < model.names.size(); ++row) {
      rows_.emplace(name(row), row);
      if (seen.insert(model.names[row].second).second) firsts_.push_back(row);
    }
  }

  PlannedLayers plan() {
    for (const auto row : firsts_) read_plans(row);
    for (const auto row : firsts_) plan_layer(row);
    leave_out_passed_by();
    PlannedLayers planned{{}, std::move(found_), {}, tied()};
    planned.elsewhere = elsewhere(planned.layers);
    for (const auto* layers : {&planned.layers, &planned.elsewhere}) {
      for (const auto& layer : *layers) planned.parents.emplace(layer.parent, parent_of(layer));
    }
    return planned;
  }

 private:
  const std::string& name(std::size_t row) const { return model_.names[row].first; }
  const ModelModule& module(std::size_t row) const { return model_.modules.at(model_.names[row].second); }

  // The rows of the modules under one, with itself.
  std::pair<std::size_t, std::size_t> tree(std::size_t row) const {
    auto end = row + 1;
    while (end < model_.names.size() && is_in(name(end), name(row))) ++end;
    return {row, end};
  }

  // The names of modules under one, as they are there.
  std::vector<std::string_view> names_below(std::size_t row) const {
    std::vector<std::string_view> names;
    const auto [begin, end] = tree(row);
    const auto prefix = name(row).empty() ? 0 : name(row).size() + 1;
    for (auto each = begin + 1; each < end; ++each) names.push_back(std::string_view(name(each)).substr(prefix));
    return names;
  }

  std::vector<std::string> parameters_below(std::size_t row) const {
    std::vector<std::string> parameters;
    const auto [begin, end] = tree(row);
    const auto prefix = name(row).empty() ? 0 : name(row).size() + 1;
    for (auto each = begin; each < end; ++each) {
      for (const auto& [parameter, id] : module(each).parameters) {
        parameters.push_back(joined(name(each), parameter).substr(prefix));
      }
    }
    return parameters;
  }

  void read_plans(std::size_t row) {
    const auto& here = module(row);
    if (!here.own_style.empty()) own_[name(row)] = here.own_style;
    if (here.own_plan) read_own_plan(row, *here.own_plan);
    if (!here.is_marked) return;
    for (const auto& [layer, style] : known_styles(here.classes)) known_[joined(name(row), layer)] = style;
    if (here.plan) {
      for (const auto& [layer, style] : by_plan(row, *here.plan, /*is_own=*/false)) {
        given_[layer] = style;
        heads_[layer] = here.heads;
      }
      led_.push_back(name(row));
    } else if (!here.transformers_plan.empty() && has_transformers_plan(here.classes) &&
               !is_in_one_of(name(row), led_)) {
      for (const auto& [layer, style] : by_transformers_plan(row)) transformers_[layer] = style;
      led_.push_back(name(row));
    }
  }

  void read_own_plan(std::size_t row, const OwnPlan& plan) {
    if (in_parts_ && plan.is_stack) stacks_.push_back(name(row));
    const bool is_inside = is_in_one_of(name(row), stacks_);
    const auto styles = by_plan(row, is_inside ? plan.in_parts : plan.styles, /*is_own=*/true);
    const bool has_part = is_inside || std::ranges::any_of(styles, [](const auto& each) {
                            return !style_by_parent(each.second).empty();
                          });
    for (const auto& [layer, style] : styles) (has_part ? inside_ : own_)[layer] = style;
  }

  StyleOf by_plan(std::size_t row, const Styles& plan, bool is_own) const {
    const auto names = names_below(row);
    const auto whose = "the plan of " + module(row).type;
    StyleOf styles;
    for (const auto& [pattern, given] : plan) {
      const auto style = style_of_alias(given);
      if (!is_own || style_by_parent(given).empty()) require_known(style, pattern, whose);
      bool is_there = false;
      for (const auto each : names) {
        if (!matches(pattern, each)) continue;
        styles[joined(name(row), each)] = style;
        is_there = true;
      }
      if (!is_there) throw matches_nothing(whose, pattern, names);
    }
    return styles;
  }

  static base::UsageError matches_nothing(const std::string& whose, const std::string& pattern,
                                          const std::vector<std::string_view>& names) {
    std::vector<std::string> patterns;
    for (const auto each : names) patterns.push_back(base::as_pattern(each));
    return plan_error(whose, " has \"", pattern, "\", which matches no module",
                      nearest(pattern, {patterns.begin(), patterns.end()}));
  }

  // The styles of a plan that is for models of all sizes and options: it may name what this one lacks.
  StyleOf by_transformers_plan(std::size_t row) const {
    const auto& plan = module(row).transformers_plan;
    const auto names = names_below(row);
    const auto parameters = parameters_below(row);
    const auto whose = "transformers' plan of " + module(row).type;
    std::vector<std::string> whole;
    for (const auto& [pattern, style] : plan) {
      for (const auto each : names) {
        if (!matches(pattern, each)) continue;
        if (is_of_experts(style)) whole.emplace_back(each);
        if (is_of_latent_keys(style)) whole.emplace_back(base::outer(each));
      }
    }
    StyleOf styles;
    for (const auto& [pattern, given] : plan) {
      const auto style = style_of_alias(given);
      for (const auto each : names) {
        if (!matches(pattern, each) || is_in_one_of(each, whole)) continue;
        require_known(style, pattern, whose);
        styles[joined(name(row), each)] = style;
      }
      for (const auto& each : parameters) {
        if (!matches(pattern, each) || is_in_one_of(each, whole)) continue;
        throw plan_error(whose, " slices the parameter ", each,
                         ", which is not available: give a plan of your own with lamina.set_tensor_parallelism(model, "
                         "plan={...}), without it");
      }
    }
    return styles;
  }

  // The style that a plan has for a layer; "" for none.
  std::string asked(const std::string& layer) const {
    for (const auto* styles : {&inside_, &given_, &own_, &known_, &transformers_}) {
      if (const auto found = styles->find(layer); found != styles->end()) return found->second;
    }
    return "";
  }

  // The style of a Linear that is sliced wherever it is: one that would become another.
  std::string alone(std::size_t row) const {
    const auto& here = module(row);
    const bool is_cut = !name(row).empty() && is_plain_linear(here.classes) && here.is_replaced &&
                        here.in_features >= degree_ && !reads_weights(module(rows_.at(parent_name(name(row)))).classes);
    return is_cut ? "rowwise_split_input" : "";
  }

  void plan_layer(std::size_t row) {
    const auto wanted = asked(name(row));
    if (wanted.empty() && places_.contains(name(row))) return;  // beside another layer, and cut with it
    const auto style = wanted.empty() ? alone(row) : wanted;
    const bool is_wanted = module(row).is_marked || own_.contains(name(row)) || inside_.contains(name(row));
    if (style.empty() || style == kWhole || !is_wanted) return;
    if (module(row).wrapped) {
      plan_wrapper(row, inner_of(row), style);
    } else {
      add(row, {name(row), model_.names[row].second}, style);
    }
  }

  // A layer under the name that it has in a plan.
  struct NamedLayer {
    std::string name;
    std::size_t module = 0;
  };

  // A wrapper, as peft's, and the layers in it that have slices: see [Note: wrappers].
  void plan_wrapper(std::size_t row, const NamedLayer& inner, const std::string& style) {
    const auto& here = module(row);
    if (!style_by_parent(style).empty()) {
      throw base::UsageError(
          base::str(name(row), " (", here.type,
                    ") has the place of a layer of lamina.nn, whose exchanges with other ranks it does not know: mark "
                    "the model with replace=False, or slice a model of your own by a plan"),
          base::Code{"tp-layer"});
    }
    const auto kind = kind_of(model_.modules[inner.module].classes);
    const bool is_linear = kind == LayerKind::kLinear || kind == LayerKind::kConv1d;
    const bool gives_parts = is_by_columns(style);
    const bool takes_parts = style == "rowwise" && is_linear;
    if (is_of_low_rank(row, inner.module)) {
      add(row, inner, style);
      if (style == "colwise") add_linears(row, "lora_B", style);
      if (style == "rowwise") add_linears(row, "lora_A", style);
      return;
    }
    if (only_calls(here.classes) && !here.has_variant) {
      add(row, inner, gives_parts ? "colwise_gather_output" : takes_parts ? "rowwise_split_input" : style);
    }
    if (gives_parts || takes_parts) add(row, {name(row), inner.module}, style, /*is_around=*/true);
  }

  // The layer in a wrapper, or in several around each other.
  NamedLayer inner_of(std::size_t row) const {
    NamedLayer inner{name(row), model_.names[row].second};
    while (const auto& wrapped = model_.modules.at(inner.module).wrapped) {
      inner = {joined(inner.name, wrapped->first), wrapped->second};
    }
    return inner;
  }

  // True for a wrapper that adds a product of two small layers to what one layer gives, and nothing else.
  bool is_of_low_rank(std::size_t row, std::size_t inner) const {
    std::set<std::uint64_t> known;
    for (const auto part : {"base_layer", "lora_A", "lora_B"}) {
      const auto found = rows_.find(joined(name(row), part));
      if (found == rows_.end()) return false;
      const bool fits = part == std::string_view("base_layer") ? model_.names[found->second].second == inner
                                                               : has_linears(found->second);
      if (!fits) return false;
      known.merge(parameters_in(found->second));
    }
    return !module(row).has_variant && std::ranges::includes(known, parameters_in(row));
  }

  bool has_linears(std::size_t row) const {
    const auto [begin, end] = tree(row);
    for (auto each = begin + 1; each < end; ++each) {
      if (parent_name(name(each)) == name(row) && kind_of(module(each).classes) != LayerKind::kLinear) return false;
    }
    return true;
  }

  std::set<std::uint64_t> parameters_in(std::size_t row) const {
    std::set<std::uint64_t> numbers;
    const auto [begin, end] = tree(row);
    for (auto each = begin; each < end; ++each) {
      for (const auto& [parameter, number] : module(each).parameters) numbers.insert(number);
    }
    return numbers;
  }

  void add_linears(std::size_t row, std::string_view part, const std::string& style) {
    std::set<std::size_t> seen;
    const auto [begin, end] = tree(rows_.at(joined(name(row), part)));
    for (auto each = begin; each < end; ++each) {
      const bool is_new = seen.insert(model_.names[each].second).second;
      if (is_new && kind_of(module(each).classes) == LayerKind::kLinear) {
        add(row, {name(each), model_.names[each].second}, style);
      }
    }
  }

  // A layer of the module of a row, which is itself or a wrapper.
  void add(std::size_t row, const NamedLayer& layer, const std::string& style, bool is_around = false) {
    const auto& part = model_.modules[layer.module];
    const auto plain = style_by_parent(style);
    PlannedLayer planned;
    planned.name = layer.name;
    planned.type = part.type;
    planned.kind = kind_of(part.classes);
    planned.style = plain.empty() ? style : std::string(plain);
    planned.layer = layer.module;
    planned.member = model_.names[row].second;
    planned.parent = model_.names[called(row)].second;
    if (const auto said = heads_.find(name(row)); said != heads_.end()) planned.heads = said->second;
    planned.may_stay_whole = !given_.contains(name(row));
    planned.by_parent = !plain.empty();
    planned.is_around = is_around;
    const auto [place, is_new] = places_.emplace(layer.name, found_.size());
    if (is_new) {
      found_.push_back(std::move(planned));
    } else {
      found_[place->second] = std::move(planned);
    }
  }

  // The nearest module around one that is called.
  std::size_t called(std::size_t row) const {
    auto place = parent_name(name(row));
    while (!place.empty() && is_list(module(rows_.at(place)).classes)) place = parent_name(place);
    return rows_.at(place);
  }

  // Layers that no script has asked for stay whole beside one whose forward would never reach its slice.
  void leave_out_passed_by() {
    std::set<std::size_t> passed_by;
    for (const auto& each : found_) {
      if (each.may_stay_whole && !model_.modules[each.layer].reaches_base) passed_by.insert(each.parent);
    }
    std::erase_if(found_, [&](const auto& each) { return each.may_stay_whole && passed_by.contains(each.parent); });
  }

  // Layers of these that are in other modules, too, which compute with what they give.
  std::vector<PlannedLayer> elsewhere(const std::vector<PlannedLayer>& layers) const {
    std::map<std::size_t, std::vector<std::size_t>> parents;  // of a module in all of its places
    for (std::size_t row = 0; row < model_.names.size(); ++row) {
      parents[model_.names[row].second].push_back(model_.names[called(row)].second);
    }
    std::vector<PlannedLayer> result;
    for (const auto& layer : layers) {
      std::set<std::size_t> seen{layer.parent};
      for (const auto parent : parents.at(layer.member)) {
        if (!seen.insert(parent).second) continue;
        result.push_back(layer);
        result.back().parent = parent;
      }
    }
    return result;
  }

  ParentModule parent_of(const PlannedLayer& layer) const {
    const auto& parent = model_.modules[layer.parent];
    const auto row = std::ranges::find(firsts_, layer.parent, [&](auto each) { return model_.names[each].second; });
    return {name(*row), parent.type, is_of_transformers(parent.classes), {}};
  }

  // The names of each parameter that several modules have; a module with several names is one.
  std::vector<std::vector<std::string>> tied() const {
    std::vector<std::vector<std::string>> names;
    std::map<std::uint64_t, std::size_t> places;
    for (const auto row : firsts_) {
      for (const auto& [parameter, number] : module(row).parameters) {
        const auto [place, is_new] = places.emplace(number, names.size());
        if (is_new) names.emplace_back();
        names[place->second].push_back(joined(name(row), parameter));
      }
    }
    std::erase_if(names, [](const auto& each) { return each.size() < 2; });
    return names;
  }

  const ModelModules& model_;
  int degree_;
  bool in_parts_;
  std::map<std::string, std::size_t> rows_;  // by name
  std::vector<std::size_t> firsts_;          // one row for each module: its first one
  StyleOf known_, transformers_, given_, own_;
  StyleOf inside_;  // of modules that have a part in exchanges, so that no plan of a script's counts
  std::map<std::string, std::optional<SaidHeads>> heads_;
  std::vector<std::string> led_;     // modules with a plan for all that is under them
  std::vector<std::string> stacks_;  // modules with activations in parts of positions
  std::vector<PlannedLayer> found_;
  std::map<std::string, std::size_t> places_;  // in found_, by name
};

}  // namespace

PlannedLayers plan_layers(const ModelModules& model, int degree, bool in_parts) {
  return Planner(model, degree, in_parts).plan();
}

std::vector<std::string> marked_but_whole(const ModelModules& model, const std::set<std::string>& sliced) {
  std::vector<std::string> types;
  std::set<std::size_t> seen;
  for (const auto& [name, number] : model.names) {
    const auto& module = model.modules.at(number);
    const bool is_whole = seen.insert(number).second && module.is_marked && !sliced.contains(name);
    if (!is_whole || module.parameters.empty()) continue;
    if (std::ranges::find(types, module.type) == types.end()) types.push_back(module.type);
  }
  return types;
}

}  // namespace lamina::tensor_parallel
