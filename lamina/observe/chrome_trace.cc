// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/chrome_trace.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "lamina/base/json_text.h"
#include "lamina/base/str.h"
#include "lamina/observe/chrome_trace_names.h"
#include "lamina/observe/planned.h"

namespace lamina::observe {
namespace {

using base::Json;

double microseconds(std::int64_t ns) { return static_cast<double>(ns) / 1000; }

bool is_message(const Event& event) { return event.what == What::kSend || event.what == What::kReceive; }

// The messages whose both ends are known: an arrow needs two.
std::unordered_set<std::uint64_t> joined(const Timeline& timeline) {
  std::unordered_set<std::uint64_t> sent, joined;
  for (const auto what : {What::kSend, What::kReceive}) {
    for (const auto& record : timeline.ranks) {
      for (const auto& event : record.events) {
        if (event.what != what) continue;
        if (what == What::kSend) sent.insert(event.message);
        if (what == What::kReceive && sent.contains(event.message)) joined.insert(event.message);
      }
    }
  }
  return joined;
}

// For each of some events, which may overlap, a lane that is free when it begins.
using Lanes = std::unordered_map<const Event*, int>;
Lanes lanes_of(std::vector<const Event*> events) {
  std::ranges::stable_sort(events, {}, &Event::begin_ns);
  Lanes lanes;
  std::vector<std::int64_t> free_at;
  for (const Event* event : events) {
    auto lane = std::ranges::find_if(free_at, [&](std::int64_t at) { return at <= event->begin_ns; });
    if (lane == free_at.end() && free_at.size() == kLanes) lane = free_at.begin();
    if (lane == free_at.end()) lane = free_at.insert(lane, 0);
    *lane = event->end_ns;
    lanes[event] = static_cast<int>(lane - free_at.begin());
  }
  return lanes;
}

// Threads send at once, and several collectives may be under way.
Lanes lanes_of(const RankRecord& record) {
  std::vector<const Event*> messages, collectives;
  for (const auto& event : record.events) {
    if (is_message(event)) messages.push_back(&event);
    if (event.what == What::kCollective) collectives.push_back(&event);
  }
  auto lanes = lanes_of(std::move(messages));
  lanes.merge(lanes_of(std::move(collectives)));
  return lanes;
}

class TraceWriter {
 public:
  TraceWriter(const Timeline& timeline, std::ostream& out) : out_(out), joined_(joined(timeline)) {
    out_ << R"({"displayTimeUnit":"ms","otherData":)"
         << Json{{"program", "lamina"},
                 {"schedule", timeline.schedule},
                 {"active_microbatches", timeline.active_microbatches}}
                .dump()
         << ",\"traceEvents\":[\n";
    for (const auto& record : timeline.ranks) write(record);
    write(planned_events(timeline));
    out_ << "\n]}\n";
  }

 private:
  void write(const RankRecord& record) {
    pid_ = record.rank;
    ahead_ns_ = record.ahead_ns;
    name("process_name", 0, base::str("rank ", record.rank), {{"leader", record.leader}, {"dropped", record.dropped}});
    lanes_ = lanes_of(record);
    for (const auto& event : record.events) write(event);
    ahead_ns_ = 0;
  }

  // Where a step was quicker than its plan, the plan of the next one begins before that one ends.
  void write(const std::vector<PlannedEvent>& planned) {
    std::map<std::int64_t, std::vector<const Event*>> by_rank;
    for (const auto& [rank, event] : planned) by_rank[rank].push_back(&event);
    for (const auto& [rank, events] : by_rank) {
      pid_ = rank;
      lanes_ = lanes_of(events);
      for (const Event* event : events) {
        slice(*event, kPlanned, "planned", kCategories[static_cast<int>(event->what)]);
      }
    }
  }

  void write(const Event& event) {
    const auto category = kCategories[static_cast<int>(event.what)];
    switch (event.what) {
      case What::kForward:
      case What::kBackward:
      case What::kWeights:
        return slice(event, kCompute, category, event.name.empty() ? kBody : event.name);
      case What::kStep:
        return slice(event, kSteps, category, base::str("step ", event.step));
      case What::kCollective:
        return slice(event, kCollectives, category, event.name);
      case What::kWait:
        return wait(event);
      case What::kSend:
      case What::kReceive:
        return message(event);
      case What::kMemory:
        return put({{"ph", "C"}, {"name", "memory"}, {"args", {{"bytes", event.bytes}}}}, event.begin_ns);
    }
  }

  void slice(const Event& event, Row row, std::string_view category, std::string_view called) {
    Json args{{"step", event.step}};
    if (event.microbatch >= 0) args["microbatch"] = event.microbatch;
    if (event.what == What::kCollective) args["bytes"] = event.bytes;
    if (is_message(event)) args.update({{"rank", event.peer}, {"bytes", event.bytes}, {"message", event.message}});
    put({{"ph", "X"},
         {"tid", place(event, row)},
         {"cat", category},
         {"name", called},
         {"dur", microseconds(event.end_ns - event.begin_ns)},
         {"args", std::move(args)}},
        event.begin_ns);
  }

  // The lane of an event in a row, which gets its name with its first slice.
  int place(const Event& event, Row row) {
    const auto found = lanes_.find(&event);
    const int lane = found == lanes_.end() ? 0 : found->second;
    const int tid = row * kLanes + lane;
    if (named_.emplace(pid_, tid).second) {
      name("thread_name", tid, lane == 0 ? std::string(kRows[row]) : base::str(kRows[row], ' ', lane + 1));
      put({{"ph", "M"}, {"name", "thread_sort_index"}, {"tid", tid}, {"args", {{"sort_index", tid}}}}, 0);
    }
    return tid;
  }

  // Waits of several threads overlap, which slices of one row must not.
  void wait(const Event& event) {
    const Json common{{"cat", "wait"}, {"name", "wait"}, {"id", waits_++}};
    Json begin = common;
    begin.update({{"ph", "b"},
                  {"args",
                   {{"for", event.name},
                    {"step", event.step},
                    {"microbatch", event.microbatch},
                    {"us", microseconds(event.end_ns - event.begin_ns)}}}});
    put(std::move(begin), event.begin_ns);
    Json end = common;
    end["ph"] = "e";
    put(std::move(end), event.end_ns);
  }

  void message(const Event& event) {
    const bool sent = event.what == What::kSend;
    slice(event, kMessages, kCategories[static_cast<int>(event.what)],
          base::str(sent ? "to rank " : "from rank ", event.peer, event.name.empty() ? "" : ": ", event.name));
    if (!joined_.contains(event.message)) return;
    Json arrow{{"ph", sent ? "s" : "f"},
               {"tid", place(event, kMessages)},
               {"cat", "message"},
               {"name", "message"},
               {"id", base::str("m", event.message)}};
    if (!sent) arrow["bp"] = "e";
    put(std::move(arrow), event.begin_ns);
  }

  void name(const char* kind, int tid, std::string called, Json args = Json::object()) {
    args["name"] = std::move(called);
    put({{"ph", "M"}, {"name", kind}, {"tid", tid}, {"args", std::move(args)}}, 0);
  }

  void put(Json event, std::int64_t at_ns) {
    event["pid"] = pid_;
    if (event["ph"] != "M") event["ts"] = microseconds(at_ns - ahead_ns_);
    out_ << (first_ ? "" : ",\n") << event.dump(-1, ' ', false, Json::error_handler_t::replace);
    first_ = false;
  }

  std::ostream& out_;
  const std::unordered_set<std::uint64_t> joined_;
  Lanes lanes_;  // of what is written now; the others have a row to themselves
  std::set<std::pair<std::int64_t, int>> named_;
  std::int64_t pid_ = 0;
  std::int64_t ahead_ns_ = 0;
  std::int64_t waits_ = 0;
  bool first_ = true;
};

}  // namespace

void write_chrome_trace(const Timeline& timeline, std::ostream& out) { TraceWriter(timeline, out); }

}  // namespace lamina::observe
