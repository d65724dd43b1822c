// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "lamina/config/config.h"
#include "lamina/schedule/simulation.h"

// Steps of stages that sleep, in simulated time.
namespace lamina::bench {

inline double median(std::vector<double> samples) {
  std::ranges::sort(samples);
  return samples[samples.size() / 2];
}

// Reads `MICROBATCHES SCHEDULE WINDOW`; a window of 0 is the default.
inline void read_schedule(config::Config& config, char** words) {
  config.microbatches = std::atoi(words[0]);
  using config::Schedule;
  for (const auto schedule : {Schedule::kSimple, Schedule::kInterleaved, Schedule::kZeroBubble}) {
    if (config::schedule_name(schedule) == words[1]) config.schedule = schedule;
  }
  if (const int window = std::atoi(words[2])) config.active_microbatches = window;
}

// Messages take up to 0.1 ms, at random: exactly equal times would make every tie fall the same way.
inline double simulated(const config::Config& config, double forward, double both) {
  std::mt19937 random(1);
  schedule::Chain chain = schedule::even_chain(
      config.partitions, config.microbatches, static_cast<std::int64_t>(1e9 * forward),
      static_cast<std::int64_t>(1e9 * (both - forward)), static_cast<std::int64_t>(1e9 * (both - forward) / 2));
  chain.delay = [&] { return static_cast<std::int64_t>(random() % 100'000); };
  const auto schedule = schedule::make_schedule(config::schedule_name(config.schedule),
                                                *config::with_defaults(config).active_microbatches, config.partitions);
  std::vector<double> times;
  for (int i = 0; i < 25; ++i) times.push_back(1e-9 * static_cast<double>(schedule::step_time(*schedule, chain)));
  return median(times);
}

}  // namespace lamina::bench
