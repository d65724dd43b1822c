// SPDX-License-Identifier: Apache-2.0
// Answers to what a script asks about its rank and the others.
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/dist/current.h"
#include "lamina/dist/dist.h"
#include "lamina/dist/ranks.h"

namespace lamina::dist {
namespace {

int ask(const std::string& name) {
  const auto said = told(name, environment::process_environment());
  const Current* current = find_current();
  if (current == nullptr) return said.value_or(value_in(environment::World(), name));
  const int value = value_in(current->world, name);
  if (!said || *said == value) return value;
  throw base::UsageError(base::str(name, " is ", *said, " in the environment, but ", value,
                                   " since initialize_dist(): leave what the launcher set as it is"),
                         base::Code{"group-environment-changed"});
}

}  // namespace

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
