// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/digests/causes.h"
#include "lamina/digests/comparison.h"

namespace lamina::digests {
namespace {

constexpr std::array<std::string_view, static_cast<std::size_t>(kLastKind) + 1> kWords{
    "input of",  "output of", "gradient of the output of", "result of",        "gradient of",
    "parameter", "buffer",    "optimizer's state of",      "random numbers of"};

// Rows of the table: words before a number, and what it counts.
constexpr std::array<std::pair<std::string_view, std::string_view>, static_cast<std::size_t>(kLastKind) + 1> kRows{
    {{"inputs of ", "module"},
     {"outputs of ", "module"},
     {"gradients of the outputs of ", "module"},
     {"", "result"},
     {"gradients of ", "parameter"},
     {"", "parameter"},
     {"", "buffer"},
     {"", "optimizer's state"},
     {"", "random generator"}}};

std::string first_line(const Difference& difference) {
  const Seen& seen = difference.seen;
  std::string text = seen.step < 0 ? "before the first step" : base::str("step ", seen.step);
  if (difference.copy > 0) text += base::str(", copy ", difference.copy);
  if (seen.microbatch >= 0) text += base::str(", microbatch ", seen.microbatch);
  if (seen.kind == RecordedKind::kInput && seen.name.empty()) text += ": the runs read different data";
  text += base::str(": ", named(seen));
  if (difference.rank >= 0) text += base::str(" on rank ", difference.rank);
  text += base::str(" ", difference.what);
  if (seen.kind == RecordedKind::kOutput) text += difference.inputs_agree ? " (inputs agree)" : " (inputs differ, too)";
  return text + cause_of(difference);
}

// Lists what differs, by kind.
std::string table(const Comparison& comparison) {
  struct Row {
    std::set<std::string> names;
    double largest = 0;
    std::int64_t first_step = 0;
  };
  std::map<RecordedKind, Row> rows;
  for (const auto& each : comparison.differences) {
    const auto [row, fresh] = rows.try_emplace(each.seen.kind);
    if (fresh) row->second.first_step = each.seen.step;
    row->second.names.insert(each.seen.name);
    row->second.largest = std::max(row->second.largest, each.relative);
  }
  std::string text = "what differs in all:\n";
  for (const auto& [kind, row] : rows) {
    const auto& [before, noun] = kRows[static_cast<std::size_t>(kind)];
    text += base::str("  ", before, counted(static_cast<std::int64_t>(row.names.size()), noun), ", by up to ",
                      size_text(row.largest), ", from step ", row.first_step, " on\n");
  }
  return text;
}

}  // namespace

std::string counted(std::int64_t number, std::string_view what) {
  return base::str(number, " ", what, number == 1 ? "" : "s");
}

std::string named(const Seen& seen) {
  const std::string_view what = kWords[static_cast<std::size_t>(seen.kind)];
  if (seen.kind == RecordedKind::kGenerator) return std::string("the random numbers' position");
  const bool is_root = seen.name.empty() && seen.kind <= RecordedKind::kOutputGradient;
  std::string text = base::str(what, " ", is_root ? "the model" : seen.name);
  if (seen.call > 0) text += base::str(" (call ", seen.call, ")");
  if (seen.call < 0) text += " (run again in the backward)";
  return text;
}

std::string describe(const Comparison& comparison) {
  const bool is_short = comparison.steps < comparison.wanted;
  const std::string steps =
      is_short ? base::str(comparison.steps, " of ", counted(comparison.wanted, "step"), ": the script ended; ")
               : counted(comparison.steps, "step") + ", ";
  const std::string compared =
      base::str(steps, counted(comparison.tensors, "tensor"), " of ", counted(comparison.modules, "module"), " and ",
                counted(comparison.parameters, "parameter"),
                comparison.in_slices > 0 ? base::str(" (and not ", comparison.in_slices, " that lie in slices)") : "");
  if (comparison.differences.empty()) {
    std::string text = base::str(comparison.missing.empty() ? "equal within " : "no difference beyond ",
                                 size_text(comparison.tolerance), ": ", compared,
                                 "; the largest relative difference is ", size_text(comparison.largest),
                                 comparison.largest_of.empty() ? "" : ", of ", comparison.largest_of, "\n");
    if (!comparison.missing.empty()) text += "that does not prove the runs equal, for something is missing:\n";
    for (const auto& each : comparison.missing) text += base::str("  ", each, "\n");
    return text;
  }
  return base::str(first_line(comparison.differences.front()), "\n", table(comparison), "compared: ", compared,
                   ", within ", size_text(comparison.tolerance), "\n");
}

}  // namespace lamina::digests
