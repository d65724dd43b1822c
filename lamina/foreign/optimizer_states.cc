// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/optimizer_states.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>

#include "lamina/base/str.h"

namespace lamina::foreign {

using archive::Kind;
using archive::SavedTensor;

namespace {

using nlohmann::json;

constexpr std::string_view kGroups = "param_groups.", kState = "state.", kParameters = "params";

// The place of a word that begins a name, or follows a dot in it.
std::size_t find_word(std::string_view name, std::string_view word) {
  for (auto at = name.find(word); at != std::string_view::npos; at = name.find(word, at + 1)) {
    if (at == 0 || name[at - 1] == '.') return at;
  }
  return std::string_view::npos;
}

bool is_number(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char each) { return each >= '0' && each <= '9'; });
}

// GroupOptions by the group's number, or by the parameter's name, in the order in which they come.
struct GroupOptions {
  std::vector<std::pair<std::string, json>> groups;

  json& of(std::string_view group) {
    const auto found = std::ranges::find(groups, group, &std::pair<std::string, json>::first);
    if (found != groups.end()) return found->second;
    return groups.emplace_back(group, json::object()).second;
  }
};

bool has_names(const json& group) {
  const auto names = group.find(kParameters);
  return names != group.end() && names->is_array() &&
         std::ranges::all_of(*names, [](const auto& name) { return name.is_string(); });
}

// The groups with the names of their parameters; null where they do not tell these.
json groups_of(const GroupOptions& options) {
  auto groups = json::array();
  if (std::ranges::all_of(options.groups, [](const auto& each) { return is_number(each.first); })) {
    for (const auto& [_, group] : options.groups) {
      if (!has_names(group)) return nullptr;
      groups.push_back(group);
    }
    return groups;
  }
  std::vector<json> seen;
  for (const auto& [name, own] : options.groups) {
    auto place = std::ranges::find(seen, own);
    if (place == seen.end()) {
      groups.push_back(own);
      groups.back()[kParameters] = json::array();
      place = seen.insert(seen.end(), own);
    }
    groups[static_cast<std::size_t>(place - seen.begin())][kParameters].push_back(name);
  }
  return groups;
}

std::set<std::string> names_in(const json& groups) {
  std::set<std::string> names;
  for (const auto& group : groups) {
    for (const auto& name : group[kParameters]) names.insert(name.get<std::string>());
  }
  return names;
}

// The parameter and the state that a name has behind "optim.state."; none where it is of another thing.
std::optional<std::pair<std::string, std::string>> state_in(std::string_view name, const std::string& prefix,
                                                            const std::set<std::string>& parameters) {
  const auto begin = base::str(prefix, kState);
  if (!name.starts_with(begin)) return std::nullopt;
  const auto dot = name.rfind('.');
  if (dot < begin.size()) return std::nullopt;
  std::string parameter(name.substr(begin.size(), dot - begin.size()));
  if (!parameters.contains(parameter)) return std::nullopt;
  return std::pair(std::move(parameter), std::string(name.substr(dot + 1)));
}

}  // namespace

std::optional<SavedTensor> number_state(const json& value) {
  SavedTensor tensor{.kind = Kind::kState};
  const auto put = [&](layout::DType dtype, const auto& number) {
    tensor.dtype = dtype;
    const auto bytes = std::as_bytes(std::span(&number, 1));
    tensor.value.assign(bytes.begin(), bytes.end());
  };
  if (value.is_boolean()) {
    put(layout::DType::kBool, static_cast<std::uint8_t>(value.get<bool>() ? 1 : 0));
  } else if (value.is_number_integer()) {
    put(layout::DType::kInt64, value.get<std::int64_t>());
  } else if (value.is_number_float()) {
    put(layout::DType::kFloat64, value.get<double>());
  } else if (value.is_null()) {
    tensor.shape = {0};
  } else {
    return std::nullopt;
  }
  return tensor;
}

void take_optimizers(ForeignCheckpoint& checkpoint) {
  std::map<std::string, GroupOptions> all;
  const auto prefix_of = [](const std::string& name) -> std::optional<std::string> {
    const auto at = find_word(name, kGroups);
    return at == std::string::npos ? std::nullopt : std::optional(name.substr(0, at));
  };
  for (const auto& [name, plain] : checkpoint.left) {
    const auto prefix = prefix_of(name);
    if (!prefix || !plain) continue;
    const auto rest = std::string_view(name).substr(prefix->size() + kGroups.size());
    const auto dot = rest.rfind('.');
    if (dot != std::string_view::npos) all[*prefix].of(rest.substr(0, dot))[std::string(rest.substr(dot + 1))] = *plain;
  }
  int number = 0;
  for (const auto& [prefix, options] : all) {
    const auto groups = groups_of(options);
    if (groups.is_null()) continue;
    const auto names = names_in(groups);
    for (auto& tensor : checkpoint.tensors) {
      const auto of = state_in(tensor.name, prefix, names);
      if (!of) continue;
      tensor.kind = Kind::kState;
      tensor.optimizer = number;
      std::tie(tensor.name, tensor.state) = *of;
    }
    std::erase_if(checkpoint.left, [&](const ForeignValue& value) {
      if (value.name.starts_with(base::str(prefix, kGroups))) return true;
      const auto of = state_in(value.name, prefix, names);
      auto tensor = of && value.plain ? number_state(*value.plain) : std::nullopt;
      if (!tensor) return false;
      tensor->optimizer = number;
      std::tie(tensor->name, tensor->state) = std::pair(of->first, base::str(of->second, kNumberState));
      checkpoint.tensors.push_back(*std::move(tensor));
      return true;
    });
    checkpoint.about["optimizers"].push_back({{"groups", groups}, {"rest", json::object()}});
    ++number;
  }
}

}  // namespace lamina::foreign
