// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/rank_health.h"

#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/ranks/error.h"

namespace lamina::launch {
namespace {

constexpr std::chrono::seconds kStopIsLong{3};
// Others notice at their own time, end, and let go of what they have.
constexpr std::chrono::seconds kOthersEnd{3};

constexpr std::chrono::seconds kLookAgain{1};
// The part of its patience after which a wait shows that another rank is stuck.
constexpr double kTooLong = 0.8;

// Returns true for a process that a signal has stopped, and nothing where the kernel does not tell.
std::optional<bool> is_stopped(pid_t process) {
  std::ifstream file(base::str("/proc/", process, "/stat"));
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  const auto name = text.rfind(") ");  // the name may hold anything
  if (name == std::string::npos || name + 2 >= text.size()) return std::nullopt;
  return text[name + 2] == 'T';
}

std::int64_t seconds_since(RankHealth::Clock::time_point then) {
  return std::chrono::duration_cast<std::chrono::seconds>(RankHealth::Clock::now() - then).count();
}

}  // namespace

base::Fd RankHealth::add(int i) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    throw StartError("cannot make a socket: " + base::system_error());
  }
  if (i == static_cast<int>(people_.size())) people_.emplace_back();
  people_[i] = {.socket = base::Fd(ends[0])};
  return base::Fd(ends[1]);
}

void RankHealth::watch(Watch& watch) {
  for (Person& person : people_) {
    if (person.socket) watch.add(person.socket.get(), POLLIN, [this, &person] { take(person); });
  }
}

void RankHealth::take(Person& person) {
  using environment::Progress;
  std::vector<char> datagram(sizeof(Progress) + Progress::kMostWords);
  ssize_t count = 0;
  while ((count = ::recv(person.socket.get(), datagram.data(), datagram.size(), MSG_DONTWAIT)) > 0) {
    Progress progress;
    if (count < static_cast<ssize_t>(sizeof progress)) continue;
    std::memcpy(&progress, datagram.data(), sizeof progress);
    if (progress.inside == Progress::kConsequence) {
      person.consequence.emplace(datagram.data() + sizeof progress, static_cast<std::size_t>(count) - sizeof progress);
    }
    if (count != sizeof progress || progress.inside == Progress::kConsequence) continue;
    if (progress.inside == Progress::kLost) {
      give_up(progress.step);
      continue;
    }
    person.reporter = progress.process;
    if (progress.inside == Progress::kJoining) {
      person.came = true;
      person.joining = progress.step != 0;
      person.has_met = person.has_met || !person.joining;
      continue;
    }
    if (progress.inside == Progress::kPatience) {
      person.patience = std::chrono::milliseconds(progress.step);
      continue;
    }
    if (progress.inside == Progress::kTimeout) {
      person.timeout = std::chrono::milliseconds(progress.step);
      continue;
    }
    if (progress.inside == Progress::kWaits) {
      person.changed = Clock::now();
      person.waits = progress.step != 0 ? person.changed : std::nullopt;
      continue;
    }
    if (progress.inside == Progress::kLeaves) {
      person.left = true;
      continue;
    }
    if (progress.inside == Progress::kClosed) {
      person.closed = true;
      person.patience.reset();
      person.timeout.reset();
      person.waits.reset();
      continue;
    }
    person.closed = false;
    person.last = progress;
    person.heard = person.changed = Clock::now();
  }
  if (count == 0 || (errno != EAGAIN && errno != EINTR)) person.socket.reset();
}

void RankHealth::give_up(std::int64_t process) {
  for (Person& person : people_) {
    if (!person.ended && person.reporter == process) person.given_up = true;
  }
}

void RankHealth::take_stops(const RankProcess& rank, int i) {
  Person& person = people_[i];
  if (person.behind) return look(rank, i);
  siginfo_t info{};
  while (::waitid(P_PIDFD, static_cast<id_t>(rank.fd()), &info, WSTOPPED | WCONTINUED | WNOHANG) == 0 &&
         info.si_pid != 0) {
    if (info.si_code == CLD_STOPPED) {
      person.stopped = Clock::now();
      person.stop_signal = info.si_status;
    } else {
      person.stopped.reset();
    }
    person.told = false;
    info = {};
  }
}

void RankHealth::look(const RankProcess& rank, int i) {
  Person& person = people_[i];
  person.behind = person.reporter.value_or(rank.pid()) != rank.pid();
  if (!person.behind) return;
  const auto stopped = launch::is_stopped(*person.reporter);
  if (!stopped || *stopped == person.stopped.has_value()) return;
  person.stopped = *stopped ? std::optional(Clock::now()) : std::nullopt;
  person.stop_signal = SIGSTOP;
  person.told = false;
}

void RankHealth::forget(int i) {
  people_[i].ended = true;
  people_[i].stopped.reset();
  people_[i].waits.reset();
  people_[i].socket.reset();
  last_end_ = Clock::now();
}

std::optional<std::string> RankHealth::consequence(int i) {
  if (people_[i].socket) take(people_[i]);
  return people_[i].consequence;
}

RankEnd RankHealth::seen(int i, RankEnd end) {
  end.consequence = consequence(i).has_value();
  const Person& person = people_[i];
  if (end.failed() || !person.heard || person.closed) return end;
  end.left = person.last.inside != 0 ? RankEnd::Left::kInStep : RankEnd::Left::kInSession;
  end.step = person.last.step;
  return end;
}

bool RankHealth::stopped_long(int i) {
  Person& person = people_[i];
  if (!person.stopped || person.told || Clock::now() - *person.stopped < kStopIsLong) return false;
  person.told = true;
  return true;
}

std::optional<RankHealth::Clock::time_point> RankHealth::outlived_at(const Person& person) {
  if (!person.stopped || !person.patience) return std::nullopt;
  return *person.stopped + *person.patience + kOthersEnd;
}

bool RankHealth::outlived(int i) const {
  const auto at = outlived_at(people_[i]);
  return at && Clock::now() >= *at;
}

RankHealth::Clock::time_point RankHealth::last_heard() const {
  auto last = last_end_;
  for (const Person& person : people_) {
    if (person.heard) last = std::max(last, *person.heard);
  }
  return last;
}

bool RankHealth::joins(int i) const { return people_[i].joining && !people_[i].ended; }

bool RankHealth::left_out(int i) {
  Person& person = people_[i];
  return person.ended && !person.came && !std::exchange(person.missed, true);
}

bool RankHealth::hangs() const { return hang_timeout_ && Clock::now() - last_heard() >= *hang_timeout_; }

std::optional<RankHealth::Clock::time_point> RankHealth::is_kept_too_long_at(const Person& person) const {
  if (!person.waits || !person.timeout) return std::nullopt;
  const auto end = *person.waits + std::chrono::duration_cast<Clock::duration>(kTooLong * *person.timeout);
  return hang_timeout_ ? std::min(end, std::max(*person.waits, last_heard() + *hang_timeout_)) : end;
}

bool RankHealth::is_stuck(int i) const {
  const Person& rank = people_[i];
  if (rank.waits || rank.ended || rank.joining || rank.closed || !rank.changed) return false;
  return std::ranges::any_of(people_, [&](const Person& person) {
    const auto at = is_kept_too_long_at(person);
    return at && Clock::now() >= *at && *rank.changed <= *person.waits;
  });
}

std::optional<base::Deadline> RankHealth::next(bool works) const {
  std::optional<Clock::time_point> at;
  const auto soonest = [&](Clock::time_point time) { at = std::min(at.value_or(time), time); };
  if (hang_timeout_ && works) soonest(last_heard() + *hang_timeout_);
  for (const Person& person : people_) {
    if (person.behind && !person.ended) soonest(Clock::now() + kLookAgain);
    if (person.stopped && !person.told) soonest(*person.stopped + kStopIsLong);
    if (const auto outlived = outlived_at(person)) soonest(*outlived);
    if (const auto at = is_kept_too_long_at(person)) soonest(std::max(*at, Clock::now() + kLookAgain));
  }
  return at ? std::optional(base::Deadline::after(*at - Clock::now())) : std::nullopt;
}

std::optional<pid_t> RankHealth::process(int i) const { return people_[i].reporter; }

std::string RankHealth::words(int i) const {
  const Person& person = people_[i];
  if (person.ended) return "has ended";
  const std::string stopped = person.stopped ? base::str("stopped by ", signal_name(person.stop_signal), " ",
                                                         seconds_since(*person.stopped), " s ago, ")
                                             : "";
  if (!person.heard) return stopped + "never reported a step";
  const auto quiet = seconds_since(*person.heard);
  if (person.last.inside != 0) return base::str(stopped, "in step ", person.last.step, " for ", quiet, " s");
  return base::str(stopped, "after step ", person.last.step, " for ", quiet, " s");
}

}  // namespace lamina::launch
