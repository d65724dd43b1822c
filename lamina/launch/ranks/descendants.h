// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <chrono>
#include <vector>

#include "lamina/base/deadline.h"

// Processes that ranks leave behind: their own children, also those that moved to other process groups or sessions.
// Once this process has adopted them, a descendant whose parent dies becomes its child, and can be ended and reaped.
namespace lamina::launch {

// A killed process is gone within milliseconds, unless it hangs in the kernel: then nobody can help.
inline constexpr std::chrono::seconds kReapLimit{2};

void adopt_descendants();

// Reaps the ended children that are not in `ranks`, where the kernel lists them. Never blocks.
void reap_adopted(const std::vector<pid_t>& ranks);

// Kills and reaps all children, and theirs as they are adopted; but for the child `spared` and its own, where the
// kernel lists children. False if some are left at the deadline, which is later where it does not. SIGCHLD has to be
// blocked.
bool end_descendants(const base::Deadline& until, pid_t spared = 0);

}  // namespace lamina::launch
