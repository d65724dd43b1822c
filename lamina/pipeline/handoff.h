// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>
#include <sys/types.h>

namespace lamina::pipeline {

// [Note: handoff] The thread that gets the slot goes on where the one before it computed: there a processor falls free,
// whose caches know the model. Left alone, the system wakes it beside a busy thread of another rank as often as not;
// where ranks fill the processors that made a step a third longer.
//
// A thread that waits for another of this process, asleep until it is woken.
class Handoff {
 public:
  Handoff();  // the calling thread waits
  // By the thread that wakes it and is about to sleep: it will wake up on that thread's processor. Where the system
  // does not allow it, nothing changes.
  void come_here();
  // In the thread that waited: gives it back the processors that it had.
  void arrived();

 private:
  pid_t thread_;
  cpu_set_t processors_{};
  bool moved_ = false;
};

}  // namespace lamina::pipeline
