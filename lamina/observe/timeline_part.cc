// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/timeline_part.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/input_file.h"
#include "lamina/base/json_text.h"
#include "lamina/base/log.h"
#include "lamina/base/output_file.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/config/problems.h"
#include "lamina/observe/chrome_trace.h"

namespace lamina::observe {
namespace {

using base::Json;

// An event as bytes: a million of them have to be written while a failed job ends.
struct RankRow {
  std::int64_t begin_ns, end_ns, step, microbatch, peer, bytes;
  std::uint64_t message;
  std::uint32_t name;  // in the list of names
  std::uint32_t what;
};
static_assert(sizeof(RankRow) == 64 && std::is_trivially_copyable_v<RankRow>);

Json to_json(const RankRecord& record) {
  Json names = Json::array();
  std::unordered_map<std::string_view, std::uint32_t> numbers;
  std::vector<std::uint8_t> rows(record.events.size() * sizeof(RankRow));
  std::uint8_t* at = rows.data();
  for (const auto& event : record.events) {
    const auto [name, fresh] = numbers.try_emplace(event.name, static_cast<std::uint32_t>(names.size()));
    if (fresh) names.push_back(event.name);
    const RankRow row{event.begin_ns,   event.end_ns, event.step,
                      event.microbatch, event.peer,   event.bytes,
                      event.message,    name->second, static_cast<std::uint32_t>(event.what)};
    std::memcpy(at, &row, sizeof row);
    at += sizeof row;
  }
  return Json::array(
      {record.rank, record.leader, record.ahead_ns, record.dropped, std::move(names), Json::binary(std::move(rows))});
}

RankRecord to_record(const Json& json) {
  RankRecord record{json.at(0), json.at(1), json.at(2), json.at(3), {}};
  const Json& names = json.at(4);
  const auto& rows = json.at(5).get_binary();
  if (rows.size() % sizeof(RankRow) != 0) throw base::FormatError("a part of a timeline: half an event");
  for (std::size_t at = 0; at < rows.size(); at += sizeof(RankRow)) {
    RankRow row;
    std::memcpy(&row, rows.data() + at, sizeof row);
    if (row.what > static_cast<std::uint32_t>(kLastWhat)) {
      throw base::FormatError(base::str("a part of a timeline: an event of kind ", row.what));
    }
    record.events.push_back({static_cast<What>(row.what), row.begin_ns, row.end_ns, row.step, row.microbatch,
                             names.at(row.name), row.peer, row.bytes, row.message});
  }
  return record;
}

// Adds the next events of the same rank.
void join(Timeline& whole, Timeline piece) {
  if (whole.ranks.empty() || piece.ranks.empty()) return void(whole = std::move(piece));
  auto& record = whole.ranks.front();
  auto& next = piece.ranks.front();
  record.dropped = next.dropped;
  std::ranges::move(next.events, std::back_inserter(record.events));
}

}  // namespace

std::string encode(const Timeline& timeline) {
  Json ranks = Json::array();
  for (const auto& record : timeline.ranks) ranks.push_back(to_json(record));
  std::string bytes;
  Json::to_msgpack(Json::array({timeline.schedule, timeline.active_microbatches, std::move(ranks)}), bytes);
  return bytes;
}

Timeline decode(std::string_view bytes) {
  try {
    const Json json = base::parse_msgpack(bytes);
    Timeline timeline{json.at(0), json.at(1), {}};
    for (const auto& record : json.at(2)) timeline.ranks.push_back(to_record(record));
    return timeline;
  } catch (const Json::exception& error) {
    throw base::FormatError(base::str("a part of a timeline: ", config::json_reason(error)));
  }
}

void append_to_part(const Timeline& piece, const std::string& path) {
  const std::string bytes = encode(piece);
  const std::uint64_t size = bytes.size();
  const auto place = base::open_output(path, O_WRONLY | O_APPEND);
  const auto before = ::lseek(place.get(), 0, SEEK_END);
  std::ofstream file(base::str("/proc/self/fd/", place.get()), std::ios::binary | std::ios::app);
  file.write(reinterpret_cast<const char*>(&size), sizeof size) << bytes;
  if (file.flush()) return;
  const std::string why = base::system_error();
  file.close();                                                       // which may write once more
  [[maybe_unused]] const int cut = ::ftruncate(place.get(), before);  // half a piece spoils the next ones
  throw base::Error(base::str("cannot write the timeline of this rank to ", path, ": ", why));
}

Timeline read_part(const std::string& path) {
  const auto text = base::read_file(path, base::str(path, " "), base::kMostOfEvents);
  std::string_view left = text;
  Timeline whole;
  for (std::uint64_t size = 0; left.size() >= sizeof size;) {
    std::memcpy(&size, left.data(), sizeof size);
    left.remove_prefix(sizeof size);
    if (size > left.size()) break;  // it was being written
    join(whole, decode(left.substr(0, size)));
    left.remove_prefix(size);
  }
  return whole;
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
      auto part = read_part(file.path());
      if (!part.ranks.empty()) parts.push_back(std::move(part));
    } catch (const base::Error& error) {
      base::log_warning(base::str("left out of the timeline: ", error.what()));
    }
  }
  std::ranges::sort(parts, {}, [](const Timeline& part) { return part.ranks.front().rank; });
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
  const auto place = base::open_output(path, O_WRONLY | O_TRUNC);
  std::ofstream file(base::str("/proc/self/fd/", place.get()), std::ios::binary);
  write_chrome_trace(timeline, file);
  if (!file.flush()) throw base::Error(base::str("cannot write the timeline to ", path, ": ", base::system_error()));
}

Timeline read_file(const std::string& path) {
  std::istringstream text(base::read_file(path, "", base::kMostOfEvents));
  return read_chrome_trace(text);
}

}  // namespace lamina::observe
