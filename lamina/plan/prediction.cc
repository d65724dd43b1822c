// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/prediction.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "lamina/plan/tied_parameters.h"
#include "lamina/schedule/simulation.h"

namespace lamina::plan {

double step_us(const StepShape& shape, const Goal& goal) {
  const int window = std::max(goal.window(), 1);
  const int rounds = (goal.microbatches + window - 1) / window;
  const auto pass = [&](double path, double heaviest, int passes) {
    return std::max(path + (goal.microbatches - 1) * heaviest, passes * path);
  };
  if (goal.simple()) {
    return pass(shape.path_forward_us, shape.heaviest_forward_us, rounds) +
           pass(shape.path_backward_us, shape.heaviest_backward_us, 1);
  }
  return pass(shape.path_forward_us + shape.path_backward_us, shape.heaviest_us, rounds);
}

namespace {

constexpr std::int64_t kMostTurns = 200'000;  // what takes some tenths of a second
constexpr std::int64_t kWindowsToSettle = 2;  // of so many microbatches the later ones do what those before did
constexpr int kDraws = 5;
constexpr double kJitter = 0.05;

// The longest ways through the pieces of a microbatch.
double path_us(const std::vector<schedule::Piece>& pieces, bool forward) {
  std::vector<std::int64_t> ends(pieces.size());
  std::int64_t longest = 0;
  const auto follow = [&](std::size_t at) {
    const auto& piece = pieces[at];
    for (const auto& need : forward ? piece.forward_needs : piece.backward_needs)
      ends[at] = std::max(ends[at], ends[need.piece] + need.time);
    if (forward && piece.before >= 0) ends[at] = std::max(ends[at], ends[piece.before]);
    ends[at] += forward ? piece.work.forward : piece.work.backward;
    if (!forward && piece.before >= 0) ends[piece.before] = std::max(ends[piece.before], ends[at]);
    longest = std::max(longest, ends[at]);
  };
  for (std::size_t i = 0; i < pieces.size(); ++i) follow(forward ? i : pieces.size() - 1 - i);
  return static_cast<double>(longest) / kTicksPerMicrosecond;
}

StepShape shape_of(const PlannedWork& work) {
  StepShape shape;
  shape.path_forward_us = path_us(work.workload.pieces, true);
  shape.path_backward_us = path_us(work.workload.pieces, false);
  for (const RankLoad& rank : work.loads) {
    shape.heaviest_forward_us = std::max(shape.heaviest_forward_us, rank.forward_us + rank.messages_us);
    shape.heaviest_backward_us = std::max(shape.heaviest_backward_us, rank.backward_us + rank.messages_us);
    shape.heaviest_us = std::max(shape.heaviest_us, rank.time_us());
  }
  return shape;
}

std::unique_ptr<schedule::Schedule> schedule_of(const Goal& goal) {
  return schedule::make_schedule(goal.schedule, goal.window(), goal.partitions);
}

// Turns of a microbatch of so many pieces.
std::int64_t turns_of(std::size_t pieces) { return 2 * static_cast<std::int64_t>(pieces); }

// The number of microbatches whose turns are few enough to simulate: at least one.
int simulated_microbatches(const Goal& goal, std::size_t pieces) {
  const std::int64_t settled = std::min<std::int64_t>(goal.microbatches, kWindowsToSettle * goal.window());
  return static_cast<int>(std::clamp<std::int64_t>(kMostTurns / turns_of(pieces), 1, settled));
}

double drawn_steps_us(const PlannedWork& work, const Goal& goal, int draws, double jitter) {
  schedule::Workload workload = work.workload;
  workload.microbatches = simulated_microbatches(goal, workload.pieces.size());
  workload.jitter = jitter;
  const auto schedule = schedule_of(goal);
  double step_us = 0;
  for (int draw = 0; draw < draws; ++draw) {
    workload.draw = draw;
    step_us += static_cast<double>(schedule::step_time(*schedule, workload)) / kTicksPerMicrosecond / draws;
  }
  const int left = goal.microbatches - workload.microbatches;
  if (left == 0) return step_us;
  const StepShape shape = shape_of(work);
  if (goal.simple()) return step_us + left * (shape.heaviest_forward_us + shape.heaviest_backward_us);
  return step_us + left * std::max(shape.heaviest_us, (shape.path_forward_us + shape.path_backward_us) / goal.window());
}

// Per piece, what comes at least before its forward and after its backward; and the longest way forward and back.
struct Span {
  std::vector<std::int64_t> before, after;
  std::int64_t path = 0;
};

Span span_of(const std::vector<schedule::Piece>& pieces, bool splits) {
  Span span{std::vector<std::int64_t>(pieces.size()), std::vector<std::int64_t>(pieces.size())};
  auto& [before, after, path] = span;
  const auto raise = [](std::int64_t& time, std::int64_t other) { time = std::max(time, other); };
  const auto forward = [&](int at) { return before[at] + pieces[at].work.forward; };
  const auto backward = [&](int at) {
    return pieces[at].work.backward - (splits ? pieces[at].work.weights : 0) + after[at];
  };
  for (int at = 0; at < static_cast<int>(pieces.size()); ++at) {
    const schedule::Piece& piece = pieces[at];
    if (piece.before >= 0) {
      raise(before[at], forward(piece.before));
      raise(after[at], backward(piece.before));
    }
    for (const auto& need : piece.forward_needs) raise(before[at], forward(need.piece) + need.time);
    for (const auto& need : piece.backward_needs) raise(after[need.piece], need.time + backward(at));
    path = forward(at) + backward(at);  // at last that of the loss
  }
  return span;
}

}  // namespace

Prediction predict(const Route& route, const Assignment& owners, const Goal& goal) {
  PlannedWork work = work_of(route, owners, goal);
  const StepShape shape = shape_of(work);
  return {std::move(work.loads), shape};
}

double simulated_step_us(const Route& route, const Assignment& owners, const Goal& goal) {
  const PlannedWork work = work_of(route, owners, goal);
  return drawn_steps_us(work, goal, 1, 0);
}

double mean_step_us(const PlannedWork& work, const Goal& goal) { return drawn_steps_us(work, goal, kDraws, kJitter); }

double least_step_us(const PlannedWork& work, const Goal& goal) {
  const auto& pieces = work.workload.pieces;
  const bool splits = goal.schedule == "zero_bubble";
  const Span span = span_of(pieces, splits);
  struct Rank {
    std::int64_t before = std::numeric_limits<std::int64_t>::max();
    std::int64_t work = 0;
    std::int64_t after = std::numeric_limits<std::int64_t>::max();
  };
  std::vector<Rank> ranks(goal.partitions);
  for (std::size_t at = 0; at < pieces.size(); ++at) {
    Rank& rank = ranks[pieces[at].work.rank];
    rank.before = std::min(rank.before, span.before[at]);
    rank.work += pieces[at].work.forward + pieces[at].work.backward;
    rank.after = std::min(rank.after, span.after[at]);
  }
  const int windows = goal.simple() ? 1 : goal.microbatches / std::max(goal.window(), 1);
  std::int64_t least = span.path * windows;
  for (const Rank& rank : ranks) {
    // A weight part may be the last that a rank does: nothing comes after it.
    const std::int64_t after = splits ? 0 : rank.after;
    if (rank.work > 0) least = std::max(least, rank.before + goal.microbatches * rank.work + after);
  }
  return static_cast<double>(least) / kTicksPerMicrosecond;
}

std::int64_t simulated_turns(std::size_t pieces, const Goal& goal) {
  return std::int64_t{kDraws} * simulated_microbatches(goal, pieces) * turns_of(pieces);
}

std::vector<int> simulated_held(const Route& route, const Assignment& owners, const Goal& goal) {
  schedule::Workload workload = work_of(route, owners, goal).workload;
  workload.microbatches = goal.microbatches;
  const std::int64_t most_microbatches = kMostTurns / turns_of(workload.pieces.size());
  if (goal.microbatches > most_microbatches) {
    const bool settles = !goal.simple() && kWindowsToSettle * goal.window() <= most_microbatches;
    if (!settles) return std::vector<int>(goal.partitions, goal.held());
    workload.microbatches = static_cast<int>(most_microbatches);
  }
  workload.delay = [] { return 1; };  // what would come just as a rank chooses comes just after, as it mostly does
  struct Held {
    std::int64_t from = std::numeric_limits<std::int64_t>::max();
    std::int64_t to = 0;
  };
  std::vector<std::map<base::Microbatch, Held>> ranks(goal.partitions);
  for (const schedule::Turn& turn : schedule::simulate(*schedule_of(goal), workload)) {
    Held& held = ranks[turn.rank][turn.ticket.microbatch];
    held.from = std::min(held.from, turn.start);
    if (turn.frees()) held.to = std::max(held.to, turn.end);
  }
  std::vector<int> most;
  for (const auto& microbatches : ranks) {
    std::map<std::int64_t, int> changes;
    for (const auto& [microbatch, held] : microbatches) {
      ++changes[held.from];
      --changes[held.to];
    }
    int now = 0, largest = 0;
    for (const auto& [time, change] : changes) largest = std::max(largest, now += change);
    most.push_back(largest);
  }
  return most;
}

std::vector<std::int64_t> memory_bytes(const ModuleTree& tree, const Assignment& owners, const std::vector<int>& held) {
  const std::vector<std::int64_t> parameter_bytes = group_bytes(tree);
  std::vector<std::int64_t> memory(held.size());
  for (std::size_t node = 0; node < tree.size(); ++node) {
    const auto rank = owners[node].value;
    memory[rank] += held_bytes(parameter_bytes[node], tree[node].activation_bytes, held[rank]);
  }
  return memory;
}

std::vector<std::int64_t> memory_bytes(const ModuleTree& tree, const Assignment& owners, const Goal& goal) {
  return memory_bytes(tree, owners, std::vector<int>(goal.partitions, goal.held()));
}

}  // namespace lamina::plan
