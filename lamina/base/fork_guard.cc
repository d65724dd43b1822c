// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace lamina::base {
namespace {

// Never destroyed: a process may fork while it ends.
struct Guarded {
  std::mutex mutex;
  std::set<int> fds;
};

Guarded& guarded() {
  static Guarded& the = *new Guarded;
  static const int registered = pthread_atfork([] { guarded().mutex.lock(); }, [] { guarded().mutex.unlock(); },
                                               [] {
                                                 for (const int fd : guarded().fds) ::close(fd);
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
  all.fds.insert(fd);
}

void keep_in_forked_children(int fd) {
  Guarded& all = guarded();
  std::lock_guard guard(all.mutex);
  all.fds.erase(fd);
}

}  // namespace lamina::base
