// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "lamina/config/config.h"

// The objective that a plan is made for.
namespace lamina::plan {

// The time of a message between two ranks; by default nothing.
struct Link {
  double latency_us = 0;
  double bytes_per_us = 0;  // 0: a message takes its latency, whatever its size
  double rank_us = 0;       // of each of its two ranks it takes so much, and so long as its bytes; 0: nothing

  bool free() const { return latency_us == 0 && bytes_per_us == 0 && rank_us == 0; }
  double time_us(std::int64_t bytes) const { return latency_us + of_bytes_us(bytes); }
  double rank_time_us(std::int64_t bytes) const { return rank_us > 0 ? rank_us + of_bytes_us(bytes) : 0; }
  double of_bytes_us(std::int64_t bytes) const {
    return bytes_per_us > 0 ? static_cast<double>(bytes) / bytes_per_us : 0;
  }
};

// One training step over `partitions` ranks.
struct Goal {
  int partitions = 1;
  int microbatches = 1;
  std::string schedule = "interleaved";    // or "simple", "zero_bubble"
  std::optional<int> active_microbatches;  // default: default_window()
  double memory_weight = 0.8;              // 0: only the step's time counts; 1: only the fullest rank's memory
  Link link;
  Link nominal;  // counted where a plan is described, and where a V, which sends twice as often, is compared
  std::optional<std::int64_t> memory_limit_bytes;  // of each rank
  // A message more than partitions has to gain this part of the objective: times are those of a nominal device.
  double message_price = 0.05;

  // How many microbatches are in flight at most.
  int window() const {
    return std::min(microbatches, active_microbatches.value_or(config::default_window(partitions)));
  }
  bool simple() const { return schedule == "simple"; }
  // How many microbatches' activations a rank holds at most.
  int held() const { return simple() ? microbatches : window(); }
};

}  // namespace lamina::plan
