// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/environment/progress.h"
#include "lamina/launch/ranks/rank_end.h"
#include "lamina/launch/ranks/rank_process.h"
#include "lamina/launch/ranks/watch.h"

namespace lamina::launch {

// Signs of life of the ranks: the steps they report (environment/progress.h), and whether a signal stopped them,
// which the kernel tells. A job hangs when no rank has begun or ended a step for the whole timeout, which counts from
// the start of the ranks on.
class RankHealth {
 public:
  using Clock = base::Clock;

  explicit RankHealth(std::optional<std::chrono::seconds> hang_timeout) : hang_timeout_(hang_timeout) {}

  // The end of a socket that a rank is to report on; the other end is kept here under its local rank, counted from 0. A
  // rank that is started again is another one.
  base::Fd add(int i);

  void watch(Watch& watch);                         // takes reports
  void take_stops(const RankProcess& rank, int i);  // after SIGCHLD; `i` is the local rank
  void forget(int i);                               // it has ended

  // Returns what the rank said as it ended because of another one's error, or nothing. Before `forget`.
  std::optional<std::string> consequence(int i);

  // Takes whether a process that reports in the place of the rank's own, a child of a shell's, is stopped: the kernel
  // tells that of own children only.
  void look(const RankProcess& rank, int i);
  bool is_stopped(int i) const { return people_[i].stopped.has_value(); }

  // How the rank's end looks in what it reported. Before `forget`.
  RankEnd seen(int i, RankEnd end);

  // True once per stop, when the rank has been stopped for a while.
  bool stopped_long(int i);
  bool hangs() const;
  // Says that the rank computes, as it seems, and has kept another one waiting for so long that this is about to end by
  // an error, or the job hangs.
  bool is_stuck(int i) const;
  // True when the rank has been stopped for so long that the ranks of other machines have ended without it.
  bool outlived(int i) const;
  // When one of these may become true; of the first one where some are to make steps.
  std::optional<base::Deadline> next(bool works) const;

  bool has_left(int i) const { return people_[i].left; }         // it said that the job goes on without it
  bool is_given_up(int i) const { return people_[i].given_up; }  // others said so
  bool has_stepped(int i) const { return people_[i].heard.has_value(); }

  bool joins(int i) const;                                  // it waits for others in init
  bool came(int i) const { return people_[i].came; }        // to init
  bool has_met(int i) const { return people_[i].has_met; }  // the others there
  bool left_out(int i);                                     // true once, when the rank has ended and never came to init

  std::string words(int i) const;             // "in step 12 for 31 s", "stopped (SIGSTOP) after step 11, 31 s ago"
  std::optional<pid_t> process(int i) const;  // the one that reported
  const std::optional<std::chrono::seconds>& hang_timeout() const { return hang_timeout_; }

 private:
  struct Person {
    base::Fd socket;
    environment::Progress last;
    std::optional<pid_t> reporter;
    std::optional<Clock::time_point> heard;
    std::optional<Clock::time_point> stopped;
    int stop_signal = 0;
    std::optional<std::chrono::milliseconds> patience;  // of ranks on other machines, which it has told
    std::optional<std::chrono::milliseconds> timeout;   // of its waits
    std::optional<Clock::time_point> waits;             // for others, since then
    std::optional<Clock::time_point> changed;           // it began to wait or to compute, or a step of its
    bool told = false;
    bool behind = false;   // a shell, or the like, whose child it is
    bool came = false;     // to init
    bool joining = false;  // it waits for others there
    bool has_met = false;  // them, once
    bool missed = false;   // it was said that it has not come
    bool ended = false;
    bool closed = false;  // it said that its session is over
    bool left = false;    // and that others go on
    bool given_up = false;
    std::optional<std::string> consequence;
  };
  static std::optional<Clock::time_point> outlived_at(const Person& person);
  void take(Person& person);
  void give_up(std::int64_t process);
  std::optional<Clock::time_point> is_kept_too_long_at(const Person& person) const;
  Clock::time_point last_heard() const;

  const Clock::time_point began_ = Clock::now();
  const std::optional<std::chrono::seconds> hang_timeout_;
  std::deque<Person> people_;
  Clock::time_point last_end_ = began_;  // of a rank
};

}  // namespace lamina::launch
