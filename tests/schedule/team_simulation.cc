// SPDX-License-Identifier: Apache-2.0
#include "tests/schedule/team_simulation.h"

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <queue>
#include <random>
#include <tuple>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/schedule/team_turns.h"
#include "tests/schedule/team_program.h"

namespace lamina::schedule {
namespace {

class TeamSimulation {
 public:
  TeamSimulation(const TeamLayout& layout, Order order, std::uint64_t seed)
      : layout_(layout),
        order_(order),
        program_(TeamProgram(layout.partitions, seed).make()),
        first_split_(schedule()->first_split(layout.microbatches)),
        readers_(program_.size()),
        successors_(program_.size()),
        random_(seed + 1),
        slowest_message_(1 + any(30)) {
    for (int work = 0; work < works(); ++work) {
      for (const int input : program_[work].inputs) readers_[input].push_back(work);
      for (const int before : program_[work].after) successors_[before].push_back(work);
    }
    for (int i = 0; i < layout.members * layout.microbatches * works(); ++i) add_context(i);
    for (int i = 0; i < layout.members * layout.partitions; ++i) add_slot(i / layout.partitions, i % layout.partitions);
  }

  bool run() {
    for (auto& context : contexts_) {
      if (context.work == 0) later(any(5), [this, &context] { want_slot(context, Phase::kStart); });
    }
    while (!events_.empty()) {
      const auto happen = events_.top().happen;
      now_ = events_.top().time;
      events_.pop();
      happen();
    }
    return over_ == std::ssize(contexts_);
  }

 private:
  struct Slot;
  // The thread of a step body, or of a request.
  struct Context {
    int member, microbatch, work;
    Slot* slot = nullptr;
    TurnName name;
    int missing = 0;  // of what it needs to begin
    std::size_t next = 0;
    bool in_backward = false;
    std::vector<bool> here = {};  // by work, what has come of those that it has called
    int reads = -1;               // the work whose value it waits for
    bool answered = false;        // all but its weight part is over
    bool in_weights = false;
  };

  struct Slot {
    int member, partition;
    TeamTurns turns;
    Progress progress = {};
    std::vector<Ticket> tickets = {};
    std::vector<TurnName> names = {};
    std::vector<Context*> contexts = {};
    std::map<int, std::int64_t> calls = {};  // by microbatch
    bool held = false;
  };

  struct Event {
    std::int64_t time;
    std::int64_t order;
    std::function<void()> happen;
    bool operator>(const Event& other) const { return std::tie(time, order) > std::tie(other.time, other.order); }
  };

  std::unique_ptr<Schedule> schedule() const {
    return make_schedule(layout_.schedule, layout_.active, layout_.partitions);
  }
  bool splits(const Context& context) const {
    return context.microbatch >= first_split_ && (context.work == 0 || program_[context.work].backward);
  }
  int works() const { return static_cast<int>(program_.size()); }
  int any(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }
  Slot& slot_of(int member, int partition) { return slots_[member * layout_.partitions + partition]; }
  Context& context_of(const Context& beside, int work) {
    return contexts_[(beside.member * layout_.microbatches + beside.microbatch) * works() + work];
  }

  void add_context(int position) {
    const int work = position % works();
    const int lane = position / works();
    Context context{lane / layout_.microbatches, lane % layout_.microbatches, work};
    context.name.microbatch = base::Microbatch(context.microbatch);
    context.name.caller = base::Partition(work == 0 ? 0 : program_[program_[work].caller].partition);
    context.missing = 1 + static_cast<int>(program_[work].inputs.size() + program_[work].after.size());
    context.here.resize(program_.size());
    contexts_.push_back(std::move(context));
  }

  void add_slot(int member, int partition) {
    const bool decides = order_ == Order::kFree || layout_.first[partition] == member;
    slots_.push_back({member, partition, decides ? TeamTurns::of_first(schedule()) : TeamTurns::of_another()});
    slots_.back().progress.microbatches = layout_.microbatches;
    for (auto& context : contexts_) {
      if (context.member == member && program_[context.work].partition == partition) context.slot = &slots_.back();
    }
  }

  void later(std::int64_t delay, std::function<void()> happen) {
    events_.push({now_ + delay, order_of_events_++, std::move(happen)});
  }
  int message() { return 1 + any(slowest_message_); }

  void want_slot(Context& context, Phase phase) {
    auto& slot = *context.slot;
    slot.tickets.push_back({phase, context.name.microbatch, static_cast<std::uint64_t>(order_of_events_++)});
    slot.names.push_back(context.name);
    slot.contexts.push_back(&context);
    pass_on(slot);
  }

  void pass_on(Slot& slot) {
    if (slot.held) return;
    const auto chosen = slot.turns.pick(slot.tickets, slot.names, slot.progress);
    for (const auto& word : slot.turns.take_words()) tell(slot, word);
    if (!chosen) return;
    const auto at = static_cast<std::ptrdiff_t>(*chosen);
    auto& context = *slot.contexts[*chosen];
    slot.progress.go_on(slot.tickets[*chosen]);
    slot.tickets.erase(slot.tickets.begin() + at);
    slot.names.erase(slot.names.begin() + at);
    slot.contexts.erase(slot.contexts.begin() + at);
    slot.held = true;
    compute(context);
  }

  void tell(const Slot& first, const Pick& word) {
    if (order_ == Order::kFree) return;
    for (int member = 0; member < layout_.members; ++member) {
      auto& slot = slot_of(member, first.partition);
      if (&slot == &first) continue;
      later(message(), [this, &slot, word] {
        slot.turns.hear(word);
        pass_on(slot);
      });
    }
  }

  void give_up(Slot& slot) {
    slot.held = false;
    pass_on(slot);
  }

  // Computes, and then does what comes next.
  void compute(Context& context) {
    later(any(6), [this, &context] { act(context); });
  }

  void act(Context& context) {
    const auto& acts = program_[context.work].acts;
    if (context.answered && !std::exchange(context.in_weights, true)) {
      ++context.next;  // one more than there are acts
      return meet(context);
    }
    if (context.next >= acts.size()) return end(context);
    const auto [what, of] = acts[context.next++];
    switch (what) {
      case Act::What::kCollective:
        return meet(context);
      case Act::What::kCall:
        call(context, context_of(context, of));
        return compute(context);
      case Act::What::kRead:
        return read(context, of);
      case Act::What::kBackward:
        ++context.slot->progress.forward_done;
        context.in_backward = true;
        return end_turn(context, Phase::kBackwardStart);
    }
  }

  void meet(Context& context) {
    context.slot->turns.note(TurnAct::kCollective, base::str("collective ", context.next, " of work ", context.work));
    auto& met = meetings_[{context.microbatch, context.work, context.next}];
    met.push_back(&context);
    if (std::ssize(met) < layout_.members) return;
    for (auto* member : met) compute(*member);
  }

  void call(Context& context, Context& called) {
    context.slot->turns.note(TurnAct::kCall, base::str("call of work ", called.work));
    called.name.call = context.slot->calls[context.microbatch]++;
    later(message(), [this, &called] { one_more(called); });
  }

  void one_more(Context& context) {
    if (--context.missing == 0) want_slot(context, phase_of(context));
  }

  Phase phase_of(const Context& context) const {
    return context.in_backward || program_[context.work].backward ? Phase::kBackward : Phase::kForward;
  }

  void read(Context& context, int work) {
    if (context.here[work] && order_ != Order::kOfTheFirst) return compute(context);  // as code without teams may
    if (context.here[work]) return end_turn(context, phase_of(context));
    ++context.name.turn;
    context.reads = work;
    give_up(*context.slot);
  }

  // The thread goes on in another turn.
  void end_turn(Context& context, Phase phase) {
    ++context.name.turn;
    want_slot(context, phase);
    give_up(*context.slot);
  }

  void end(Context& context) {
    if (!std::exchange(context.answered, true)) {
      answer(context);
      if (splits(context)) return end_turn(context, Phase::kWeights);
    }
    ++over_;
    if (context.work == 0) ++context.slot->progress.finished;
    give_up(*context.slot);
  }

  void answer(const Context& context) {
    for (const int next : successors_[context.work]) one_more(context_of(context, next));
    for (const int reader : readers_[context.work]) {
      auto& to = context_of(context, reader);
      later(to.slot == context.slot ? 0 : message(), [this, &to] { one_more(to); });
    }
    if (context.work > 0) {
      auto& caller = context_of(context, program_[context.work].caller);
      later(message(), [this, &caller, work = context.work] { arrive(caller, work); });
    }
  }

  void arrive(Context& caller, int work) {
    caller.here[work] = true;
    if (caller.reads != work) return;
    caller.reads = -1;
    want_slot(caller, phase_of(caller));
  }

  const TeamLayout layout_;
  const Order order_;
  const Program program_;
  const int first_split_;
  std::vector<std::vector<int>> readers_, successors_;  // by work
  std::mt19937_64 random_;
  const int slowest_message_;
  std::deque<Context> contexts_;
  std::deque<Slot> slots_;
  std::map<std::tuple<int, int, std::size_t>, std::vector<Context*>> meetings_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::int64_t now_ = 0, order_of_events_ = 0, over_ = 0;
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const TeamLayout& layout) {
  return out << layout.partitions << " partitions, teams of " << layout.members << ", " << layout.microbatches
             << " microbatches, " << layout.schedule << " with " << layout.active;
}

TeamLayout any_layout(int partitions, int members, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto any = [&](unsigned below) { return static_cast<int>(random() % below); };
  TeamLayout layout{.partitions = partitions, .members = members, .microbatches = 2 + any(4), .active = 2 + any(4)};
  layout.schedule = std::array{"simple", "interleaved", "zero_bubble"}[any(3)];
  for (int partition = 0; partition < partitions; ++partition) {
    layout.first.push_back(any(static_cast<unsigned>(members)));
  }
  return layout;
}

bool step_ends(const TeamLayout& layout, Order order, std::uint64_t seed) {
  return TeamSimulation(layout, order, seed).run();
}

}  // namespace lamina::schedule
