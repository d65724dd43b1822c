// SPDX-License-Identifier: Apache-2.0
// Prints what the rank that sends most sends in each act of jobs of growing size, all ranks in this process. Each act
// has a line "ACT RANKS MESSAGES BYTES SOCKETS", with the most sockets that a rank has by then. scale_bench MOST_RANKS
// FOLDER, an empty one for checkpoints.
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
    lamina::benchmarks::ScaleJob job(size);
    const auto print = [&](const char* act, const lamina::benchmarks::Sent& sent) {
      std::printf("%s %d %lld %lld %d\n", act, size, static_cast<long long>(sent.messages),
                  static_cast<long long>(sent.bytes), job.most_sockets());
    };
    print("start", job.most_sent([&](int rank) { job.start(rank); }));
    print("step", job.most_sent([&](int rank) { job.step(rank); }));
    print("clipped_step", job.most_sent([&](int rank) { job.clipped_step(rank); }));
    print("batch_of_a_Trainer", job.most_sent([&](int rank) { job.batch(rank); }));
    print("resume", job.most_sent([&](int rank) { job.resume(rank); }));
    const auto save = [&](int rank) { job.save(rank, folder / std::to_string(size)); };
    print("save", job.most_sent(save, 1));
    print("save,_the_first_rank_too", job.most_sent(save));
    std::fflush(stdout);
  }
}
