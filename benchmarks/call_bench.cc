// SPDX-License-Identifier: Apache-2.0
// A remote call without Python, timed until the value is read:
//
//     lamina run -n 2 -c call_bench SIZE...
//
// Rank 0 prints median seconds for each size (bytes in, and out) of the work itself, and of two kinds of calls. Calls
// that are alike are "seen"; calls like no earlier one, for a number among their arguments changes, are "new". Calls of
// up to 64 KiB multiply by a number; larger ones return memory as it is, so that they measure the way alone.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "benchmarks/bench_session.h"

namespace {

using namespace lamina;
using bench::Clock;

constexpr std::int64_t kSmall = 1 << 16;

value::Value work(const value::Value& arguments) {
  const auto& x = arguments.as<value::Tuple>().items.at(0).as<at::Tensor>();
  if (x.numel() <= kSmall / 4) return at::mul(x, 2);
  return at::empty({x.numel()});
}

double median_seconds(int count, const std::function<void(int)>& once) {
  std::vector<double> samples;
  for (int i = 0; i < count + 5; ++i) {
    const auto begin = Clock::now();
    once(i);
    if (i >= 5) samples.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::ranges::sort(samples);
  return samples[samples.size() / 2];
}

void measure(bench::BenchSession& session, base::ModuleId module, std::int64_t bytes) {
  const auto x = at::zeros({bytes / 4});
  const int count = bytes <= kSmall ? 1000 : 30;
  const auto arguments = [&](std::int64_t number) { return value::Value(value::Tuple{{x, number}}); };
  const auto call = [&](std::int64_t number) {
    session.job().call(module, arguments(number)).as<at::Tensor>().data_ptr();  // which waits for the value
  };
  session.step([&](base::Microbatch) {
    const c10::NoGradGuard no_grad;
    const double seen = median_seconds(count, [&](int) { call(-1); });
    const double fresh = median_seconds(count, [&](int i) { call(bytes + i); });
    const double here = median_seconds(count, [&](int) { work(arguments(0)); });
    std::printf("%ld %.9f %.9f %.9f\n", static_cast<long>(bytes), seen, fresh, here);
    return value::Value();
  });
}

}  // namespace

int main(int count, char** arguments) {
  ::mallopt(M_MMAP_THRESHOLD, 256 << 20);  // memory that was freed is used again, without new pages
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
  config::Config config;
  config.partitions = 2;
  bench::BenchSession session(config);
  const auto module = session.add("there", 1, work);
  for (int i = 1; i < count; ++i) measure(session, module, std::atoll(arguments[i]));
}
