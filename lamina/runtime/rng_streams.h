// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/runtime/backward_here.h"
#include "lamina/runtime/process_state.h"

// [Note: RNG streams] The random numbers of a step are the same in every layout. Each microbatch has a root stream,
// seeded by the step and by which microbatch of all replicas it is. A module that may draw random numbers, or that
// holds one that may, runs in a stream of its own, seeded by one draw from its caller's. So its numbers do not depend
// on where it runs, and its caller's do not depend on how many it drew. The draw is from what the caller's stream is at
// the call: activation checkpointing, which sets that back, gets the same numbers again. Where a caller has seeded its
// stream by hand and drawn nothing since, the module that it calls next has that very stream, and so on to the module
// that draws. So the numbers are those of the plain program.
namespace lamina::runtime {

std::uint64_t mix(std::uint64_t a, std::uint64_t b);  // to a seed that neither of them is seen in

// One draw from the generator of the host: the seed of a stream that begins here. It is that of the stream's numbers on
// the host and on the rank's device.
std::uint64_t draw_seed();

// The seed of the stream of a module that is called here: the next of GivenSeeds, else one draw, in the place of which
// comes what the caller has seeded its own with.
std::uint64_t next_seed();

// Seeds that the caller on another rank drew for modules that are called as one. While it lives, the streams that begin
// in this thread take these, in their order, as if each had begun by a draw there. Not the streams within those.
class GivenSeeds {
 public:
  explicit GivenSeeds(std::vector<std::uint64_t> seeds);
  ~GivenSeeds();
  GivenSeeds(const GivenSeeds&) = delete;

  std::optional<std::uint64_t> take();

 private:
  std::vector<std::uint64_t> seeds_;
  std::size_t taken_ = 0;
  GivenSeeds* const outer_;
};

// While it lives the process's generators are the stream of `seed`; afterwards they go on where they were.
class RngStream {
 public:
  explicit RngStream(std::uint64_t seed);
  ~RngStream();
  RngStream(const RngStream&) = delete;

 private:
  ProcessState callers_;
  GivenSeeds* const given_;  // to what this one is in
};

// A step body in the thread that called the step function, which has no ExecutionContext. While it lives the process's
// state is the body's own, and its generators the body's root stream.
class InlineBody {
 public:
  explicit InlineBody(std::uint64_t root_seed);
  ~InlineBody();
  InlineBody(const InlineBody&) = delete;

 private:
  ProcessState callers_;
  const BackwardHere backward_here_;
};

// A model that is called in the body of a step, in another thread, which has that one's state. While it lives modules
// have streams here as they would have there.
class AsInBody {
 public:
  AsInBody();
  ~AsInBody();
  AsInBody(const AsInBody&) = delete;

 private:
  const BackwardHere backward_here_;
};

// True where this thread runs a step body, or a module for another rank: there modules have streams.
bool in_step();

// The stream of a module that is called here: in a step it begins by one draw, elsewhere there is none.
std::optional<RngStream> rng_stream_here();

// The seeds of the root streams.
class RootSeeds {
 public:
  // `seed`: of all steps; without it each step takes one draw from the process's generator, so that torch.manual_seed
  // says. `first`: the microbatches of the replicas before this one.
  RootSeeds(std::optional<std::uint64_t> seed, std::int64_t first) : seed_(seed), first_(first) {}

  // On every rank alike, in the thread that enters the step: their generators stay in step.
  void begin_step();
  // With a seed: how many steps there were, in this job and those that it goes on with. Without: nothing.
  std::optional<std::uint64_t> steps() const { return seed_ ? std::optional(steps_) : std::nullopt; }
  void go_on_after(std::uint64_t steps) { steps_ = steps; }
  void begin_at(std::int64_t first) {
    first_ = first;
    numbers_.clear();
  }
  // Numbers of this replica's microbatches among those of all, where they do not follow each other.
  void number(std::vector<std::int64_t> numbers) { numbers_ = std::move(numbers); }
  void reseed(std::uint64_t seed) { seed_ = seed; }
  std::uint64_t of(base::Microbatch microbatch) const;

 private:
  std::optional<std::uint64_t> seed_;
  std::int64_t first_;
  std::vector<std::int64_t> numbers_;
  std::uint64_t steps_ = 0;
  std::uint64_t base_ = 0;
};

}  // namespace lamina::runtime
