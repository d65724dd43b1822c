// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/schedule.h"

#include <tuple>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::plan {
namespace {

bool is_backward(Phase phase) { return phase == Phase::kBackwardStart || phase == Phase::kBackward; }

// Microbatches start in their order, whichever thread was there first: what they change in the model (statistics of
// BatchNorm, buffers), they change in that order.
bool is_next(const Ticket& start, const Progress& progress) { return start.microbatch.value == progress.started; }

// The allowed ticket that comes first: by phase as `rank_of` orders them, then the older microbatch, then the older
// wait.
template <class Allowed, class RankOf>
std::optional<std::size_t> first(std::span<const Ticket> waiting, const Allowed& allowed, const RankOf& rank_of) {
  const auto key = [&](const Ticket& t) { return std::tuple(rank_of(t.phase), t.microbatch, t.arrival); };
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    if (allowed(waiting[i]) && (!best || key(waiting[i]) < key(waiting[*best]))) best = i;
  }
  return best;
}

class Simple : public Schedule {
 public:
  explicit Simple(int active) : active_(active) {}

  std::optional<std::size_t> pick(std::span<const Ticket> waiting, const Progress& progress) const override {
    const auto allowed = [&](const Ticket& ticket) {
      if (ticket.phase == Phase::kStart) {
        return is_next(ticket, progress) && progress.started - progress.forward_done < active_;
      }
      if (ticket.phase == Phase::kBackwardStart) return progress.forward_done == progress.microbatches;
      return true;
    };
    return first(waiting, allowed, [](Phase phase) {
      return phase == Phase::kForward ? 0 : is_backward(phase) ? 2 : 1;
    });
  }

 private:
  const int active_;
};

class Interleaved : public Schedule {
 public:
  explicit Interleaved(int active) : active_(active) {}

  std::optional<std::size_t> pick(std::span<const Ticket> waiting, const Progress& progress) const override {
    const auto allowed = [&](const Ticket& ticket) {
      return ticket.phase != Phase::kStart ||
             (is_next(ticket, progress) && progress.started - progress.finished < active_);
    };
    return first(waiting, allowed, [](Phase phase) {
      return is_backward(phase) ? 0 : phase == Phase::kForward ? 1 : 2;
    });
  }

 private:
  const int active_;
};

}  // namespace

std::unique_ptr<Schedule> simple_schedule(int active) { return std::make_unique<Simple>(active); }
std::unique_ptr<Schedule> interleaved_schedule(int active) { return std::make_unique<Interleaved>(active); }

std::unique_ptr<Schedule> make_schedule(std::string_view name, int active) {
  if (name == "simple") return simple_schedule(active);
  if (name == "interleaved") return interleaved_schedule(active);
  throw base::ConfigError(base::str("schedule \"", name, "\" is not one of: interleaved, simple"));
}

}  // namespace lamina::plan
