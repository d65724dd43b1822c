// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/kept_partition.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "lamina/base/error.h"
#include "lamina/base/input_file.h"
#include "lamina/base/json_text.h"
#include "lamina/base/output_file.h"
#include "lamina/base/str.h"
#include "lamina/config/json_reader.h"
#include "lamina/config/problems.h"

namespace lamina::plan {

using base::Json;

KeptPartition read_partition(const std::string& path) {
  const auto before = base::str("partition_file ", path, ": ");
  const auto text = base::read_file(path, before, base::kMostOfRows);
  try {
    const Json json = base::parse_json(text);
    config::JsonReader file(json, "");
    const Json& partition = file.at("partition");
    config::JsonReader modules(partition, "partition");
    file.finish();
    KeptPartition kept;
    for (const auto& [name, _] : partition.items()) {
      kept[name] = static_cast<int>(modules.integer(name, 0, std::numeric_limits<int>::max()));
    }
    return kept;
  } catch (const Json::exception& error) {
    throw base::ConfigError(base::str(before, "not valid JSON: ", config::json_reason(error)));
  } catch (const base::ConfigError& error) {
    throw base::ConfigError(base::str(before, error.what()));
  }
}

void write_partition(const std::string& path, const ModuleTree& tree, const Assignment& owners) {
  Json partition = Json::object();
  for (std::size_t node = 0; node < tree.size(); ++node) partition[tree[node].name] = owners[node].value;
  try {
    base::write_output(path, Json{{"partition", partition}}.dump(2) + "\n");
  } catch (const base::FileError& error) {
    throw base::ConfigError(base::str("partition_file: ", error.what()));
  }
}

std::optional<Assignment> owners_of(const KeptPartition& kept, const ModuleTree& tree, int partitions) {
  Assignment owners;
  for (const auto& node : tree) {
    const auto found = kept.find(node.name);
    if (found == kept.end() || found->second < 0 || found->second >= partitions) return std::nullopt;
    owners.emplace_back(found->second);
  }
  return owners;
}

}  // namespace lamina::plan
