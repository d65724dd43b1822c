// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/ids.h"
#include "lamina/environment/world.h"

namespace c10d {
class Backend;
class ProcessGroup;
class Store;
}  // namespace c10d

namespace lamina::collective {

struct BackendOptions {
  c10::intrusive_ptr<c10d::Store> store;  // the group's own
  int rank = 0;                           // in the group
  std::vector<base::Rank> members;        // world ranks
  std::chrono::milliseconds timeout;      // for each operation that says nothing else
  std::optional<base::Deadline> made_by;  // none: the group is made within `timeout`
  std::function<void()> check_interrupt;  // in threads that wait; may throw. Empty: nobody interrupts
  std::function<void()> check_members;    // while the group is made; throws when one is lost
  std::string gloo_host;                  // where Gloo listens; "": where the machine's name leads
};

// The address on which Gloo is to listen for the other ranks: that of this machine's device that leads to MASTER_ADDR.
// A machine's name may lead to its loopback device, as Debian installs it, where no other machine comes. "" in a world
// that nobody launched, and where GLOO_SOCKET_IFNAME names another interface.
std::string gloo_host(const environment::World& world);

// This member's end of a group for tensors of the CPU, under torch's rules for a backend. It works over shared memory
// where all members are processes of one user on one host (shared_memory/communicator.h). Elsewhere it is Gloo's, and
// the first member says why. Collective over the group. Throws, within the time-out, base::TimeoutError that names who
// has not come; base::PeerError, base::Error.
c10::intrusive_ptr<c10d::Backend> make_backend(const BackendOptions& options);

// Gloo's, whatever the members share.
c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendOptions& options);

// Has the next collective of a backend of Gloo's, which compares nothing, go by that number, the same on all members.
// One that another member does not begin then waits, where Gloo's threads would end the process for bytes that do not
// fit. Does nothing to another backend.
void number_next(c10d::Backend& backend, std::uint32_t number);

// torch's group of these members, whose tensors of the CPU such a backend carries.
c10::intrusive_ptr<c10d::ProcessGroup> make_group(const BackendOptions& options,
                                                  const c10::intrusive_ptr<c10d::Backend>& backend);

}  // namespace lamina::collective
