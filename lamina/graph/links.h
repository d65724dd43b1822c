// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/ids.h"
#include "lamina/graph/program.h"
#include "lamina/observe/recorder.h"

namespace lamina::graph {

// A tensor on its way, in words that all libraries have.
struct TensorBytes {
  std::int32_t type = 0;  // of its elements, as the library numbers them
  std::vector<std::int64_t> shape;
  std::shared_ptr<const void> data;  // keeps its memory
  std::size_t size_bytes = 0;
};

// Names a value in all of a job.
struct ValueName {
  std::int64_t graph = 0;
  base::Step step;
  base::Microbatch microbatch;
  Direction pass = Direction::kForward;
  int value = 0;
  base::Rank from;

  friend constexpr auto operator<=>(const ValueName&, const ValueName&) = default;
};

// The way to the other ranks. Both may be called by any thread, without locks.
class Links {
 public:
  virtual ~Links() = default;
  // Returns when the value's memory may be written again. Throws as Transport::send does.
  virtual void send(base::Rank to, const ValueName& name, const TensorBytes& value) = 0;
  // Says that the step has failed here, to all who share it; waits for nobody, and throws nothing.
  virtual void tell_failure(base::Step step, const std::string& why) = 0;
};

// Names and checksums of the arguments of the function that makes a step.
using Checksums = std::vector<std::pair<std::string, std::uint64_t>>;
using StepArguments = std::function<Checksums()>;  // called in steps that compare them

struct BorderOptions {
  base::Rank rank;
  std::string schedule = "interleaved";
  int active_microbatches = 1;
  base::Clock::duration timeout = std::chrono::seconds(1800);  // of each wait of a step
  observe::Recorder* recorder = nullptr;                       // of turns and steps; it outlives the border
  std::string of = "a graph";                                  // what its steps are of, in errors
};

}  // namespace lamina::graph
