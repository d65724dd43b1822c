// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/chrome_trace.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "lamina/base/error.h"
#include "lamina/observe/chrome_trace_names.h"
#include "lamina/observe/timeline_part.h"
#include "tests/observe/timelines.h"

namespace lamina::observe {
namespace {

using Json = nlohmann::json;

Json written(const Timeline& timeline) {
  std::ostringstream out;
  write_chrome_trace(timeline, out);
  return Json::parse(out.str());
}

Event any_event() {
  Event event{.what = static_cast<What>(*rc::gen::inRange(0, static_cast<int>(kLastWhat) + 1))};
  event.begin_ns = *rc::gen::inRange<std::int64_t>(0, std::int64_t(1) << 50);
  event.end_ns = event.begin_ns;
  if (event.what != What::kMemory) event.end_ns += *rc::gen::inRange<std::int64_t>(0, 1'000'000'000);
  if (event.what != What::kMemory) event.step = *rc::gen::inRange(0, 100);
  if (event.what != What::kMemory && event.what != What::kStep) event.microbatch = *rc::gen::inRange(0, 16);
  const bool message = event.what == What::kSend || event.what == What::kReceive;
  if (message) event.peer = *rc::gen::inRange(0, 8);
  if (message) event.message = *rc::gen::arbitrary<std::uint64_t>();
  const bool measured = message || event.what == What::kMemory || event.what == What::kCollective;
  if (measured) event.bytes = *rc::gen::inRange<std::int64_t>(0, std::int64_t(1) << 40);
  const bool named = event.what != What::kMemory && event.what != What::kStep;
  if (named) event.name = *rc::gen::element<std::string>("", "h.5", "a \"b\"\n", "ü", "x: y");
  return event;
}

Timeline any_timeline() {
  Timeline timeline{*rc::gen::element<std::string>("simple", "interleaved"), *rc::gen::inRange(1, 20), {}};
  const int ranks = *rc::gen::inRange(1, 4);
  for (int rank = 0; rank < ranks; ++rank) {
    RankRecord record{.rank = rank, .leader = 0, .dropped = *rc::gen::inRange(0, 3)};
    const int events = *rc::gen::inRange(0, 12);
    for (int i = 0; i < events; ++i) record.events.push_back(any_event());
    timeline.ranks.push_back(std::move(record));
  }
  return timeline;
}

RC_GTEST_PROP(ChromeTrace, ReadingGivesWhatWasWritten, ()) {
  const Timeline timeline = any_timeline();
  std::stringstream file;
  write_chrome_trace(timeline, file);
  RC_ASSERT(read_chrome_trace(file) == timeline);
}

RC_GTEST_PROP(ChromeTrace, ATimelineTravelsAsBytes, ()) {
  const Timeline timeline = any_timeline();
  RC_ASSERT(decode(encode(timeline)) == timeline);
}

TEST(ChromeTrace, TimesAreThoseOfTheClockOfRankZero) {
  std::map<std::int64_t, double> forward;
  const Json file = written(two_ranks());
  for (const auto& row : file.at("traceEvents")) {
    const bool first =
        row.value("cat", "") == "forward" && row.at("tid") == kLanes * kCompute && row.at("args").at("step") == 0;
    if (first) forward[row.at("pid")] = row.at("ts");
  }
  EXPECT_EQ(forward, (std::map<std::int64_t, double>{{0, 1000e3}, {1, 1011e3}}));
}

TEST(ChromeTrace, AnArrowLeadsFromEachMessageToItsArrival) {
  std::map<std::string, std::vector<std::pair<std::string, double>>> arrows;
  const Json file = written(two_ranks());
  for (const auto& row : file.at("traceEvents")) {
    if (row.at("ph") == "s" || row.at("ph") == "f") arrows[row.at("id")].emplace_back(row.at("ph"), row.at("ts"));
  }
  ASSERT_EQ(arrows.size(), 6);  // two messages in each of three steps
  for (auto& [id, ends] : arrows) {
    ASSERT_EQ(ends.size(), 2) << id;
    if (ends[0].first == "f") std::swap(ends[0], ends[1]);
    EXPECT_EQ(ends[0].first + ends[1].first, "sf") << id;
    EXPECT_EQ(ends[1].second - ends[0].second, 1000.0) << id;
  }
}

TEST(ChromeTrace, AMessageOfARankWhosePartIsLostHasNoArrow) {
  auto timeline = two_ranks();
  timeline.ranks.pop_back();
  const Json file = written(timeline);
  int messages = 0;
  for (const auto& row : file.at("traceEvents")) {
    EXPECT_NE(row.at("ph"), "s");
    EXPECT_NE(row.at("ph"), "f");
    messages += row.value("cat", "") == "send";
  }
  EXPECT_EQ(messages, 3);
}

TEST(ChromeTrace, SlicesOfARowDoNotOverlap) {
  auto timeline = two_ranks();
  auto& events = timeline.ranks[0].events;
  for (const auto& [begin, end] : {std::pair(200, 210), std::pair(204, 206), std::pair(205, 220), std::pair(210, 211)})
    events.push_back(span(What::kSend, begin, end, 0, 0, "values"));
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::pair<double, double>>> rows;
  const Json file = written(timeline);
  for (const auto& row : file.at("traceEvents")) {
    if (row.at("ph") != "X") continue;
    const double begin = row.at("ts");
    rows[{row.at("pid"), row.at("tid")}].emplace_back(begin, begin + row.at("dur").get<double>());
  }
  for (auto& [row, slices] : rows) {
    std::ranges::sort(slices);
    for (std::size_t i = 1; i < slices.size(); ++i) EXPECT_LE(slices[i - 1].second, slices[i].first);
  }
}

TEST(ChromeTrace, AnotherFileIsAnErrorThatSaysSo) {
  for (const char* text :
       {"", "{}", "[1]", "{\"traceEvents\":[]}", "{\"otherData\":{\"program\":\"x\"},\"traceEvents\":[]}"}) {
    std::istringstream file(text);
    EXPECT_THROW(read_chrome_trace(file), base::FormatError) << text;
  }
  EXPECT_THROW(decode("what is this"), base::FormatError);
}

}  // namespace
}  // namespace lamina::observe
