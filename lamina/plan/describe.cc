// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <iomanip>
#include <sstream>

#include "lamina/base/str.h"
#include "lamina/plan/owned_names.h"
#include "lamina/plan/partition.h"
#include "lamina/plan/readable.h"
#include "lamina/plan/sharing.h"

namespace lamina::plan {
namespace {

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += text.empty() ? name : ", " + name;
  return text;
}

std::string row(const std::string& partition, const std::string& modules, const std::string& parameters,
                const std::string& share, const std::string& names) {
  return base::str(std::right, std::setw(9), partition, std::setw(9), modules, std::setw(12), parameters, std::setw(9),
                   share, "  ", names, "\n");
}

}  // namespace

std::string describe(const ModuleTree& tree, const Assignment& owners, int partitions) {
  const auto names = owned_names(tree, owners, partitions);
  const Sharing sharing = find_sharing(tree);
  std::vector<int> modules(partitions);
  std::vector<std::int64_t> bytes(partitions);
  std::int64_t total = 0;
  for (std::size_t node = 0; node < tree.size(); ++node) {
    modules[owners[node].value] += tree[node].callable ? 1 : 0;
    bytes[owners[node].value] += sharing.bytes[node];
    total += sharing.bytes[node];
  }
  std::string table = row("partition", "modules", "parameters", "share", "owns");
  for (int i = 0; i < partitions; ++i) {
    const std::string owned = names[i].empty() ? "(nothing)" : list(names[i]);
    table += row(base::str(i), base::str(modules[i]), readable(bytes[i]),
                 percent(static_cast<double>(bytes[i]), static_cast<double>(total)), owned);
  }
  return table;
}

std::string assignments_line(const ModuleTree& tree, const Assignment& owners, int partitions) {
  const auto names = owned_names(tree, owners, partitions);
  std::string line;
  for (int i = 0; i < partitions; ++i) line += base::str(i == 0 ? "" : ", ", i, ": [", list(names[i]), "]");
  return base::str("Partition assignments: {", line, "}");
}

}  // namespace lamina::plan
