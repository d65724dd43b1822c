// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/attempt.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "lamina/base/log.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/ranks/descendants.h"
#include "lamina/launch/ranks/error.h"
#include "lamina/launch/ranks/rank_health.h"
#include "lamina/launch/ranks/rank_process.h"

namespace lamina::launch {
namespace {

constexpr std::chrono::milliseconds kFirstPause{500};
constexpr std::chrono::milliseconds kLongestPause{60000};

// Ends whatever the ranks left, also when their start failed half-way.
struct DescendantReaper {
  const Preloader* preloader;  // stays for the next start

  ~DescendantReaper() {
    if (end_descendants(base::Deadline::after(kReapLimit), preloader != nullptr ? preloader->pid() : 0)) return;
    base::log_warning("some processes could not be killed");
  }
};

base::Fd open_null() {
  base::Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!null) throw StartError("cannot open /dev/null: " + base::system_error());
  return null;
}

// Starts the ranks one after the other.
class Starter {
 public:
  Starter(const Attempt& attempt, RankPipes& pipes, RankHealth& health)
      : attempt_(attempt), pipes_(pipes), health_(health) {
    if (attempt_.doorkeeper != nullptr) attempt_.doorkeeper->begin();
  }

  RankProcess start(int i, bool again = false, bool joins = false) {
    const base::Rank rank(attempt_.prepared.layout.base_rank + i);
    const base::Fd secret = attempt_.secret ? attempt_.secret->copy() : base::Fd();
    const base::Fd progress = health_.add(i);
    const auto& options = attempt_.prepared.options;
    const int door = attempt_.doorkeeper != nullptr ? attempt_.doorkeeper->plate() : -1;
    std::optional<int> newcomer;
    if (joins || options.join) newcomer = joins ? 0 : attempt_.job.local_world_size;
    auto environment = rank_environment(attempt_.job,
                                        {.rank = rank,
                                         .local_rank = i,
                                         .secret_fd = secret.get(),
                                         .progress_fd = progress.get(),
                                         .door_fd = door,
                                         .newcomer = newcomer},
                                        attempt_.prepared.inherited);
    const Program program = attempt_.prepared.program.for_rank(environment);
    std::vector<int> kept{progress.get()};
    if (secret) kept.push_back(secret.get());
    if (door >= 0) kept.push_back(door);
    const bool together = !pipes_.tee() && attempt_.outputs.out(i) == attempt_.outputs.err(i);
    const base::Fd out = pipe(rank, STDOUT_FILENO, attempt_.outputs.out(i));
    const base::Fd err = together ? base::Fd() : pipe(rank, STDERR_FILENO, attempt_.outputs.err(i));
    const base::Fd& errors = together ? out : err;  // one pipe keeps the order
    const RankStart start{.rank = rank,
                          .program = program,
                          .environment = std::move(environment),
                          .input = i == 0 && !again ? first_input_ : null_.get(),
                          .output = out ? out.get() : STDOUT_FILENO,
                          .error = errors ? errors.get() : STDERR_FILENO,
                          .kept = kept,
                          .signal_mask = attempt_.mask};
    return attempt_.preloader != nullptr ? attempt_.preloader->start(start) : RankProcess(start);
  }

 private:
  // None for the first rank, unless its lines are shown with those of the others: it writes to the terminal.
  base::Fd pipe(base::Rank rank, int terminal, RankLog* log) {
    return log != nullptr || pipes_.tee() ? pipes_.add(rank, terminal, log) : base::Fd();
  }

  const Attempt& attempt_;
  RankPipes& pipes_;
  RankHealth& health_;
  const base::Fd null_ = open_null();
  // A background process group must not read the terminal.
  const int first_input_ = ::isatty(STDIN_FILENO) ? null_.get() : STDIN_FILENO;
};

}  // namespace

Outcome Attempt::run() const {
  RankPipes pipes(terminal, prepared.options.tee);
  Report report(terminal, outputs, &pipes, prepared.options.verbose);
  outputs.begin_here();
  Outcome outcome;
  {
    const DescendantReaper reaper{preloader};
    RankHealth health(prepared.options.hang_timeout);
    Starter starter(*this, pipes, health);
    report.started(job, prepared.program.path);
    std::vector<RankProcess> ranks;
    for (int i = 0; i < job.local_world_size; ++i) {
      ranks.push_back(starter.start(i));
      report.started(ranks.back().rank(), ranks.back().pid());
    }
    const auto& options = prepared.options;
    const auto again = [&](int i, bool joins) { return starter.start(i, /*again=*/true, joins); };
    outcome = Supervisor({.ranks = ranks,
                          .control = control,
                          .children = children,
                          .report = report,
                          .health = health,
                          .terminal = terminal,
                          .pipes = pipes,
                          .grace = options.grace,
                          .least = options.least,
                          .doorkeeper = doorkeeper,
                          .is_part = prepared.layout.several_machines() || options.join,
                          .joins = options.join.has_value(),
                          .again = options.most ? Supervisor::Again(again) : nullptr})
                  .run();
  }
  pipes.finish();
  report.lost_output();
  return outcome;
}

Restarts::Next Restarts::judge(const Outcome& outcome, Span lasted) {
  if (!outcome.again || count_ == most_) return Next::kOver;
  const bool quick = lasted < kQuick;
  if (quick && quick_ && quick_->exit_code == outcome.exit_code && quick_->end == outcome.end) {
    return Next::kHopeless;
  }
  quick_ = quick ? std::optional(outcome) : std::nullopt;
  ++count_;
  return Next::kAgain;
}

std::chrono::milliseconds Restarts::pause() const {
  return std::min(kLongestPause, kFirstPause * (1 << std::clamp(count_ - 1, 0, 10)));
}

}  // namespace lamina::launch
