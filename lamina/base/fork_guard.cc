// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/fork_guard.h"

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

namespace lamina::base {
namespace {

// Says of a descriptor which file it is: that of a library may have been closed, and its number given to another.
struct Identity {
  dev_t device = 0;
  ino_t node = 0;
  bool operator==(const Identity&) const = default;
};

Identity identity_of(int fd) {
  struct stat found{};
  return ::fstat(fd, &found) == 0 ? Identity{found.st_dev, found.st_ino} : Identity{};
}

// Never destroyed: a process may fork while it ends.
struct Guarded {
  std::mutex mutex;
  std::map<int, Identity> fds;
};

Guarded& guarded() {
  static Guarded& the = *new Guarded;
  static const int registered = pthread_atfork([] { guarded().mutex.lock(); }, [] { guarded().mutex.unlock(); },
                                               [] {
                                                 for (const auto& [fd, identity] : guarded().fds) {
                                                   if (identity_of(fd) == identity) ::close(fd);
                                                 }
                                                 guarded().fds.clear();
                                                 guarded().mutex.unlock();
                                               });
  (void)registered;
  return the;
}

}  // namespace

void close_in_forked_children(int fd) {
  Guarded& all = guarded();
  std::lock_guard guard(all.mutex);
  all.fds[fd] = identity_of(fd);
}

void keep_in_forked_children(int fd) {
  Guarded& all = guarded();
  std::lock_guard guard(all.mutex);
  all.fds.erase(fd);
}

}  // namespace lamina::base
