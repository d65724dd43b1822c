// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "lamina/observe/event.h"

namespace lamina::observe {

constexpr std::int64_t kMs = 1'000'000;

inline Event span(What what, std::int64_t begin_ms, std::int64_t end_ms, std::int64_t step, std::int64_t microbatch,
                  std::string name) {
  return {.what = what,
          .begin_ns = begin_ms * kMs,
          .end_ns = end_ms * kMs,
          .step = step,
          .microbatch = microbatch,
          .name = std::move(name)};
}

// A step of two ranks and one microbatch that begins at `begin_ms`: 10 ms forward and 20 ms backward on each, 1 ms for
// each of the two messages. The clock of rank 1 is 500 ms ahead.
inline void add_step(Timeline& timeline, std::int64_t step, std::int64_t begin_ms) {
  auto& leading = timeline.ranks.at(0);
  auto& following = timeline.ranks.at(1);
  const auto at = [&](std::int64_t ms) { return begin_ms + ms; };
  const auto there = [&](std::int64_t ms) { return begin_ms + ms + 500; };
  const auto message = static_cast<std::uint64_t>(2 * step + 1);
  Event sent = span(What::kSend, at(10), at(10), step, 0, "forward of tail");
  sent.peer = 1;
  sent.bytes = 4096;
  sent.message = message;
  Event received = sent;
  received.what = What::kReceive;
  received.begin_ns = received.end_ns = there(11) * kMs;
  received.peer = 0;
  Event answer = span(What::kSend, there(41), there(41), step, 0, "result");
  answer.peer = 0;
  answer.bytes = 1024;
  answer.message = message + 1;
  Event answered = answer;
  answered.what = What::kReceive;
  answered.begin_ns = answered.end_ns = at(42) * kMs;
  answered.peer = 1;
  leading.events.insert(leading.events.end(), {span(What::kStep, at(0), at(65), step, -1, ""),
                                               span(What::kForward, at(0), at(10), step, 0, ""), sent,
                                               span(What::kWait, at(10), at(42), step, 0, "backward of tail on rank 1"),
                                               answered, span(What::kBackward, at(42), at(62), step, 0, "")});
  following.events.insert(following.events.end(),
                          {span(What::kStep, there(0), there(65), step, -1, ""), received,
                           span(What::kForward, there(11), there(21), step, 0, "tail"),
                           span(What::kBackward, there(21), there(41), step, 0, "tail"), answer});
}

inline Timeline two_ranks() {
  Timeline timeline{"interleaved", 5, {{.rank = 0, .leader = 0}, {.rank = 1, .leader = 0, .ahead_ns = 500 * kMs}}};
  for (std::int64_t step = 0; step < 3; ++step) add_step(timeline, step, 1000 + 100 * step);
  return timeline;
}

}  // namespace lamina::observe
