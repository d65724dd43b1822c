// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "lamina/base/error.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"
#include "lamina/config/problems.h"
#include "lamina/observe/chrome_trace.h"
#include "lamina/observe/chrome_trace_names.h"

namespace lamina::observe {
namespace {

using base::Json;

std::int64_t nanoseconds(const Json& microseconds) { return std::llround(microseconds.get<double>() * 1000); }

// The event that a slice of a row stands for; nothing for those of the plan.
std::optional<What> what_of(const Json& row) {
  if (row.at("tid").get<int>() / kLanes == kPlanned) return std::nullopt;
  const std::string category = row.at("cat");
  for (std::size_t i = 0; i < kCategories.size(); ++i) {
    if (kCategories[i] == category) return static_cast<What>(i);
  }
  throw base::FormatError(base::str("a slice of category '", category, "'"));
}

std::optional<Event> slice(const Json& row) {
  const auto what = what_of(row);
  if (!what) return std::nullopt;
  const Json& args = row.at("args");
  Event event{.what = *what, .begin_ns = nanoseconds(row.at("ts")), .step = args.at("step")};
  event.end_ns = event.begin_ns + nanoseconds(row.at("dur"));
  event.microbatch = args.value("microbatch", std::int64_t(-1));
  const std::string name = row.at("name");
  if (is_turn(*what)) event.name = name == kBody ? "" : name;
  if (*what == What::kCollective) {
    event.name = name;
    event.bytes = args.at("bytes");
  }
  if (!args.contains("message")) return event;
  event.peer = args.at("rank");
  event.bytes = args.at("bytes");
  event.message = args.at("message");
  const auto colon = name.find(": ");
  if (colon != std::string::npos) event.name = name.substr(colon + 2);
  return event;
}

Event wait(const Json& row) {
  const Json& args = row.at("args");
  Event event{.what = What::kWait, .begin_ns = nanoseconds(row.at("ts"))};
  event.end_ns = event.begin_ns + nanoseconds(args.at("us"));
  event.step = args.at("step");
  event.microbatch = args.at("microbatch");
  event.name = args.at("for");
  return event;
}

std::optional<Event> event_of(const Json& row) {
  const std::string phase = row.at("ph");
  if (phase == "X") return slice(row);
  if (phase == "b") return wait(row);
  if (phase != "C") return std::nullopt;
  const auto at = nanoseconds(row.at("ts"));
  return Event{.what = What::kMemory, .begin_ns = at, .end_ns = at, .bytes = row.at("args").at("bytes")};
}

Timeline timeline_of(const Json& json) {
  const Json& data = json.at("otherData");
  if (data.at("program") != "lamina") throw base::FormatError("another program's");
  Timeline timeline{data.at("schedule"), data.at("active_microbatches"), {}};
  std::map<std::int64_t, RankRecord> ranks;
  for (const Json& row : json.at("traceEvents")) {
    const std::int64_t rank = row.at("pid");
    RankRecord& record = ranks[rank];
    record.rank = rank;
    if (row.at("ph") == "M" && row.at("name") == "process_name") {
      record.leader = row.at("args").at("leader");
      record.dropped = row.at("args").at("dropped");
    }
    if (auto event = event_of(row)) record.events.push_back(std::move(*event));
  }
  for (auto& [rank, record] : ranks) timeline.ranks.push_back(std::move(record));
  return timeline;
}

}  // namespace

Timeline read_chrome_trace(std::istream& in) {
  try {
    return timeline_of(base::parse_json(std::string(std::istreambuf_iterator<char>(in), {})));
  } catch (const Json::exception& error) {
    throw base::FormatError(base::str("not a timeline that lamina wrote: ", config::json_reason(error)));
  } catch (const base::FormatError& error) {
    throw base::FormatError(base::str("not a timeline that lamina wrote: ", error.what()));
  }
}

}  // namespace lamina::observe
