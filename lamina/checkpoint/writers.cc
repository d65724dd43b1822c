// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/writers.h"

#include <algorithm>
#include <map>
#include <vector>

namespace lamina::checkpoint {
Writers::Writers(const model::ParameterTable& table, const topology::Topology& topology) {
  std::vector<const model::Parameter*> rows;
  for (const auto& row : table.all()) {
    copies_[row.layout.name] = 0;
    if (!row.layout.buffer) rows.push_back(&row);
  }
  const auto bytes = [](const model::Parameter* row) {
    return layout::numel(row->layout.shape) * traits(row->layout.dtype).size_bytes;
  };
  // The largest first, each to the copy that has the fewest bytes so far.
  std::ranges::stable_sort(rows, std::greater(), bytes);
  std::map<std::pair<base::Partition, int>, std::vector<std::int64_t>> loads;
  for (const auto* row : rows) {
    const int count = layout::copies(row->layout, topology);
    auto& load = loads[{row->layout.partition, count}];
    load.resize(static_cast<std::size_t>(count));
    const auto least = std::ranges::min_element(load);
    *least += bytes(row);
    copies_[row->layout.name] = static_cast<int>(least - load.begin());
  }
}

}  // namespace lamina::checkpoint
