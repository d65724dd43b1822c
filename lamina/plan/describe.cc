// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iomanip>
#include <sstream>

#include "lamina/base/str.h"
#include "lamina/plan/format.h"
#include "lamina/plan/owned_names.h"
#include "lamina/plan/report.h"

namespace lamina::plan {
namespace {

using Cells = std::vector<std::string>;

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += text.empty() ? name : ", " + name;
  return text;
}

// Columns are as wide as they have to be; the last one, to the left, ends each line.
std::string aligned(const std::vector<Cells>& rows) {
  std::vector<std::size_t> widths(rows.front().size());
  for (const Cells& row : rows) {
    for (std::size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  std::ostringstream text;
  for (const Cells& row : rows) {
    for (std::size_t column = 0; column + 1 < row.size(); ++column) {
      text << std::setw(static_cast<int>(widths[column])) << row[column] << "  ";
    }
    text << row.back() << '\n';
  }
  return text.str();
}

std::vector<int> modules_called(const ModuleTree& tree, const Report& report) {
  std::vector<int> modules(report.stages.size());
  for (std::size_t node = 0; node < tree.size(); ++node) {
    modules[report.owners[node].value] += tree[node].callable ? 1 : 0;
  }
  return modules;
}

}  // namespace

std::string describe(const ModuleTree& tree, const Report& report) {
  const auto names = owned_names(tree, report.owners, static_cast<int>(report.stages.size()));
  const std::vector<int> modules = modules_called(tree, report);
  const bool timed = report.predicted_step_us > 0;
  std::int64_t parameters = 0;
  for (const Stage& stage : report.stages) parameters += stage.parameter_bytes;
  std::vector<Cells> rows{{"partition", "modules", "parameters", "share", "memory", "sends", "owns"}};
  for (std::size_t i = 0; i < report.stages.size(); ++i) {
    const Stage& stage = report.stages[i];
    rows.push_back({base::str(i), base::str(modules[i]), format_bytes(stage.parameter_bytes),
                    format_percent(static_cast<double>(stage.parameter_bytes), static_cast<double>(parameters)),
                    format_bytes(stage.memory_bytes), format_bytes(stage.out_bytes),
                    names[i].empty() ? "(nothing)" : list(names[i])});
  }
  if (timed) {
    rows[0].insert(rows[0].begin() + 4, "time");
    for (std::size_t i = 0; i < report.stages.size(); ++i) {
      rows[i + 1].insert(rows[i + 1].begin() + 4, format_time(report.stages[i].time_us));
    }
  }
  std::string text = aligned(rows);
  if (timed) text += base::str("predicted step ", format_time(report.predicted_step_us), ", bubble ");
  if (!timed) text += "bubble, with bytes in place of times, ";
  text += format_percent(report.bubble, 1) + "\n";
  return report.warning.empty() ? text : text + "warning: " + report.warning + "\n";
}

std::string assignments_line(const ModuleTree& tree, const Assignment& owners, int partitions) {
  const auto names = owned_names(tree, owners, partitions);
  std::string line;
  for (int i = 0; i < partitions; ++i) line += base::str(i == 0 ? "" : ", ", i, ": [", list(names[i]), "]");
  return base::str("Partition assignments: {", line, "}");
}

}  // namespace lamina::plan
