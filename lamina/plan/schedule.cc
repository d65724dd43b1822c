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

// The allowed ticket that comes first: as `urgency` orders them, then the older microbatch, then the older wait.
template <class Allowed, class Urgency>
std::optional<std::size_t> first(std::span<const Ticket> waiting, const Allowed& allowed, const Urgency& urgency) {
  const auto key = [&](const Ticket& t) { return std::tuple(urgency(t), t.microbatch, t.arrival); };
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
    return first(waiting, allowed, [](const Ticket& ticket) {
      return ticket.phase == Phase::kForward ? 0 : is_backward(ticket.phase) ? 2 : 1;
    });
  }

 private:
  const int active_;
};

// [Note: two ahead] A backward goes first, so that activations are freed early, with two exceptions. What a microbatch has
// begun here goes on: mostly the loss, which takes no time, and which another rank waits for. And a rank with fewer than
// two microbatches ahead begins another: while one goes to its loss and back, the rank computes the other. A rank that
// takes every backward at once is left with forwards whose losses wait for a busy rank 0, and idles: a step over even
// stages is up to a tenth longer then, and keeps more activations, not fewer (docs/decisions.md).
class Interleaved : public Schedule {
 public:
  explicit Interleaved(int active) : active_(active) {}

  std::optional<std::size_t> pick(std::span<const Ticket> waiting, const Progress& progress) const override {
    const auto allowed = [&](const Ticket& ticket) {
      return ticket.phase != Phase::kStart ||
             (is_next(ticket, progress) && progress.started - progress.finished < active_);
    };
    const bool too_few = progress.ahead.size() < kAhead;
    return first(waiting, allowed, [&](const Ticket& ticket) {
      if (goes_on(ticket, progress)) return 0;
      return ticket.phase == Phase::kBackward ? 2 : too_few ? 1 : 3;
    });
  }

 private:
  static constexpr std::size_t kAhead = 2;

  static bool goes_on(const Ticket& ticket, const Progress& progress) {
    return ticket.phase == Phase::kBackwardStart ||
           (ticket.phase == Phase::kForward && progress.ahead.contains(ticket.microbatch));
  }

  const int active_;
};

}  // namespace

void Progress::go_on(const Ticket& picked) {
  if (picked.phase == Phase::kStart) ++started;
  if (picked.phase == Phase::kBackward) ahead.erase(picked.microbatch);
  if (!is_backward(picked.phase)) ahead.insert(picked.microbatch);
}

std::unique_ptr<Schedule> simple_schedule(int active) { return std::make_unique<Simple>(active); }
std::unique_ptr<Schedule> interleaved_schedule(int active) { return std::make_unique<Interleaved>(active); }

std::unique_ptr<Schedule> make_schedule(std::string_view name, int active) {
  if (name == "simple") return simple_schedule(active);
  if (name == "interleaved") return interleaved_schedule(active);
  throw base::ConfigError(base::str("schedule \"", name, "\" is not one of: interleaved, simple"));
}

}  // namespace lamina::plan
