// SPDX-License-Identifier: Apache-2.0
// Costs and savings of `active_microbatches`, in simulated time: for each number of stages, of microbatches and each
// window, the step's time over the ideal (m + p - 1)(tf + tb), with tb = 2 tf, and how many microbatches' activations
// the fullest rank holds at once. Messages take up to a hundredth of tf, at random: exactly equal times would make
// every tie fall the same way. The median and the worst of 51 draws.
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "lamina/schedule/simulation.h"

namespace {

using namespace lamina;
using schedule::Phase;

struct Outcome {
  double of_ideal = 0;
  int held = 0;
};

Outcome simulated(int stages, int microbatches, int window, std::mt19937& random) {
  schedule::Chain chain = schedule::even_chain(stages, microbatches, 10'000, 20'000);
  chain.delay = [&] { return static_cast<std::int64_t>(random() % 100); };
  const auto turns = schedule::simulate(*schedule::interleaved_schedule(window), chain);
  std::vector<int> holds(stages);
  Outcome outcome;
  for (const auto& turn : turns) {
    const bool forward =
        turn.ticket.phase == Phase::kStart || (turn.ticket.phase == Phase::kForward && turn.visit < stages);
    if (forward) outcome.held = std::max(outcome.held, ++holds[turn.rank]);
    if (turn.ticket.phase == Phase::kBackward) --holds[turn.rank];
  }
  const std::int64_t ideal = std::int64_t{microbatches + stages - 1} * 30'000;
  outcome.of_ideal = static_cast<double>(turns.back().end) / static_cast<double>(ideal);
  return outcome;
}

void print(const char* name, int stages, int microbatches, int window) {
  std::mt19937 random(1);
  std::vector<double> times;
  int held = 0;
  for (int i = 0; i < 51; ++i) {
    const auto outcome = simulated(stages, microbatches, window, random);
    times.push_back(outcome.of_ideal);
    held = std::max(held, outcome.held);
  }
  std::ranges::sort(times);
  std::printf("p=%d m=%-2d  %-7s %2d  %.3f of ideal, at worst %.3f, holds %2d\n", stages, microbatches, name, window,
              times[times.size() / 2], times.back(), held);
}

}  // namespace

int main() {
  for (const int stages : {2, 4, 8}) {
    for (const int microbatches : {4, 8, 16, 32}) {
      print("p", stages, microbatches, stages);
      print("p + 2", stages, microbatches, stages + 2);
      print("2p", stages, microbatches, 2 * stages);
      print("2p + 1", stages, microbatches, 2 * stages + 1);
      print("2p + 2", stages, microbatches, 2 * stages + 2);
      print("m", stages, microbatches, microbatches);
    }
  }
}
