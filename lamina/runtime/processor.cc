// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/processor.h"

#include <sched.h>
#include "lamina/base/deadline.h"

namespace lamina::runtime {
namespace {

using base::Clock;
constexpr std::chrono::microseconds kWorthAMove(100);

}  // namespace

void Processor::leave() {
  if (Clock::now() - begin_ >= kWorthAMove) last_ = ::sched_getcpu();
}

void Processor::return_to_it() {
  begin_ = Clock::now();
  const int last = last_;
  cpu_set_t allowed;
  if (last < 0 || last >= CPU_SETSIZE || last == ::sched_getcpu()) return;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0 || !CPU_ISSET(last, &allowed)) return;
  cpu_set_t there;
  CPU_ZERO(&there);
  CPU_SET(last, &there);
  if (::sched_setaffinity(0, sizeof there, &there) == 0) ::sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace lamina::runtime
