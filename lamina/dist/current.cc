// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/current.h"

#include <cstdlib>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/str.h"
#include "lamina/dist/dist.h"
#include "lamina/dist/ranks.h"
#include "lamina/faces/sayings.h"
#include "lamina/rendezvous/job_store.h"
#include "lamina/rendezvous/places.h"

namespace lamina::dist {
namespace {

std::unique_ptr<Current> the_current;

void require_device(const std::string& device) {
  if (device == "cpu") return;
  throw base::ConfigError(base::str("initialize_dist: device: \"", device, "\" is not allowed; in C++ it must be cpu"));
}

std::unique_ptr<Current> meet(std::chrono::milliseconds timeout) {
  auto made = std::make_unique<Current>();
  made->world = rendezvous::placed(world_to_meet(environment::process_environment()), {});
  const std::string name = rendezvous::next_meeting("dist/c++");
  if (made->world.launched) made->meeting = std::make_unique<Meeting>(made->world, name, timeout, nullptr);
  made->groups =
      std::make_unique<collective::C10dGroups>(made->world, name, timeout, nullptr, &collective::make_backend);
  std::vector<base::Rank> everybody;
  for (int rank = 0; rank < made->world.size; ++rank) everybody.emplace_back(rank);
  const auto self = made->world.rank;
  auto torchs = made->groups->make("world", everybody);
  made->group = collective::wrap(std::move(torchs), {"WORLD", std::move(everybody), self}, {});
  made->timeout = timeout;
  return made;
}

}  // namespace

Current* find_current() { return the_current.get(); }

collective::Group* group_for(const std::string& what) {
  if (the_current) return the_current->world.size > 1 ? the_current->group.get() : nullptr;
  if (const int size = get_world_size(); size > 1) {
    throw faces::refusal("no-group", what, size, "lamina::dist::initialize_dist()");
  }
  return nullptr;
}

void run(const std::string& what,
         const std::function<collective::Started(collective::Group& group,
                                                 const collective::CallOptions& call_options)>& start) {
  auto& group = *the_current->group;
  const auto told = base::str("[rank ", group.rank(), "/", group.size(), "] ", what, ": ");
  try {
    start(group, {what, {the_current->timeout, nullptr}})->wait();
  } catch (const base::TimeoutError&) {
    throw base::TimeoutError(base::str(told, "the others did not come within ", the_current->timeout.count(),
                                       " ms; give initialize_dist a longer timeout if they need it"),
                             base::Code{"group-late"});
  } catch (const base::PeerError& lost) {
    throw base::PeerError(told + lost.what(), lost.loss());
  }
}

bool is_available() { return true; }
bool is_initialized() { return the_current != nullptr; }

void initialize_dist(const std::string& device, std::chrono::milliseconds timeout) {
  require_device(device);
  if (timeout <= std::chrono::milliseconds(0)) {
    throw base::ConfigError(
        base::str("initialize_dist: timeout: ", timeout.count(), " ms is not allowed; expected more than 0"));
  }
  if (the_current) return;
  [[maybe_unused]] static const int at_exit = std::atexit(destroy_dist);  // a Gloo group must end before torch does
  the_current = meet(timeout);
}

void destroy_dist() {
  const bool stuck = the_current && the_current->group->stuck();  // its end would wait for what others never do
  stuck ? void(the_current.release()) : the_current.reset();
}

}  // namespace lamina::dist
