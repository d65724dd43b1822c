// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/ranks.h"

#include <algorithm>
#include <map>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/whole_number.h"
#include "lamina/dist/current.h"
#include "lamina/dist/dist.h"

namespace lamina::dist {
namespace {

constexpr const char* kContract[] = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                     "MASTER_ADDR", "MASTER_PORT"};

int number(const std::string& name, const std::string& text) {
  if (const auto value = base::whole_number(text)) return *value;
  throw base::ConfigError(base::str(name, ": '", text, "' is not allowed; expected a launcher's integer"));
}

int of(const environment::World& world, const std::string& name) {
  const std::map<std::string, int> values = {{"RANK", static_cast<int>(world.rank.value)},
                                             {"WORLD_SIZE", world.size},
                                             {"LOCAL_RANK", world.local_rank},
                                             {"LOCAL_WORLD_SIZE", world.local_size},
                                             {"NODE_RANK", world.node_rank}};
  return values.at(name);
}

int ask(const std::string& name) {
  const auto said = told(name, environment::process_environment());
  const Current* current = find_current();
  if (current == nullptr) return said.value_or(of(environment::World(), name));
  const int value = of(current->world, name);
  if (!said || *said == value) return value;
  throw base::UsageError(base::str(name, " is ", *said, " in the environment, but ", value,
                                   " since initialize_dist(): leave what the launcher set as it is"));
}

}  // namespace

std::optional<int> told(const std::string& name, const environment::Environment& environment) {
  if (const auto text = environment(name)) return number(name, *text);
  const auto set = [&](const char* each) { return environment(each).has_value(); };
  const bool by_torchrun = set("RANK") || set("WORLD_SIZE");
  if (by_torchrun && !std::ranges::all_of(kContract, set)) return {};
  const auto world = environment::read_world(environment);
  return world.launched ? std::optional(of(world, name)) : std::nullopt;
}

environment::World world_to_meet(const environment::Environment& environment) {
  const bool single = environment("WORLD_SIZE") == "1" && environment("RANK").value_or("0") == "0";
  return single ? environment::World() : environment::read_world(environment);
}

int get_world_size() { return ask("WORLD_SIZE"); }
int get_global_rank() { return ask("RANK"); }
int get_local_world_size() { return ask("LOCAL_WORLD_SIZE"); }
int get_local_rank() { return ask("LOCAL_RANK"); }
int get_node_rank() { return ask("NODE_RANK"); }

Sampler get_sampler(std::int64_t size, const SamplerOptions& options) {
  return Sampler({.size = size,
                  .num_replicas = options.num_replicas == 0 ? get_world_size() : options.num_replicas,
                  .rank = options.rank < 0 ? get_global_rank() : options.rank,
                  .shuffle = options.shuffle,
                  .seed = options.seed,
                  .drop_last = options.drop_last,
                  .exact = options.exact});
}

}  // namespace lamina::dist
