// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/world.h"

#include <initializer_list>
#include <limits>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/whole_number.h"
#include "lamina/config/problems.h"
#include "lamina/config/scalar.h"
#include "lamina/environment/cluster_task.h"
#include "lamina/environment/rank_contract.h"

namespace lamina::environment {
namespace {

constexpr int kAny = std::numeric_limits<int>::max();

class WorldReader {
 public:
  WorldReader(const Environment& environment, config::Problems& problems)
      : environment_(environment), problems_(problems) {}

  std::string text(const std::string& name) {
    const auto value = environment_(name);
    if (!value)
      problems_.add(name, base::str(name, " is not set, although RANK or WORLD_SIZE is; expected a launcher's value"));
    if (value && value->empty())
      problems_.add(name, base::str(name, ": \"\" is not allowed; expected a launcher's value"));
    return value.value_or("");
  }

  int number(const std::string& name, int low, int high = kAny) {
    const std::string value = text(name);
    if (problems_.concern(name)) return low;
    const auto result = base::whole_number(value);
    if (result && *result >= low && *result <= high) return *result;
    const std::string expected = high == kAny ? base::str("at least ", low) : base::str("from ", low, " to ", high);
    problems_.add(name, config::not_allowed(name, config::show(value), base::str("an integer, ", expected)));
    return low;
  }

  int number_or(std::initializer_list<const char*> names, int otherwise) {
    for (const char* name : names) {
      if (environment_(name)) return number(name, 0);
    }
    return otherwise;
  }

  void check_at_most(const std::string& name, int value, int most, const std::string& size_name, int size) {
    if (value <= most || problems_.concern(name) || problems_.concern(size_name)) return;
    problems_.add(name, base::str(name, ": ", value, " is not allowed with ", size_name, ": ", size,
                                  "; expected at most ", most));
  }

 private:
  const Environment& environment_;
  config::Problems& problems_;
};

// The place that srun or mpirun gave this process.
World cluster_world(const Environment& environment) {
  const auto task = cluster_task(environment);
  if (!task) return {};
  const auto address = environment("MASTER_ADDR");
  const auto port = environment("MASTER_PORT");
  if (!address && task->first_host.empty()) {
    throw base::ConfigError(
        base::str("MASTER_ADDR is not set, and ", task->launcher, " does not tell on which machine rank 0 is: ",
                  "have all ranks started with MASTER_ADDR=<that machine>"),
        base::Code{"start-no-master"});
  }
  config::Problems problems;
  WorldReader reader(environment, problems);
  World world{.rank = base::Rank(task->rank),
              .size = task->size,
              .local_rank = task->local_rank,
              .local_size = task->local_size,
              .node_rank = task->node,
              .master_addr = address.value_or(task->first_host),
              .master_port = port ? reader.number("MASTER_PORT", 1, 65535) : port_of(task->job),
              .launched = true};
  problems.raise("environment of the launcher");
  return world;
}

}  // namespace

World read_world(const Environment& environment) {
  if (environment(kNewcomerVariable)) {
    const auto place = base::whole_number(environment("LOCAL_RANK").value_or("0"));
    const auto node = base::whole_number(environment("NODE_RANK").value_or("0"));
    return {.local_rank = place.value_or(0), .node_rank = node.value_or(0)};  // the first says its device
  }
  if (!environment("RANK") && !environment("WORLD_SIZE")) return cluster_world(environment);
  config::Problems problems;
  WorldReader reader(environment, problems);
  World world;
  world.launched = true;
  const int rank = reader.number("RANK", 0);
  world.rank = base::Rank(rank);
  world.size = reader.number("WORLD_SIZE", 1);
  if (const bool placed = environment("LOCAL_RANK") && environment("LOCAL_WORLD_SIZE"); placed || world.size == 1) {
    world.local_rank = placed ? reader.number("LOCAL_RANK", 0) : 0;
    world.local_size = placed ? reader.number("LOCAL_WORLD_SIZE", 1) : 1;
    world.node_rank = reader.number_or({"NODE_RANK", "GROUP_RANK"}, (rank - world.local_rank) / world.local_size);
  } else {
    world.local_size = 0;  // four variables are all that torch's env:// needs
  }
  world.master_addr = reader.text("MASTER_ADDR");
  world.master_port = reader.number("MASTER_PORT", 1, 65535);
  reader.check_at_most("RANK", rank, world.size - 1, "WORLD_SIZE", world.size);
  if (world.local_size > 0)
    reader.check_at_most("LOCAL_RANK", world.local_rank, world.local_size - 1, "LOCAL_WORLD_SIZE", world.local_size);
  reader.check_at_most("LOCAL_WORLD_SIZE", world.local_size, world.size, "WORLD_SIZE", world.size);
  problems.raise("environment of the launcher");
  return world;
}

}  // namespace lamina::environment
