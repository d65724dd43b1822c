// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>
#include <sys/types.h>

namespace lamina::pipeline {

// [Note: handoff] The thread that gets the slot goes on where the one before it computed: there a processor falls free,
// whose caches know the model. Left alone, the system wakes it beside a busy thread of another rank as often as not;
// where ranks fill the processors that made a step a third longer. It is a place to wake up in and no more: should
// somebody else keep that processor busy, the system moves the thread.
//
// A thread that waits for another of this process, asleep until it is woken. Copies speak of the same thread.
class Handoff {
 public:
  Handoff();  // the calling thread waits
  // By the thread that is about to wake it and to sleep: it will wake up on that thread's processor. Where the system
  // does not allow it, nothing changes.
  void come_here();
  // By both threads, once it was woken: gives it back the processors that it had.
  void let_go();

 private:
  pid_t thread_;
  cpu_set_t processors_{};
  bool moved_ = false;
};

}  // namespace lamina::pipeline
