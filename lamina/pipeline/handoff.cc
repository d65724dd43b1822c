// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/handoff.h"

#include <unistd.h>

#include <utility>

namespace lamina::pipeline {

Handoff::Handoff() : thread_(::gettid()) {}

void Handoff::come_here() {
  const int processor = ::sched_getcpu();
  if (processor < 0 || processor >= CPU_SETSIZE) return;
  if (::sched_getaffinity(thread_, sizeof processors_, &processors_) != 0 || !CPU_ISSET(processor, &processors_))
    return;
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(processor, &here);
  moved_ = ::sched_setaffinity(thread_, sizeof here, &here) == 0;
}

void Handoff::let_go() {
  if (std::exchange(moved_, false)) ::sched_setaffinity(thread_, sizeof processors_, &processors_);
}

}  // namespace lamina::pipeline
