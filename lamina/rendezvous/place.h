// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace lamina::rendezvous {

// [Note: place] Where a process is, as far as shared memory goes. Two containers of one machine have one kernel, so UCX
// takes them for neighbours. Yet its wake-up through an abstract Unix socket does not leave its network namespace.
// Memory, too, has a name in one IPC namespace, one /dev/shm and for one user only. Ranks share memory where all of
// these are known and the same, and talk over the network elsewhere. As both ends compare the same two texts, they
// agree, pair by pair.
std::string own_place();

// True of the places of two ranks that may share memory.
bool share_memory(const std::string& a, const std::string& b);

// The name of this machine, for people.
std::string host_name();

}  // namespace lamina::rendezvous
