// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iomanip>
#include <sstream>

#include "lamina/base/str.h"
#include "lamina/observe/summary.h"

namespace lamina::observe {
namespace {

constexpr std::size_t kModules = 5;  // rows of the table of the slowest
constexpr std::size_t kReasons = 3;  // of each rank's idle time

std::string ms(std::int64_t ns) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(ns < 10'000'000 ? 2 : 1) << static_cast<double>(ns) / 1e6 << " ms";
  return text.str();
}

std::string percent(double share) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << 100 * share << " %";
  return text.str();
}

std::string mebibytes(std::int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return text.str();
}

// "waiting for rank 1 12.0 %, end of the step 3.1 %"
std::string reasons(const RankSummary& rank) {
  std::vector<std::pair<std::int64_t, std::string>> sorted;
  for (const auto& [why, ns] : rank.idle_ns) sorted.emplace_back(ns, why);
  std::ranges::sort(sorted, std::greater());
  if (sorted.size() > kReasons) sorted.resize(kReasons);
  std::string text;
  for (const auto& [ns, why] : sorted) {
    text += base::str(text.empty() ? "" : ", ", why, ' ',
                      percent(static_cast<double>(ns) / static_cast<double>(rank.step_ns)));
  }
  return text;
}

}  // namespace

std::string describe(const Summary& summary) {
  std::ostringstream out;
  out << "timeline of " << summary.steps << (summary.steps == 1 ? " step" : " steps") << ": a step took "
      << ms(summary.step_ns);
  if (summary.planned_ns > 0) out << ", planned " << ms(summary.planned_ns) << " (without waits and messages)";
  out << "; bubble " << percent(summary.bubble) << '\n';
  out << "rank      bubble  messages        sent  peak memory  idle\n";
  for (const auto& rank : summary.ranks) {
    out << std::setw(4) << rank.rank << std::setw(12) << percent(rank.bubble()) << std::setw(10) << rank.messages
        << std::setw(12) << mebibytes(rank.bytes) << std::setw(13) << mebibytes(rank.peak_bytes) << "  "
        << reasons(rank) << '\n';
  }
  const std::size_t shown = std::min(summary.modules.size(), kModules);
  if (shown > 0) out << "slowest        forward    backward  rank  module\n";
  for (std::size_t i = 0; i < shown; ++i) {
    const auto& module = summary.modules[i];
    out << std::setw(7) << i + 1 << std::setw(15) << ms(module.forward_ns) << std::setw(12) << ms(module.backward_ns)
        << std::setw(6) << module.rank << "  " << (module.name.empty() ? "step body" : module.name) << '\n';
  }
  for (const auto& rank : summary.ranks) {
    if (rank.dropped > 0)
      out << "rank " << rank.rank << " recorded no more after its first events: " << rank.dropped << " are missing\n";
  }
  return out.str();
}

}  // namespace lamina::observe
