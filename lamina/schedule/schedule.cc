// SPDX-License-Identifier: Apache-2.0
#include "lamina/schedule/schedule.h"

#include <algorithm>
#include <tuple>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::schedule {
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

// [Note: two ahead] A backward goes before a new forward, so that activations are freed early. Where fewer than two
// microbatches are ahead the forward goes first: while one microbatch goes to its loss and back, the rank computes the
// other. A rank that takes every backward at once is left with forwards that wait for the losses of a busy rank 0, and
// idles. A step over even stages is up to a tenth longer then, and keeps more activations, not fewer
// (docs/decisions/schedule.md). What a microbatch has begun here goes on before both: a forward first, which is mostly
// the loss, takes no time, and is waited for. Nobody waits for weight parts.
class Interleaved : public Schedule {
 public:
  explicit Interleaved(int active) : active_(active) {}

  std::optional<std::size_t> pick(std::span<const Ticket> waiting, const Progress& progress) const override {
    const auto allowed = [&](const Ticket& ticket) {
      return ticket.phase != Phase::kStart ||
             (is_next(ticket, progress) && progress.started - progress.finished < active_);
    };
    enum { kForwardGoesOn, kBackwardGoesOn, kForwardWanted, kBackward, kForward, kWeights };
    const bool wanted = progress.ahead.size() < kAhead;
    return first(waiting, allowed, [&](const Ticket& ticket) {
      if (ticket.phase == Phase::kWeights) return kWeights;
      if (ticket.phase == Phase::kBackwardStart) return kForwardGoesOn;
      if (ticket.phase == Phase::kBackward) {
        return progress.back == ticket.microbatch ? kBackwardGoesOn : kBackward;
      }
      if (progress.ahead.contains(ticket.microbatch)) return kForwardGoesOn;
      return wanted ? kForwardWanted : kForward;
    });
  }

 private:
  static constexpr std::size_t kAhead = 2;
  const int active_;
};

// To split a backward costs some per cent of it. Weight parts of the last 2 * partitions microbatches, which a rank has
// before it together, fill its idle time; those of earlier ones would gain little more.
class ZeroBubble : public Interleaved {
 public:
  ZeroBubble(int active, int partitions) : Interleaved(active), partitions_(partitions) {}

  int first_split(int microbatches) const override { return std::max(0, microbatches - 2 * partitions_); }

 private:
  const int partitions_;
};

}  // namespace

void Progress::go_on(const Ticket& picked) {
  if (picked.phase == Phase::kStart) ++started;
  if (picked.phase == Phase::kBackward) {
    ahead.erase(picked.microbatch);
    back = picked.microbatch;
  } else if (picked.phase == Phase::kStart || picked.phase == Phase::kForward) {
    ahead.insert(picked.microbatch);
  }
}

std::unique_ptr<Schedule> simple_schedule(int active) { return std::make_unique<Simple>(active); }
std::unique_ptr<Schedule> interleaved_schedule(int active) { return std::make_unique<Interleaved>(active); }

std::unique_ptr<Schedule> zero_bubble_schedule(int active, int partitions) {
  return std::make_unique<ZeroBubble>(active, partitions);
}

std::unique_ptr<Schedule> make_schedule(std::string_view name, int active, int partitions) {
  if (name == "simple") return simple_schedule(active);
  if (name == "interleaved") return interleaved_schedule(active);
  if (name == "zero_bubble") return zero_bubble_schedule(active, partitions);
  throw base::ConfigError(base::str("schedule \"", name, "\" is not one of: interleaved, simple, zero_bubble"));
}

}  // namespace lamina::schedule
