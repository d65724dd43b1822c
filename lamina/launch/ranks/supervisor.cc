// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/supervisor.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/launch/ranks/descendants.h"
#include "lamina/launch/ranks/error.h"
#include "lamina/launch/ranks/watch.h"

namespace lamina::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// See [Note: first failure]. A peer's secondary error takes a few milliseconds; a loaded machine gets some more.
constexpr milliseconds kSettle{100};
// A rank that caused the end of another has raised its own error, and unwinds: Python takes a second for that.
constexpr seconds kCauseEnds{3};
// Ranks that hang write their stacks down.
constexpr seconds kStacks{2};
// A killed process is gone within milliseconds, unless it hangs in the kernel.
constexpr seconds kKillLimit{5};

}  // namespace

Supervisor::Supervisor(const Parts& parts) : parts_(parts) {
  for (const RankProcess& rank : parts_.ranks) {
    running_.push_back(&rank);
    comebacks_.began(local(&rank), base::Clock::now());
    if (parts_.joins) newcomers_.insert(local(&rank));
  }
}

Outcome Supervisor::run() {
  while (!running_.empty() || awaits_comeback()) {
    wait();
    parts_.report.lost_output();
    take_orders();
    if (std::exchange(changed_, false)) take_ends();
    start_again();
    end_newcomers();
    blame_missing();
    blame_last_lost();
    check_vitals();
    check_readers();
    advance();
  }
  if (phase_ == Phase::kSettling) fail();
  if (root_cause_.first()) parts_.report.ended_with_it(root_cause_.others());
  return outcome();
}

void Supervisor::wait() {
  Watch watch;
  if (!parts_.control.abandoned()) watch.add(parts_.control.fd(), POLLIN, [] {});
  const auto note = [this] { changed_ = true; };
  watch.add(parts_.children.fd(), POLLIN, note);
  for (const RankProcess* rank : running_) watch.add(rank->fd(), POLLIN, note);
  parts_.health.watch(watch);
  parts_.terminal.watch(watch);
  parts_.pipes.watch(watch);
  if (parts_.doorkeeper != nullptr) parts_.doorkeeper->watch(watch);
  watch.until(deadline_);
  if (phase_ == Phase::kRunning) watch.until(parts_.health.next(working() > 0));
  for (const auto& [rank, end] : stuck_) watch.until(end);
  if (const auto next = comebacks_.next(); next && phase_ == Phase::kRunning) {
    watch.until(base::Deadline::after(*next - base::Clock::now()));
  }
  watch.wait();
}

void Supervisor::take_orders() {
  while (const auto signal = parts_.control.next()) {
    ordered_ = true;
    interrupt(*signal);
  }
  if (parts_.control.abandoned() && phase_ != Phase::kKilling) kill_ranks();
}

void Supervisor::take_ends() {
  while (parts_.children.next()) {
  }
  for (std::size_t i = 0; i < parts_.ranks.size(); ++i) {
    parts_.health.take_stops(parts_.ranks[i], static_cast<int>(i));
  }
  std::vector<std::pair<const RankProcess*, RankEnd>> ended;
  for (const RankProcess* rank : running_) {
    auto end = rank->end();
    if (!end) continue;
    end->out_of_memory = end->signal == SIGKILL && phase_ <= Phase::kSettling && oom_.increased();
    ended.emplace_back(rank, parts_.health.seen(local(rank), *end));
  }
  for (const auto& [rank, end] : ended) {
    const bool has_worked = has_joined(local(rank));
    std::erase(running_, rank);
    newcomers_.erase(local(rank));
    const bool was_lost = this->was_lost(*rank, end);
    const bool was_stuck = stuck_.erase(local(rank)) > 0;
    silenced_.erase(local(rank));
    const bool has_left = !end.failed() && parts_.health.has_left(local(rank));
    const bool may_lose =
        phase_ == Phase::kRunning && !root_cause_.first() && parts_.least && (is_part() || working() >= *parts_.least);
    const bool is_missed = is_awaited(local(rank)) && awaits_others() && !may_begin_again(local(rank));
    if (may_lose && (has_left || (was_lost && !is_missed))) {
      lose(*rank, end, has_left);
      if (was_stuck) parts_.report.stack(rank->rank());
    } else if (may_lose && !has_worked && end.failed()) {
      parts_.report.not_joined(rank->rank(), end, parts_.joins);
      if (!last_lost_) last_lost_ = {rank->rank(), end};
    } else {
      root_cause_.add(rank->rank(), end);
      has_finished_ = has_finished_ || (has_worked && !end.failed());
    }
    parts_.health.forget(local(rank));
    parts_.report.ended(rank->rank(), end);
  }
  std::vector<pid_t> ranks;
  ranks.reserve(parts_.ranks.size());
  for (const RankProcess& rank : parts_.ranks) ranks.push_back(rank.pid());
  reap_adopted(ranks);
}

// A process that was killed is lost to the job. One that has ended itself, by an error, is not: the program has failed.
bool Supervisor::was_lost(const RankProcess& rank, const RankEnd& end) const {
  if (silenced_.contains(local(&rank))) return true;
  return end.signal != 0 && end.signal != SIGABRT && end.signal != SIGPIPE;
}

bool Supervisor::has_joined(int local_rank) const {
  return !newcomers_.contains(local_rank) || parts_.health.has_stepped(local_rank);
}

// The others have not met it in init yet, and do not begin without it.
bool Supervisor::is_awaited(int local_rank) const {
  return !newcomers_.contains(local_rank) && !parts_.health.has_met(local_rank);
}

// The others may know it already, once it has come to init.
bool Supervisor::may_begin_again(int local_rank) const { return parts_.again && !parts_.health.came(local_rank); }

// True where a rank waits in init for all that begin.
bool Supervisor::awaits_others() const {
  return std::ranges::any_of(running_, [this](const RankProcess* rank) {
    return is_awaited(local(rank)) && parts_.health.joins(local(rank));
  });
}

void Supervisor::blame_missing() {
  if (phase_ != Phase::kRunning || root_cause_.first() || !missing_ || !awaits_others()) return;
  root_cause_.add(missing_->rank, missing_->end);
}

// How many of the whole job are left is for ranks to know then.
bool Supervisor::is_part() const {
  return parts_.is_part || (parts_.doorkeeper != nullptr && parts_.doorkeeper->has_others());
}

// How many make the job's steps.
int Supervisor::working() const {
  return static_cast<int>(
      std::ranges::count_if(running_, [this](const RankProcess* rank) { return has_joined(local(rank)); }));
}

void Supervisor::lose(const RankProcess& rank, const RankEnd& end, bool has_left) {
  if (has_left) {
    parts_.report.left_in_order(rank.rank(), working());
  } else {
    parts_.report.lost(rank.rank(), end, working());
    last_lost_ = {rank.rank(), end};
  }
  const bool begins = is_awaited(local(&rank));
  if (begins) missing_ = last_lost_;
  if (!parts_.again || (begins && !may_begin_again(local(&rank)))) return;
  if (const auto pause = comebacks_.ended(local(&rank), end, base::Clock::now())) {
    parts_.report.coming_back(rank.rank(), *pause);
    if (!begins) return;
    beginners_.insert(local(&rank));
    missing_.reset();
  } else {
    parts_.report.given_up(rank.rank(), base::str("it has ended in the same way twice, within ",
                                                  Comebacks::kQuick.count(), " s of its start each time"));
  }
}

// Others of the job, on other machines, may go on meanwhile.
bool Supervisor::awaits_comeback() const {
  return is_part() && phase_ == Phase::kRunning && !root_cause_.first() && !has_finished_ &&
         comebacks_.next().has_value();
}

// Where all ranks of this machine are lost, and none comes back, they have failed here.
void Supervisor::blame_last_lost() {
  if (!running_.empty() || !last_lost_ || has_finished_ || awaits_comeback() || root_cause_.first()) return;
  root_cause_.add(last_lost_->rank, last_lost_->end);
}

// Starts those whose time has come, unless the job comes to its end.
void Supervisor::start_again() {
  if (phase_ != Phase::kRunning || root_cause_.first() || has_finished_) return;
  if (running_.empty() && !awaits_comeback()) return;
  while (const auto place = comebacks_.due(base::Clock::now())) {
    RankProcess& rank = parts_.ranks[*place];
    const bool joins = beginners_.erase(*place) == 0;
    try {
      rank = parts_.again(*place, joins);
    } catch (const StartError& error) {
      parts_.report.given_up(rank.rank(), error.what());
      if (!joins) missing_ = last_lost_;
      continue;
    }
    comebacks_.began(*place, base::Clock::now());
    if (joins) newcomers_.insert(*place);
    running_.push_back(&rank);
    parts_.report.started(rank.rank(), rank.pid());
  }
}

// Where the others have ended in order, nobody is left for newcomers to join.
void Supervisor::end_newcomers() {
  if (phase_ != Phase::kRunning || root_cause_.first() || !has_finished_ || working() > 0) return;
  for (const RankProcess* rank : running_) {
    rank->signal_group(SIGKILL);
    parts_.report.given_up(rank->rank(), "the job is over");
  }
  running_.clear();
}

// One that stands still does not know that the others go on, and must not do as if it were one of them when it wakes.
void Supervisor::end_given_up() {
  for (const RankProcess* rank : running_) {
    const int i = local(rank);
    const bool is_lost = parts_.health.is_given_up(i) || (parts_.least && parts_.health.outlived(i));
    if (!is_lost || !silenced_.insert(i).second) continue;
    parts_.report.silent(rank->rank());
    rank->signal_group(SIGKILL);
  }
}

// One of which a thread hangs keeps all others waiting. They go on without it before their waits end by errors.
void Supervisor::end_stuck() {
  if (!parts_.least) return;
  for (const RankProcess* rank : running_) {
    const int i = local(rank);
    if (const auto found = stuck_.find(i); found != stuck_.end()) {
      if (found->second.expired()) rank->signal_group(SIGKILL);
    } else if (parts_.health.is_stuck(i) && silenced_.insert(i).second) {
      parts_.report.stuck(rank->rank(), parts_.health.words(i));
      show_stack(*rank);
      stuck_.emplace(i, base::Deadline::after(kStacks));
    }
  }
}

void Supervisor::check_vitals() {
  if (phase_ != Phase::kRunning || root_cause_.first() || running_.empty()) return;
  end_given_up();
  end_stuck();
  const auto joins =
      std::ranges::find_if(running_, [&](const RankProcess* rank) { return parts_.health.joins(local(rank)); });
  for (std::size_t i = 0; joins != running_.end() && i < parts_.ranks.size(); ++i) {
    if (beginners_.contains(static_cast<int>(i)) || !parts_.health.left_out(static_cast<int>(i))) continue;
    parts_.report.awaited(parts_.ranks[i].rank(), (*joins)->rank());
  }
  for (const RankProcess* rank : running_) {
    parts_.health.look(*rank, local(rank));
    if (!parts_.health.stopped_long(local(rank))) continue;
    parts_.report.stopped(rank->rank(), parts_.health.process(local(rank)).value_or(rank->pid()));
  }
  const auto outlived = std::ranges::find_if(
      running_, [&](const RankProcess* rank) { return !parts_.least && parts_.health.outlived(local(rank)); });
  if (outlived != running_.end()) {
    abort_hung(base::str("rank ", (*outlived)->rank(),
                         " has been stopped for longer than timeout_s: ranks on other machines have ended without it"));
  } else if (working() > 0 && parts_.health.hangs() && stuck_.empty()) {
    abort_hung(base::str("the job hangs: no rank has begun or ended a step for ", parts_.health.hang_timeout()->count(),
                         " s (--hang-timeout)"));
  }
}

// A closed pipe ends the job, as it would have ended rank 0 without --tee.
void Supervisor::check_readers() {
  const int error = parts_.terminal.error();
  if (error == 0 || !parts_.pipes.tee() || std::exchange(unshown_, true)) return;
  if (error != EPIPE) return parts_.report.unshown(error);
  if (phase_ == Phase::kRunning || phase_ == Phase::kSettling) interrupt(SIGPIPE);
}

void Supervisor::advance() {
  const bool late = deadline_ && deadline_->expired();
  if (root_cause_.first() && (phase_ == Phase::kRunning || awaits_cause_)) settle();
  if (running_.empty()) return;
  if (phase_ == Phase::kSettling && (late || (!hung_ && root_cause_.certain()))) {
    fail();
    end_ranks();
  } else if (phase_ == Phase::kEnding && late) {
    parts_.report.killing(left(), parts_.grace);
    kill_ranks();
  } else if (phase_ == Phase::kKilling && late) {
    parts_.report.left(left());
    running_.clear();
  }
}

void Supervisor::settle() {
  // A stopped rank ends by no error of its own: nobody waits for that.
  const bool may_end =
      std::ranges::any_of(running_, [&](const RankProcess* rank) { return !parts_.health.is_stopped(local(rank)); });
  const bool consequence = root_cause_.first()->end.consequence && may_end;
  if (awaits_cause_ && consequence) return;
  enter(Phase::kSettling, consequence ? milliseconds(kCauseEnds) : kSettle);
  awaits_cause_ = consequence;
}

void Supervisor::fail() {
  if (std::exchange(told_, true)) return;
  if (hung_) return parts_.report.stacks();
  const auto& first = *root_cause_.first();
  const auto place = std::ranges::find(parts_.ranks, first.rank, &RankProcess::rank) - parts_.ranks.begin();
  parts_.report.failed(first, root_cause_.left(), parts_.health.consequence(static_cast<int>(place)).value_or(""));
}

// Python writes its stacks down when it is told to abort (PYTHONFAULTHANDLER), and ends.
void Supervisor::show_stack(const RankProcess& rank) const {
  const auto reporter = parts_.health.process(local(&rank));  // it may be a child of the rank's, under a shell
  const pid_t process = reporter && ::getpgid(*reporter) == rank.pid() ? *reporter : rank.pid();
  ::kill(process, SIGABRT);
  ::kill(process, SIGCONT);
}

void Supervisor::abort_hung(const std::string& why) {
  hung_ = true;
  root_cause_.close();
  Report::Places places;
  for (const RankProcess* rank : running_) places.emplace_back(rank->rank(), parts_.health.words(local(rank)));
  parts_.report.hung(why, places);
  for (const RankProcess* rank : running_) show_stack(*rank);
  enter(Phase::kSettling, kStacks);
}

void Supervisor::interrupt(int signal) {
  if (phase_ == Phase::kEnding) return kill_ranks();
  if (phase_ == Phase::kKilling) return;
  take_ends();  // what had failed before the signal stays the reason
  if (root_cause_.first() || hung_) {
    fail();
  } else if (!running_.empty() || awaits_comeback()) {
    interruption_ = signal;
    parts_.report.interrupted(signal, static_cast<int>(running_.size()));
  }
  end_ranks();
}

void Supervisor::end_ranks() {
  root_cause_.close();
  enter(Phase::kEnding, parts_.grace);
  signal_groups(SIGTERM);
  signal_groups(SIGCONT);  // a stopped process takes SIGTERM only when it goes on
}

void Supervisor::kill_ranks() {
  root_cause_.close();
  enter(Phase::kKilling, kKillLimit);
  signal_groups(SIGKILL);
}

void Supervisor::enter(Phase phase, milliseconds limit) {
  phase_ = phase;
  awaits_cause_ = false;
  deadline_ = base::Deadline::after(limit);
}

int Supervisor::local(const RankProcess* rank) const { return static_cast<int>(rank - parts_.ranks.data()); }

std::vector<base::Rank> Supervisor::left() const {
  std::vector<base::Rank> ranks;
  for (const RankProcess* rank : running_) ranks.push_back(rank->rank());
  return ranks;
}

// Also those of ranks that have ended: their children may live on.
void Supervisor::signal_groups(int signal) const {
  for (const RankProcess& rank : parts_.ranks) rank.signal_group(signal);
}

Outcome Supervisor::outcome() const {
  if (interruption_ != 0) return {.exit_code = 128 + interruption_};
  const bool again = !ordered_ && !parts_.control.abandoned();
  if (hung_) return {.exit_code = Outcome::kHung, .again = again};
  if (!root_cause_.first()) return {.exit_code = parts_.control.abandoned() ? 128 + SIGKILL : 0};
  return {.exit_code = root_cause_.first()->end.exit_code(), .again = again, .end = root_cause_.first()->end};
}

}  // namespace lamina::launch
