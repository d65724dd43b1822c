// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/supervisor.h"

#include <poll.h>

#include <algorithm>

#include "lamina/launch/descendants.h"

namespace lamina::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// See [Note: first failure]. A peer's secondary error takes a few milliseconds; a loaded machine gets some more.
constexpr milliseconds kSettle{200};
// After a failure: time to close files and leave, not to save a checkpoint, which without the lost rank is not whole.
constexpr seconds kGraceAfterFailure{5};
// After Ctrl-C: somebody is waiting. With what follows it stays below two seconds.
constexpr seconds kGraceAfterSignal{1};
// A killed process is gone within milliseconds, unless it hangs in the kernel.
constexpr seconds kKillLimit{5};

}  // namespace

Supervisor::Supervisor(const std::vector<RankProcess>& ranks, Signals& signals, const Report& report)
    : signals_(signals), report_(report), ranks_(ranks) {
  for (const RankProcess& rank : ranks) running_.push_back(&rank);
}

int Supervisor::run() {
  while (!running_.empty()) {
    wait();
    take_signals();
    take_ends();
    advance();
  }
  if (phase_ == Phase::kSettling) report_.failed(*verdict_.first());
  if (verdict_.first()) report_.ended_with_it(verdict_.others());
  return exit_code();
}

void Supervisor::wait() {
  std::vector<pollfd> events{{.fd = signals_.fd(), .events = POLLIN, .revents = 0}};
  for (const RankProcess* rank : running_) events.push_back({.fd = rank->fd(), .events = POLLIN, .revents = 0});
  int limit_ms = -1;
  if (deadline_) {
    const auto left = std::chrono::ceil<milliseconds>(deadline_->at() - base::Deadline::Clock::now());
    limit_ms = static_cast<int>(std::max(left, milliseconds{0}).count());
  }
  ::poll(events.data(), events.size(), limit_ms);
}

void Supervisor::take_signals() {
  while (auto signal = signals_.next()) {
    if (*signal != SIGCHLD) interrupt(*signal);
  }
}

void Supervisor::take_ends() {
  std::erase_if(running_, [this](const RankProcess* rank) {
    const auto end = rank->end();
    if (end) verdict_.add(rank->rank(), *end);
    return end.has_value();
  });
  std::vector<pid_t> ranks;
  ranks.reserve(ranks_.size());
  for (const RankProcess& rank : ranks_) ranks.push_back(rank.pid());
  reap_adopted(ranks);
}

void Supervisor::advance() {
  const bool late = deadline_ && deadline_->expired();
  if (phase_ == Phase::kRunning && verdict_.first()) enter(Phase::kSettling, kSettle);
  if (running_.empty()) return;
  if (phase_ == Phase::kSettling && (late || verdict_.certain())) {
    report_.failed(*verdict_.first());
    end_ranks(kGraceAfterFailure);
  } else if (phase_ == Phase::kEnding && late) {
    for (const RankProcess* rank : running_) report_.killing(rank->rank(), grace_);
    kill_ranks();
  } else if (phase_ == Phase::kKilling && late) {
    for (const RankProcess* rank : running_) report_.left(rank->rank());
    running_.clear();
  }
}

void Supervisor::interrupt(int signal) {
  if (phase_ == Phase::kEnding) return kill_ranks();
  if (phase_ == Phase::kKilling) return;
  take_ends();  // what had failed before the signal stays the reason
  if (verdict_.first()) {
    report_.failed(*verdict_.first());
  } else if (!running_.empty()) {
    interruption_ = signal;
    report_.interrupted(signal, static_cast<int>(running_.size()));
  }
  end_ranks(kGraceAfterSignal);
}

void Supervisor::end_ranks(seconds grace) {
  verdict_.close();
  grace_ = grace;
  enter(Phase::kEnding, grace);
  signal_groups(SIGTERM);
  signal_groups(SIGCONT);  // a stopped process takes SIGTERM only when it goes on
}

void Supervisor::kill_ranks() {
  enter(Phase::kKilling, kKillLimit);
  signal_groups(SIGKILL);
}

void Supervisor::enter(Phase phase, milliseconds limit) {
  phase_ = phase;
  deadline_ = base::Deadline::after(limit);
}

// Also those of ranks that have ended: their children may live on.
void Supervisor::signal_groups(int signal) const {
  for (const RankProcess& rank : ranks_) rank.signal_group(signal);
}

int Supervisor::exit_code() const {
  if (interruption_ != 0) return 128 + interruption_;
  return verdict_.first() ? verdict_.first()->end.exit_code() : 0;
}

}  // namespace lamina::launch
