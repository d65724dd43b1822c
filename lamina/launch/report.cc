// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/report.h"

#include <unistd.h>

#include <string>

#include "lamina/base/str.h"

namespace lamina::launch {
namespace {

// Long enough for a Python traceback through a model, short enough for a screen to keep the first line near.
constexpr int kTailLines = 50;

// A closed stderr is nobody's error.
void write_all(std::string text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written <= 0) return;
    text.erase(0, written);
  }
}

template <class... Parts>
void say(const Parts&... parts) {
  write_all(base::str("lamina run: ", parts..., "\n"));
}

}  // namespace

void Report::warn(const std::string& line) const { say("warning: ", line); }

void Report::failed(const Verdict::Failure& failure) const {
  say("rank ", failure.rank, " failed: ", failure.end.words());
  const auto log = logs_.find(failure.rank);
  if (log == logs_.end()) return;
  const std::string tail = log->second->tail(kTailLines);
  if (tail.empty()) return say("rank ", failure.rank, " had written nothing");
  write_all(base::str("---- the last lines of rank ", failure.rank, " ----\n", tail, "---- end of rank ", failure.rank,
                      " ----\n"));
}

void Report::ended_with_it(int others) const {
  if (others > 0) say(others, others == 1 ? " other rank" : " other ranks", " ended because of this");
}

void Report::interrupted(int signal, int ranks) const {
  say(signal_name(signal), ": ending ", ranks, ranks == 1 ? " rank" : " ranks");
}

void Report::killing(base::Rank rank, std::chrono::seconds grace) const {
  say("rank ", rank, " still ran ", grace.count(), " s after SIGTERM: killed");
}

void Report::left(base::Rank rank) const { say("rank ", rank, " hangs in the kernel and could not be killed"); }

}  // namespace lamina::launch
