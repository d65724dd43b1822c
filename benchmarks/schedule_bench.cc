// SPDX-License-Identifier: Apache-2.0
// The schedule on sleeping devices, without Python: a chain of one stage per rank, whose operations sleep 10 ms forward
// and 20 ms backward. Half of that is for their weight. The loss is computed on rank 0.
//
//     lamina run -n P -c schedule_bench M SCHEDULE WINDOW STEPS      (WINDOW 0: the default)
//
// Rank 0 prints three times for each step after two that are not counted. The first is from rank 0's entry until the
// step's end. The second is the ideal (m + p - 1)(tf + tb), the operations measured alone, and the third that of the
// simulated schedule.
#include <cstdio>
#include <cstdlib>

#include "benchmarks/bench_session.h"
#include "benchmarks/sleeping_stage.h"

namespace {

using namespace lamina;

value::Value stage(const value::Value& x) {
  thread_local const at::Tensor weight = at::full({1}, 1.0).set_requires_grad(true);
  return bench::stage(x.as<at::Tensor>(), weight);
}

void run(const config::Config& config, int steps) {
  bench::BenchSession session(config);
  std::vector<base::ModuleId> stages;
  for (int i = 0; i < config.partitions; ++i) stages.push_back(session.add("stage" + std::to_string(i), i, stage));
  const auto body = [&](base::Microbatch) {
    value::Value x = bench::microbatch();
    for (const auto id : stages) x = session.job().call(id, std::move(x));
    const auto loss = x.as<at::Tensor>().mean();
    session.job().backward({loss}, {}, 1.0 / config.microbatches);
    return value::Value(loss.detach());
  };
  for (int i = 0; i < steps + 2; ++i) {
    const auto alone = session.leads() ? bench::alone() : std::pair(0.0, 0.0);  // the others wait in the step
    const double seconds = session.step(body);
    if (session.leads() && i >= 2) bench::print(config, seconds, alone);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) {
    std::fputs("usage: lamina run -n P -c schedule_bench M SCHEDULE WINDOW STEPS\n", stderr);
    return 2;
  }
  run(bench::configured(arguments), std::atoi(arguments[4]));
  return 0;
}
