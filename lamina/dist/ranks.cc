// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/ranks.h"

#include <algorithm>
#include <map>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/whole_number.h"
#include "lamina/rendezvous/master_address.h"

namespace lamina::dist {
namespace {

constexpr const char* kContract[] = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                     "MASTER_ADDR", "MASTER_PORT"};

int number(const std::string& name, const std::string& text) {
  if (const auto value = base::whole_number(text)) return *value;
  throw base::ConfigError(base::str(name, ": '", text, "' is not allowed; expected a launcher's integer"));
}

}  // namespace

int value_in(const environment::World& world, const std::string& name) {
  const std::map<std::string, int> values = {{"RANK", static_cast<int>(world.rank.value)},
                                             {"WORLD_SIZE", world.size},
                                             {"LOCAL_RANK", world.local_rank},
                                             {"LOCAL_WORLD_SIZE", world.local_size},
                                             {"NODE_RANK", world.node_rank}};
  return values.at(name);
}

std::optional<int> told(const std::string& name, const environment::Environment& environment) {
  if (const auto text = environment(name)) return number(name, *text);
  const auto set = [&](const char* each) { return environment(each).has_value(); };
  const bool by_torchrun = set("RANK") || set("WORLD_SIZE");
  if (by_torchrun && !std::ranges::all_of(kContract, set)) return {};
  const auto world = environment::read_world(environment);
  return world.launched ? std::optional(value_in(world, name)) : std::nullopt;
}

environment::World world_to_meet(const environment::Environment& environment) {
  const bool single = environment("WORLD_SIZE") == "1" && environment("RANK").value_or("0") == "0";
  return single ? environment::World() : rendezvous::meeting_outside(environment::read_world(environment));
}

}  // namespace lamina::dist
