// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/report.h"

#include <map>

#include "lamina/base/printable.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/base/whole_number.h"
#include "lamina/environment/host_port.h"

namespace lamina::launch {
namespace {

// Long enough for a Python traceback through a model, short enough for a screen to keep the first line near.
constexpr int kTailLines = 50;
constexpr int kStackLines = 500;
constexpr auto kStackBegins = "Fatal Python error";
// Picks the ranks whose stacks are shown, of those that hang.
constexpr int kMostStacks = 8;
// How long words, and what ranks have written before them, may take to be read; after that they wait in a queue.
constexpr std::chrono::milliseconds kFlush{500};

// None of a machine among several.
std::string others(int left) {
  if (left == 0) return "no other one of this machine is left";
  return base::str(left, left == 1 ? " other goes on" : " others go on");
}

}  // namespace

void Report::write(const std::string& text) const {
  const bool nobody_reads = terminal_.err().waiting();
  terminal_.err().add(text);
  terminal_.err().flush(base::Deadline::after(nobody_reads ? std::chrono::milliseconds{0} : kFlush));
}

template <class... Parts>
void Report::say(const Parts&... parts) const {
  write(base::printable(base::str("lamina run: ", parts..., "\n")));
}

void Report::warn(const std::string& line) const { say("warning: ", line); }

void Report::flush() const {
  if (pipes_ != nullptr) pipes_->flush(base::Deadline::after(kFlush));
}

void Report::started(const Job& job, const std::string& program) const {
  if (!verbose_) return;
  say("starting ", job.local_world_size, " of ", job.world_size, " ranks of ", program, " on machine ", job.node_rank,
      " of ", job.nodes, "; they meet at ", job.master_address, ":", job.master_port);
}

void Report::started(base::Rank rank, pid_t pid) const {
  if (verbose_) say("rank ", rank, " is process ", pid);
}

void Report::ended(base::Rank rank, const RankEnd& end) const {
  if (verbose_) say("rank ", rank, " has ended: ", end.words());
}

void Report::lost(base::Rank rank, const RankEnd& end, int left) const {
  flush();
  say("rank ", rank, " is lost: ", end.words(), "; ", others(left));
}

void Report::silent(base::Rank rank) const {
  flush();
  say("rank ", rank, " gave no sign of life, and the others go on without it: killed");
}

void Report::stuck(base::Rank rank, const std::string& where) const {
  flush();
  say("rank ", rank, " keeps the others waiting (", where, "): it shows its stack and ends, and they go on without it");
}

void Report::stack(base::Rank rank) const {
  flush();
  show_tail(rank, "the stack of", kStackLines, kStackBegins);
}

void Report::left_in_order(base::Rank rank, int left) const {
  flush();
  say("rank ", rank, " has left in order; ", others(left));
}

void Report::coming_back(base::Rank rank, std::chrono::milliseconds pause) const {
  say("rank ", rank, " is started again in ", static_cast<double>(pause.count()) / 1000.0, " s, to join them");
}

void Report::given_up(base::Rank rank, const std::string& why) const {
  say("rank ", rank, " is not started again: ", why);
}

void Report::may_be_joined(const std::string& doorkeeper) const {
  const auto space = doorkeeper.find(' ');
  const environment::HostPort address{doorkeeper.substr(0, space),
                                      base::whole_number(doorkeeper.substr(space + 1)).value_or(0)};
  say("others may join: --join ", address.text());
}

void Report::not_joined(base::Rank rank, const RankEnd& end, bool first) const {
  flush();
  say("rank ", rank, first ? "" : ", started again,", " has not joined the others: ", end.words());
  show_tail(rank, "the last lines of", kTailLines);
}

void Report::failed(const RootCause::Failure& failure, const std::vector<base::Rank>& left,
                    const std::string& told) const {
  flush();
  const auto after = left.empty() ? "" : base::str(", after ", base::name_ranks(left), " had ended with exit code 0");
  say("rank ", failure.rank, " failed: ", failure.end.words(), after);
  if (!outputs_.has(failure.rank)) write(base::printable(told));
  show_tail(failure.rank, "the last lines of", kTailLines);
}

void Report::show_tail(base::Rank rank, const char* of, int lines, std::string_view begin) const {
  if (!outputs_.has(rank) || (pipes_ != nullptr && pipes_->tee())) return;  // the user has seen it
  std::string tail = outputs_.tail(rank, lines);
  if (const auto at = begin.empty() ? std::string::npos : tail.rfind(begin); at != std::string::npos) tail.erase(0, at);
  if (tail.empty()) return say("rank ", rank, " had written nothing");
  write(base::str("---- ", of, " rank ", rank, " ----\n", tail, "---- end of rank ", rank, " ----\n"));
}

void Report::ended_with_it(int others) const {
  if (others > 0) say(others, others == 1 ? " other rank" : " other ranks", " ended because of this");
}

void Report::interrupted(int signal, int ranks) const {
  flush();
  const char* why = signal == SIGPIPE ? " (nobody reads what --tee shows any more)" : "";
  say(signal_name(signal), why, ": ending ", ranks, ranks == 1 ? " rank" : " ranks");
}

void Report::killing(const std::vector<base::Rank>& ranks, std::chrono::seconds grace) const {
  say(base::name_ranks(ranks), " still ran ", grace.count(), " s after SIGTERM: killed");
}

void Report::left(const std::vector<base::Rank>& ranks) const {
  say(base::name_ranks(ranks), " could not be killed: stuck in the kernel");
}

void Report::keep_logs() const {
  const auto [folder, trouble] = outputs_.keep();
  if (folder.empty() && !trouble.empty()) say("what the other ranks wrote cannot be kept in ", trouble);
  if (folder.empty()) return;
  if (trouble.empty()) return say("all that the other ranks wrote is in ", folder);
  say("what the other ranks wrote is in ", folder, ", but not all of it: ", trouble);
}

void Report::unshown(int error) const {
  warn(base::str("what --tee shows cannot be written: ", base::system_error(error), "; the job goes on"));
}

void Report::lost_output() {
  if (const auto words = outputs_.trouble()) warn(*words);
}

void Report::stopped(base::Rank rank, pid_t pid) const {
  say("warning: rank ", rank, " is stopped (SIGSTOP or the like); `kill -CONT ", pid, "` lets it go on");
}

void Report::awaited(base::Rank rank, base::Rank by) const {
  say("warning: rank ", rank, " ended its program and never called lamina.init(), in which rank ", by,
      " waits for it: all ranks call it");
}

void Report::hung(const std::string& why, const Places& places) {
  flush();
  outputs_.begin_here();
  say(why);
  std::vector<std::string> order;
  std::map<std::string, std::vector<base::Rank>> together;
  for (const auto& [rank, words] : places) {
    if (!together.contains(words)) order.push_back(words);
    together[words].push_back(rank);
  }
  for (const std::string& words : order) say(base::name_ranks(together[words]), ": ", words);
}

void Report::stacks() const {
  flush();
  for (int i = 1; i <= kMostStacks; ++i) {
    const base::Rank rank(outputs_.first().value + i);
    if (outputs_.has(rank) && !outputs_.tail(rank, 1).empty()) show_tail(rank, "the stacks of", kTailLines);
  }
}

void Report::restarting(int restart, int restarts, std::chrono::milliseconds pause) const {
  say("starting all ranks again in ", pause.count() / 1000.0, " s: restart ", restart, " of ", restarts);
}

void Report::giving_up(std::chrono::seconds after) const {
  say("the same failure as before, within ", after.count(), " s of the start: not started again");
}

}  // namespace lamina::launch
