// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/rng_streams.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <utility>

#include "lamina/device/generators.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/stream_seed.h"

namespace lamina::runtime {
namespace {

thread_local int inline_bodies = 0;
thread_local GivenSeeds* given_seeds = nullptr;

// The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
std::uint64_t scramble(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The seed that somebody gave the process's generators by hand, where nothing was drawn since.
std::optional<std::uint64_t> seed_by_hand() {
  auto& process = *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
  std::lock_guard guard(process.mutex_);
  const auto seed = process.current_seed();
  if (!is_by_hand(seed)) return std::nullopt;
  const auto now = process.engine().data();
  const auto fresh = at::mt19937(seed).data();
  const bool drawn = now.left_ != fresh.left_ || now.next_ != fresh.next_ || now.state_ != fresh.state_;
  return drawn || devices::has_drawn_since(seed) ? std::nullopt : std::optional(seed);
}

}  // namespace

std::uint64_t mix(std::uint64_t a, std::uint64_t b) { return scramble(scramble(a) ^ b); }

std::uint64_t draw_seed() {
  auto& process = *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
  std::lock_guard guard(process.mutex_);
  return process.random64();
}

std::uint64_t next_seed() {
  const auto given = given_seeds != nullptr ? given_seeds->take() : std::nullopt;
  if (given) return *given;
  const auto by_hand = seed_by_hand();
  const auto drawn = draw_seed();  // in any case, so that the next module gets another one
  return by_hand ? *by_hand : stream_seed(drawn);
}

GivenSeeds::GivenSeeds(std::vector<std::uint64_t> seeds)
    : seeds_(std::move(seeds)), outer_(std::exchange(given_seeds, this)) {}

GivenSeeds::~GivenSeeds() { given_seeds = outer_; }

std::optional<std::uint64_t> GivenSeeds::take() {
  return taken_ < seeds_.size() ? std::optional(seeds_[taken_++]) : std::nullopt;
}

RngStream::RngStream(std::uint64_t seed)
    : callers_(ProcessState::current()), given_(std::exchange(given_seeds, nullptr)) {
  callers_.seed(seed);
  callers_.swap_generators();
}

RngStream::~RngStream() {
  given_seeds = given_;
  if (ExecutionContext::has_process_state()) callers_.swap_generators();
}

InlineBody::InlineBody(std::uint64_t root_seed) : callers_(ProcessState::current()) {
  callers_.seed(root_seed);
  callers_.swap();
  ++inline_bodies;
}

InlineBody::~InlineBody() {
  --inline_bodies;
  callers_.swap();
}

AsInBody::AsInBody() { ++inline_bodies; }
AsInBody::~AsInBody() { --inline_bodies; }

bool in_step() { return inline_bodies > 0 || ExecutionContext::current() != nullptr; }

std::optional<RngStream> rng_stream_here() {
  if (!in_step()) return std::nullopt;
  return std::optional<RngStream>(std::in_place, next_seed());
}

void RootSeeds::begin_step() { base_ = seed_ ? mix(*seed_, steps_++) : draw_seed(); }

std::uint64_t RootSeeds::of(base::Microbatch microbatch) const {
  const auto own = static_cast<std::size_t>(microbatch.value);
  return stream_seed(mix(base_, own < numbers_.size() ? numbers_[own] : first_ + microbatch.value));
}

}  // namespace lamina::runtime
