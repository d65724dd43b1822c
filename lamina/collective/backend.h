// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"

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
  std::chrono::milliseconds timeout;      // for the group to be made, and for each operation that says nothing else
  std::function<void()> check_interrupt;  // in threads that wait; may throw. Empty: nobody interrupts
  std::string gloo_host;                  // where Gloo listens; "": where the machine's name leads
};

// This member's end of a group for tensors of the CPU, under torch's rules for a backend: over shared memory where all
// members are processes of one user on one host (shared_memory/communicator.h), else Gloo's, and the first member says
// why. Collective over the group. Throws base::TimeoutError where some do not come in time, base::Error.
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
