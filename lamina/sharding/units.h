// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lamina::sharding {

// [Note: units of rules] A model's children are roots, whose modules are looked at from the inside out. The word of a
// module decides; else it is a unit where its root's function says so, or where more than a least number of elements of
// it are in no unit yet. A root takes what remains; where its own word is no, all of it stays whole, and so does what
// is in no root. A module that nobody calls is no unit, and neither is one for which nothing remains.
enum class Rule : std::uint8_t { kWhole, kRoot, kWord, kFunction, kSize };

// The name under which a face shows it.
std::string_view name_of(Rule rule);

// A module of a model, and what is said of it.
struct AskedModule {
  std::string name;  // its path
  bool called = true;
  std::optional<bool> word;     // its own
  bool by_function = false;     // its root's says yes
  std::vector<int> parameters;  // numbers of all in it, and in modules in it
};

struct RuledUnit {
  std::string name;
  Rule rule;
  std::vector<int> parameters;  // each is in one unit
};

// The units of a model, and what stays whole of it, in the order of its modules: parents before children, the model
// itself first. `sizes`: elements of each parameter.
std::vector<RuledUnit> units_by_rules(std::span<const AskedModule> modules, std::span<const std::int64_t> sizes,
                                      double least);

}  // namespace lamina::sharding
