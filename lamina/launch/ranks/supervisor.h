// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/launch/ranks/comebacks.h"
#include "lamina/launch/ranks/doorkeeper.h"
#include "lamina/launch/ranks/guardian.h"
#include "lamina/launch/ranks/oom.h"
#include "lamina/launch/ranks/rank_end.h"
#include "lamina/launch/ranks/rank_health.h"
#include "lamina/launch/ranks/rank_pipes.h"
#include "lamina/launch/ranks/rank_process.h"
#include "lamina/launch/ranks/report.h"
#include "lamina/launch/ranks/watch.h"

namespace lamina::launch {

// How one start of the job ended.
struct Outcome {
  int exit_code = 0;           // 0, the first failure's, 128 + the signal that interrupted it, or kHung
  bool again = false;          // it failed by itself, so another start may do better
  std::optional<RankEnd> end;  // of the rank that failed first

  static constexpr int kHung = 124;  // as timeout(1) says it
};

// Watches the ranks until all have ended, and ends them when one fails, when they hang, or when the command says so. It
// sleeps until a rank ends, an order comes or a deadline passes.
//
//   running ──a rank fails──> settling ──the first failure is certain──> ending ──grace is over──> killing
//      ├──── they hang: they show their stacks ──> settling                ^                          ^
//      └──── an order (a second one: killing at once) ─────────────────────┘     the command is gone ─┘
class Supervisor {
 public:
  using Again = std::function<RankProcess(int local_rank, bool joins)>;  // throws StartError
  struct Parts {
    std::vector<RankProcess>& ranks;  // by local rank
    ControlPipe& control;
    Signals& children;  // SIGCHLD
    Report& report;
    RankHealth& health;
    Terminal& terminal;
    RankPipes& pipes;
    std::chrono::seconds grace;
    std::optional<int> least;  // see Options
    const Doorkeeper* doorkeeper = nullptr;
    bool is_part = false;  // ranks of the job are on other machines, too
    bool joins = false;    // these ranks join a job
    // Starts a rank that is lost again: it joins the others, or begins with them, who have not yet. None: nobody is.
    Again again;
  };
  explicit Supervisor(const Parts& parts);

  Outcome run();

 private:
  enum class Phase { kRunning, kSettling, kEnding, kKilling };

  void wait();
  void take_orders();
  void take_ends();
  bool was_lost(const RankProcess& rank, const RankEnd& end) const;
  bool has_joined(int local_rank) const;
  bool is_awaited(int local_rank) const;
  bool may_begin_again(int local_rank) const;
  bool awaits_others() const;
  void blame_missing();
  bool is_part() const;
  int working() const;
  void lose(const RankProcess& rank, const RankEnd& end, bool has_left);
  bool awaits_comeback() const;
  void blame_last_lost();
  void start_again();
  void end_newcomers();
  void advance();
  void check_vitals();
  void end_given_up();
  void end_stuck();
  void check_readers();
  void interrupt(int signal);
  void abort_hung(const std::string& why);
  void show_stack(const RankProcess& rank) const;
  void settle();
  void fail();
  void end_ranks();
  void kill_ranks();
  void enter(Phase phase, std::chrono::milliseconds limit);
  void signal_groups(int signal) const;
  int local(const RankProcess* rank) const;
  std::vector<base::Rank> left() const;  // that still run
  Outcome outcome() const;

  const Parts parts_;
  std::vector<const RankProcess*> running_;
  Comebacks comebacks_;
  std::set<int> silenced_;               // local ranks that were ended, for others go on without them
  std::map<int, base::Deadline> stuck_;  // of these, until when each may show its stack
  std::set<int> newcomers_;              // local ranks that join the others, until they work with them
  std::set<int> beginners_;              // those that are started again before the others have begun
  bool has_finished_ = false;            // a rank has ended in order
  std::optional<RootCause::Failure> last_lost_;
  std::optional<RootCause::Failure> missing_;  // it was lost, and the others cannot begin without it
  RootCause root_cause_;
  OomCounter oom_;
  int interruption_ = 0;  // the signal that ended the job, if one did
  bool ordered_ = false;  // there was an order
  bool hung_ = false;
  bool told_ = false;          // the failure has been reported
  bool unshown_ = false;       // what --tee shows cannot be written, and this has been acted on
  bool awaits_cause_ = false;  // of what has ended as a consequence
  bool changed_ = false;       // a child has ended, stopped or gone on
  Phase phase_ = Phase::kRunning;
  std::optional<base::Deadline> deadline_;  // of the phase
};

}  // namespace lamina::launch
