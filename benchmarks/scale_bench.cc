// SPDX-License-Identifier: Apache-2.0
// Prints what the rank that sends most sends in each act of jobs of growing size, all ranks in this process. Each act
// has a line "ACT RANKS MESSAGES BYTES SOCKETS ENDPOINTS", with the most sockets and endpoints that a rank has by then.
// scale_bench MOST_RANKS FOLDER, an empty one for checkpoints.
#include <cstdio>
#include <cstdlib>

#include "benchmarks/scale_job.h"

int main(int count, char** words) {
  if (count != 3) {
    std::fputs("scale_bench MOST_RANKS FOLDER\n", stderr);
    return 2;
  }
  const std::filesystem::path folder = words[2];
  for (int size = 2; size <= std::atoi(words[1]); size *= 2) {
    using lamina::benchmarks::ScaleJob;
    ScaleJob job(size);
    const auto show = [&](const char* act, const lamina::benchmarks::Sent& sent, const ScaleJob& by) {
      std::printf("%s %d %lld %lld %d %d\n", act, size, static_cast<long long>(sent.messages),
                  static_cast<long long>(sent.bytes), by.most_sockets(), by.most_endpoints());
    };
    const auto print = [&](const char* act, const lamina::benchmarks::Sent& sent) { show(act, sent, job); };
    print("start", job.most_sent([&](int rank) { job.start(rank); }));
    print("step", job.most_sent([&](int rank) { job.step(rank); }));
    print("clipped_step", job.most_sent([&](int rank) { job.clipped_step(rank); }));
    print("batch_of_a_Trainer", job.most_sent([&](int rank) { job.batch(rank); }));
    print("resume", job.most_sent([&](int rank) { job.resume(rank); }));
    const auto save = [&](int rank) { job.save(rank, folder / std::to_string(size)); };
    print("save", job.most_sent(save, 1));
    print("save,_the_first_rank_too", job.most_sent(save));
    print("end_of_the_program", job.most_sent([&](int rank) { job.leave(rank); }));
    ScaleJob failing(size);
    show("failing_rank", failing.most_sent([&](int rank) { failing.fail(rank); }), failing);
    if (size > 2 && size < 256) {  // of two no majority is left, and more threads than that only look at each other
      job.lose(size / 2);
      print("change_of_epoch", job.most_sent([&](int rank) { job.go_on_without(size / 2, rank); }));
    }
    std::fflush(stdout);
  }
}
