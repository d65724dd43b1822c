// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/c10d_groups.h"

#include <cstdlib>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/rendezvous/job_store.h"
#include "lamina/rendezvous/socket.h"

namespace lamina::collective {
namespace {

// Gloo listens where the machine's name leads: ranks that meet at the loopback device need nobody to reach them there.
std::string gloo_host(const environment::World& world) {
  if (!world.launched || std::getenv("GLOO_SOCKET_IFNAME") != nullptr) return "";
  const auto here = rendezvous::Address::local_towards(world.master_addr, world.master_port);
  return here.loopback() ? here.host() : "";
}

}  // namespace

C10dGroups::C10dGroups(const environment::World& world, std::string name, std::chrono::milliseconds timeout,
                       std::function<void()> check_interrupt, MakeBackend make_backend)
    : world_(world), name_(std::move(name)), timeout_(timeout), make_backend_(make_backend) {
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
  BackendOptions options{
      .rank = own, .members = {members.begin(), members.end()}, .timeout = timeout_, .gloo_host = gloo_host(world_)};
  options.store = c10::make_intrusive<c10d::PrefixStore>(base::str(name_, "/", label, "/", names), store_);
  try {
    return make_group(options, make_backend_(options));
  } catch (const std::exception& error) {
    throw base::PeerError(
        base::str("the process group ", label, " of ranks ", names, " could not be made: ", error.what()), std::nullopt,
        base::Code{"group-not-made"});
  }
}

}  // namespace lamina::collective
