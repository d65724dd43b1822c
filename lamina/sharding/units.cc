// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/units.h"

#include <algorithm>
#include <array>
#include <map>

#include "lamina/base/module_names.h"

namespace lamina::sharding {
namespace {

// Places of all but the model, each after those inside of it.
std::vector<std::size_t> inside_out(std::span<const AskedModule> modules) {
  std::vector<std::size_t> open, all;
  const auto close = [&] {
    all.push_back(open.back());
    open.pop_back();
  };
  for (std::size_t i = 1; i < modules.size(); ++i) {
    while (!open.empty() && !base::is_in_module(modules[i].name, modules[open.back()].name)) close();
    open.push_back(i);
  }
  while (!open.empty()) close();
  return all;
}

}  // namespace

std::string_view name_of(Rule rule) {
  constexpr std::array<std::string_view, 5> kNames{"whole", "root", "_fsdp_wrap", "fsdp_wrap_fn", "min_params"};
  return kNames.at(static_cast<std::size_t>(rule));
}

std::vector<RuledUnit> units_by_rules(std::span<const AskedModule> modules, std::span<const std::int64_t> sizes,
                                      double least) {
  std::map<std::string, bool, std::less<>> stays_whole;  // roots
  for (const auto& each : modules) {
    if (each.name.find('.') == std::string::npos) stays_whole[each.name] = !each.word.value_or(true);
  }
  constexpr std::size_t kModel = 0;
  std::vector<std::optional<std::pair<std::size_t, Rule>>> taken(sizes.size());
  const auto take = [&](std::size_t module, Rule rule) {
    for (const auto parameter : modules[module].parameters) {
      if (!taken[parameter]) taken[parameter] = {module, rule};
    }
  };
  const auto rule_of = [&](const AskedModule& module) -> std::optional<Rule> {
    if (!module.called || !module.word.value_or(true)) return {};
    if (module.word) return Rule::kWord;
    if (module.by_function) return Rule::kFunction;
    std::int64_t left = 0;
    for (const auto parameter : module.parameters) left += taken[parameter] ? 0 : sizes[parameter];
    return static_cast<double>(left) > least ? std::optional(Rule::kSize) : std::nullopt;
  };
  for (const auto i : inside_out(modules)) {
    const auto& name = modules[i].name;
    const auto& [root, whole] = *stays_whole.find(name.substr(0, name.find('.')));
    const auto rule = name == root ? std::optional(whole ? Rule::kWhole : Rule::kRoot)
                      : whole      ? std::nullopt
                                   : rule_of(modules[i]);
    if (rule) take(i, *rule);
  }
  take(kModel, Rule::kWhole);
  std::map<std::size_t, RuledUnit> units;
  for (const auto parameter : modules[kModel].parameters) {
    const auto [module, rule] = *taken[parameter];
    auto& unit = units.try_emplace(module, RuledUnit{modules[module].name, rule, {}}).first->second;
    unit.parameters.push_back(parameter);
  }
  std::vector<RuledUnit> all;
  for (auto& [module, unit] : units) all.push_back(std::move(unit));
  return all;
}

}  // namespace lamina::sharding
