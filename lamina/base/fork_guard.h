// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

namespace lamina::base {

// From now on a child made by fork() (a data loader's worker) closes its copy of `fd` at once. Descriptors that close
// on exec need this too: such a child never calls exec.
void close_in_forked_children(int fd);

// Ends that; to be called before `fd` is closed.
void keep_in_forked_children(int fd);

// The process that made an object. A child made by fork() has a copy of the object, and none of its threads.
class MadeHere {
 public:
  bool forked() const { return ::getpid() != process_; }  // this is such a child

 private:
  pid_t process_ = ::getpid();
};

}  // namespace lamina::base
