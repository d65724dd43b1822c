// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/c10d_groups.h"

#include <cstdlib>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/rendezvous/job_store.h"
#include "lamina/rendezvous/socket.h"

namespace lamina::collective {
namespace {

// Gloo listens where the machine's name leads: ranks that meet at the loopback device need nobody to reach them there.
c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> gloo_options(const environment::World& world,
                                                                 std::chrono::milliseconds timeout) {
  if (world.launched && std::getenv("GLOO_SOCKET_IFNAME") == nullptr) {
    const auto here = rendezvous::Address::local_towards(world.master_addr, world.master_port);
    if (here.loopback()) {
      auto options = c10d::ProcessGroupGloo::Options::create(timeout);
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(here.host()));
      return options;
    }
  }
  return c10d::ProcessGroupGloo::Options::create_default(timeout);
}

}  // namespace

C10dGroups::C10dGroups(const environment::World& world, std::string name, std::chrono::milliseconds timeout,
                       std::function<void()> check_interrupt)
    : world_(world), name_(std::move(name)), timeout_(timeout) {
  if (world.launched) {
    store_ = rendezvous::JobStore({world.master_addr, world.master_port, rendezvous::hosts_store(world.rank),
                                   base::Deadline::after(timeout), std::move(check_interrupt)})
                 .c10d();
  } else {
    store_ = c10::make_intrusive<c10d::HashStore>();
  }
  store_->setTimeout(timeout);
}

C10dGroups::~C10dGroups() = default;

c10::intrusive_ptr<c10d::ProcessGroup> C10dGroups::make(const std::string& label, std::span<const base::Rank> members) {
  std::string names;
  int own = -1;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] == world_.rank) own = static_cast<int>(i);
    names += base::str(i == 0 ? "" : ",", members[i]);
  }
  if (own < 0)
    throw base::UsageError(base::str("rank ", world_.rank, " is not among the ranks ", names),
                           base::Code{"group-not-made"});
  const int size = static_cast<int>(members.size());
  const auto store = c10::make_intrusive<c10d::PrefixStore>(base::str(name_, "/", label, "/", names), store_);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, own, size);
  try {
    const auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, own, size, gloo_options(world_, timeout_));
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  } catch (const std::exception& error) {
    throw base::PeerError(
        base::str("the process group ", label, " of ranks ", names, " could not be made: ", error.what()), std::nullopt,
        base::Code{"group-not-made"});
  }
  return group;
}

}  // namespace lamina::collective
