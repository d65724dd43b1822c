// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/layout_text.h"

#include <charconv>
#include <map>
#include <sstream>
#include <string_view>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/config/config_keys.h"
#include "lamina/config/problems.h"

namespace lamina::config {
namespace {

constexpr std::string_view kShards = "sharded_data_parallel_degree";

std::string full_name(const std::string& name) {
  static const std::map<std::string, std::string, std::less<>> short_names{
      {"pp", "partitions"}, {"tp", "tensor_parallel_degree"}, {"shards", std::string(kShards)}};
  const auto found = short_names.find(name);
  return std::string(canonical_name(found == short_names.end() ? name : found->second));
}

// Lists the values that a text may mean; the key takes the first that it allows.
std::vector<Scalar> meanings(const std::string& text) {
  std::vector<Scalar> all;
  const auto add_number = [&](auto number) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && end == text.data() + text.size()) all.emplace_back(number);
  };
  add_number(std::int64_t{});
  add_number(double{});
  if (text == "1" || text == "true" || text == "True") all.emplace_back(true);
  if (text == "0" || text == "false" || text == "False") all.emplace_back(false);
  if (text == "none" || text == "null" || text == "None") all.emplace_back(std::monostate{});
  all.emplace_back(text);
  return all;
}

void read(Config& config, const std::string& part, Problems& problems) {
  const auto equals = part.find('=');
  const std::string given = part.substr(0, equals), name = full_name(given);
  if (equals == std::string::npos) {
    problems.add(given, not_allowed(given, "without a value", "KEY=VALUE"));
    return;
  }
  const Key* key = find_key(name);
  if (key == nullptr) {
    problems.add(given, base::str(given, ": there is no such key; the nearest is ", nearest_name(given)));
    return;
  }
  const std::string text = part.substr(equals + 1);
  for (const Scalar& value : meanings(text)) {
    if (!key->read(config, value)) continue;
    // One shard is all of it, also of what optimizers have.
    if (name == kShards && config.sharded_data_parallel_degree == 1) config.shard_optimizer_state = false;
    return;
  }
  problems.add(given, not_allowed(given, show(meanings(text).front()), key->allowed));
}

// Takes back what followed from keys that are others now.
void follow(Config& config, const Config& before) {
  if (config.active_microbatches == before.active_microbatches &&
      before.active_microbatches == default_window(before.partitions)) {
    config.active_microbatches = default_window(config.partitions);
  }
  if (config.default_partition && *config.default_partition >= config.partitions) config.default_partition = 0;
}

}  // namespace

Config in_layout(Config config, const std::string& text) {
  const Config before = config;
  Problems problems;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    if (!part.empty()) read(config, part, problems);
  }
  problems.raise("layout");
  follow(config, before);
  return config;
}

}  // namespace lamina::config
