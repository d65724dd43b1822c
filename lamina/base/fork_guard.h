// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lamina::base {

// From now on a child made by fork() (a data loader's worker) closes its copy of `fd` at once. Descriptors that close
// on exec need this too: such a child never calls exec.
void close_in_forked_children(int fd);

// Ends that; to be called before `fd` is closed.
void keep_in_forked_children(int fd);

}  // namespace lamina::base
