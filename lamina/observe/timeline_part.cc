// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/timeline_part.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/observe/chrome_trace.h"

namespace lamina::observe {
namespace {

using Json = nlohmann::json;

Json to_json(const Event& event) {
  return Json::array({static_cast<int>(event.what), event.begin_ns, event.end_ns, event.step, event.microbatch,
                      event.name, event.peer, event.bytes, event.message});
}

Event to_event(const Json& row) {
  const int what = row.at(0);
  if (what < 0 || what > static_cast<int>(kLastWhat)) throw base::FormatError(base::str("an event of kind ", what));
  return {
      static_cast<What>(what), row.at(1), row.at(2), row.at(3), row.at(4), row.at(5), row.at(6), row.at(7), row.at(8)};
}

std::ifstream open(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw base::Error(base::str("cannot read ", path, ": ", std::strerror(errno)));
  return file;
}

}  // namespace

std::string encode(const Timeline& timeline) {
  Json ranks = Json::array();
  for (const auto& record : timeline.ranks) {
    Json events = Json::array();
    for (const auto& event : record.events) events.push_back(to_json(event));
    ranks.push_back(Json::array({record.rank, record.leader, record.ahead_ns, record.dropped, std::move(events)}));
  }
  std::string bytes;
  Json::to_msgpack(Json::array({timeline.schedule, timeline.active_microbatches, std::move(ranks)}), bytes);
  return bytes;
}

Timeline decode(std::string_view bytes) {
  try {
    const Json json = Json::from_msgpack(bytes);
    Timeline timeline{json.at(0), json.at(1), {}};
    for (const auto& row : json.at(2)) {
      RankRecord record{row.at(0), row.at(1), row.at(2), row.at(3), {}};
      for (const auto& event : row.at(4)) record.events.push_back(to_event(event));
      timeline.ranks.push_back(std::move(record));
    }
    return timeline;
  } catch (const Json::exception& error) {
    throw base::FormatError(base::str("a part of a timeline: ", error.what()));
  }
}

void write_part(const Timeline& timeline, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  file << encode(timeline);
  if (!file.flush()) base::log_warning(base::str("the timeline of this rank cannot be written to ", path));
}

Timeline read_part(const std::string& path) {
  auto file = open(path);
  return decode(std::string(std::istreambuf_iterator<char>(file), {}));
}

void add(Timeline& timeline, Timeline part) {
  timeline.schedule = part.schedule;
  timeline.active_microbatches = part.active_microbatches;
  std::ranges::move(part.ranks, std::back_inserter(timeline.ranks));
}

std::string part_in(const std::string& folder, std::int64_t rank) { return base::str(folder, "/", rank, ".part"); }

Timeline read_parts(const std::string& folder) {
  std::vector<Timeline> parts;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    try {
      parts.push_back(read_part(file.path()));
    } catch (const base::Error& error) {
      base::log_warning(base::str("left out of the timeline: ", error.what()));
    }
  }
  std::ranges::sort(parts, {}, [](const Timeline& part) { return part.ranks.empty() ? -1 : part.ranks.front().rank; });
  Timeline timeline;
  for (auto& part : parts) add(timeline, std::move(part));
  complete(timeline);
  return timeline;
}

void complete(Timeline& timeline) {
  std::unordered_map<std::uint64_t, std::int64_t> senders;
  for (const auto& record : timeline.ranks) {
    for (const auto& event : record.events) {
      if (event.what == What::kSend) senders[event.message] = record.rank;
    }
  }
  for (auto& record : timeline.ranks) {
    for (auto& event : record.events) {
      const auto sender = event.what == What::kReceive ? senders.find(event.message) : senders.end();
      if (sender != senders.end()) event.peer = sender->second;
    }
  }
}

void write_file(const Timeline& timeline, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  write_chrome_trace(timeline, file);
  if (!file.flush()) throw base::Error(base::str("cannot write the timeline to ", path, ": ", std::strerror(errno)));
}

Timeline read_file(const std::string& path) {
  auto file = open(path);
  return read_chrome_trace(file);
}

}  // namespace lamina::observe
