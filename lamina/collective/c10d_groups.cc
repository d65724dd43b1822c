// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/c10d_groups.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/collective/device_backend.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"
#include "lamina/rendezvous/job_store.h"

namespace lamina::collective {

C10dGroups::C10dGroups(const environment::World& world, std::string name, std::chrono::milliseconds timeout,
                       std::function<void()> check_interrupt, MakeBackend make_backend)
    : world_(world),
      name_(std::move(name)),
      timeout_(timeout),
      check_interrupt_(std::move(check_interrupt)),
      make_backend_(make_backend) {
  if (world.launched) {
    store_ = rendezvous::JobStore({world.master_addr, world.master_port, rendezvous::hosts_store(world.rank),
                                   base::Deadline::after(timeout), check_interrupt_})
                 .c10d();
  } else {
    store_ = c10::make_intrusive<c10d::HashStore>();
  }
  store_->setTimeout(timeout);
}

C10dGroups::~C10dGroups() = default;

c10::intrusive_ptr<c10d::ProcessGroup> C10dGroups::make(const std::string& label, std::span<const base::Rank> members,
                                                        std::function<void()> check_members) {
  std::string names;
  int own = -1;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] == world_.rank) own = static_cast<int>(i);
    names += base::str(i == 0 ? "" : ",", members[i]);
  }
  if (own < 0)
    throw base::UsageError(base::str("rank ", world_.rank, " is not among the ranks ", names),
                           base::Code{"group-not-made"});
  BackendOptions options{.rank = own,
                         .members = {members.begin(), members.end()},
                         .timeout = timeout_,
                         .check_interrupt = check_interrupt_,
                         .check_members = std::move(check_members),
                         .gloo_host = gloo_host(world_)};
  options.store = c10::make_intrusive<c10d::PrefixStore>(base::str(name_, "/", label, "/", names), store_);
  try {
    auto group = make_group(options, make_backend_(options));
    if (const auto device = devices::rank_device(); !devices::is_host(device)) {
      auto apart = options;  // both run collectives in an order of their own
      apart.store = c10::make_intrusive<c10d::PrefixStore>("device", options.store);
      group->setBackend(device.type(), c10d::ProcessGroup::BackendType::GLOO,
                        make_device_backend(apart, make_backend_(apart)));
    }
    return group;
  } catch (const base::Error&) {
    throw;
  } catch (const std::exception& error) {
    throw base::PeerError(
        base::str("the process group ", label, " of ranks ", names, " could not be made: ", error.what()), std::nullopt,
        base::Code{"group-not-made"});
  }
}

}  // namespace lamina::collective
