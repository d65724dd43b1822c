// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/plan_file.h"

#include "lamina/base/error.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"
#include "lamina/config/json_reader.h"
#include "lamina/config/problems.h"
#include "lamina/plan/file_tree.h"
#include "lamina/plan/settle.h"

namespace lamina::plan {
namespace {

using base::Json;
using config::JsonReader;

constexpr std::int64_t kMostRanks = 65'536;
constexpr std::int64_t kMostMicrobatches = 1'000'000'000;

Json parse(std::string_view text) {
  try {
    return base::parse_json(text);
  } catch (const Json::exception& error) {
    throw base::ConfigError(base::str("not valid JSON: ", config::json_reason(error)));
  }
}

Link read_link(const Json& json) {
  JsonReader reader(json, "link");
  Link link;
  link.latency_us = reader.number("latency_us", 0, kMostTime);
  link.bytes_per_us = reader.number("bytes_per_us", 0, kMostTime);
  if (link.bytes_per_us == 0) reader.refuse("bytes_per_us", "0 is not allowed; expected a number above 0");
  reader.finish();
  return link;
}

Goal read_goal(JsonReader& reader) {
  Goal goal;
  goal.partitions = static_cast<int>(reader.integer("partitions", 1, kMostRanks));
  goal.microbatches = static_cast<int>(reader.integer("microbatches", 1, kMostMicrobatches));
  goal.schedule = reader.text("schedule");
  if (goal.schedule != "simple" && goal.schedule != "interleaved" && goal.schedule != "zero_bubble") {
    reader.refuse("schedule", base::str("\"", goal.schedule,
                                        "\" is not allowed; expected \"interleaved\", \"simple\" or \"zero_bubble\""));
  }
  goal.memory_weight = reader.number("memory_weight", 0, 1);
  if (reader.has("active_microbatches")) {
    goal.active_microbatches = static_cast<int>(reader.integer("active_microbatches", 1, kMostMicrobatches));
  }
  if (reader.has("memory_limit_bytes")) goal.memory_limit_bytes = reader.integer("memory_limit_bytes", 0, kMostBytes);
  if (reader.has("link")) goal.link = read_link(reader.at("link"));
  return goal;
}

}  // namespace

PlanFile read_plan_file(std::string_view text) {
  const Json json = parse(text);
  JsonReader reader(json, "");
  PlanFile file;
  file.goal = read_goal(reader);
  FileTree tree(reader.list("nodes"), reader.has("shared") ? reader.list("shared") : Json::array(), file.goal);
  if (reader.has("graph")) file.graph = reader.flag("graph");
  if (reader.has("slices")) file.sliced = read_sliced_layers(reader.at("slices"));
  reader.finish();
  file.tree = settled(std::move(tree.tree));
  file.ids = std::move(tree.ids);
  return file;
}

std::string to_json(const PlanFile& file, const Report& report) {
  Json json;
  json["partition"] = Json::object();
  for (std::size_t node = 0; node < file.ids.size(); ++node) {
    json["partition"][file.ids[node]] = report.owners[node].value;
  }
  json["stages"] = Json::array();
  for (std::size_t i = 0; i < report.stages.size(); ++i) {
    const Stage& stage = report.stages[i];
    json["stages"].push_back({{"partition", i},
                              {"time_us", stage.time_us},
                              {"bytes", stage.parameter_bytes},
                              {"memory_bytes", stage.memory_bytes},
                              {"out_bytes", stage.out_bytes}});
  }
  json["predicted_step_us"] = report.predicted_step_us;
  json["bubble"] = report.bubble;
  json["warning"] = report.warning;
  if (!file.sliced.layers.empty()) json["slices"] = to_json(file.sliced);
  return json.dump(-1, ' ', true);
}

}  // namespace lamina::plan
