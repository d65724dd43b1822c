// SPDX-License-Identifier: Apache-2.0
// The seconds of a step in simulated time: a chain of one stage per rank, which rank 0 has the loss of.
//
//     simulation_bench P M SCHEDULE WINDOW FORWARD_S BACKWARD_S      (WINDOW 0: the default)
#include <cstdio>
#include <cstdlib>

#include "benchmarks/simulated_step.h"

int main(int count, char** arguments) {
  using namespace lamina;
  if (count != 7) {
    std::fputs("usage: simulation_bench P M SCHEDULE WINDOW FORWARD_S BACKWARD_S\n", stderr);
    return 2;
  }
  config::Config config;
  config.partitions = std::atoi(arguments[1]);
  bench::read_schedule(config, arguments + 2);
  const double forward = std::atof(arguments[5]), backward = std::atof(arguments[6]);
  std::printf("%.9f\n", bench::simulated(config, forward, forward + backward));
  return 0;
}
