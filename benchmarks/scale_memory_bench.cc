// SPDX-License-Identifier: Apache-2.0
// Prints what the rank that has most has in a job of so many processes that UCX connects. A line "WHEN RANKS SOCKETS
// ENDPOINTS KIB" comes once they are connected, and once each has sent to the ranks that it meets in an agreement. KIB
// is the memory that is its own, and its share of what it has in common with others. scale_memory_bench RANKS
// FREE_PORT.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/error.h"
#include "lamina/messaging/exchange.h"
#include "lamina/transport/ucx/probe.h"
#include "lamina/transport/ucx/ucx.h"

namespace {

using lamina::base::Rank;

constexpr auto kPatience = std::chrono::minutes(4);
constexpr const char* kWhen[] = {"connected", "after_an_agreement"};

// In memory of all ranks.
struct Shared {
  std::atomic<int> come[3];
  struct Most {
    std::atomic<std::int64_t> sockets, endpoints, kib;
  } most[2];
};

void raise_to(std::atomic<std::int64_t>& most, std::int64_t value) {
  for (auto seen = most.load(); seen < value && !most.compare_exchange_weak(seen, value);) {
  }
}

std::int64_t own_kib() {
  std::ifstream lines("/proc/self/smaps_rollup");
  std::int64_t sum = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("Pss_Anon:") || line.starts_with("Pss_Shmem:"))
      sum += std::stoll(line.substr(line.find(':') + 1));
  }
  return sum;
}

void meet(Shared& shared, int point, int size) {
  ++shared.come[point];
  const auto deadline = lamina::base::Deadline::after(kPatience);
  while (shared.come[point] < size) {
    if (deadline.expired()) throw lamina::base::TimeoutError("a rank has not come");
    ::usleep(2000);
  }
}

void run_rank(Shared& shared, int rank, int size, int port) {
  lamina::transport::UcxOptions options;
  options.rank = Rank(rank);
  options.size = size;
  options.master_addr = "127.0.0.1";
  options.master_port = port;
  options.configuration = "the same";
  const auto transport = lamina::transport::open_ucx(options);
  transport->start({[](const auto&) {}, [](Rank, const std::string&) {}});
  auto& probe = dynamic_cast<lamina::transport::ucx::Probe&>(*transport);
  const auto measure = [&](int when) {
    meet(shared, when, size);
    auto& most = shared.most[when];
    raise_to(most.sockets, probe.sockets());
    raise_to(most.endpoints, probe.endpoints());
    raise_to(most.kib, own_kib());
  };
  measure(0);
  lamina::transport::Message word;
  word.kind = "word";
  word.call.origin = Rank(rank);
  for (const auto& meeting : lamina::messaging::meetings(rank, size)) {
    if (meeting.gives) transport->send(Rank(static_cast<std::int64_t>(meeting.with)), word);
  }
  measure(1);
  meet(shared, 2, size);
  transport->close(true);
}

bool run_job(int size, int port) {
  void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& shared = *new (memory) Shared{};
  std::fflush(stdout);
  for (int rank = 0; rank < size; ++rank) {
    if (::fork() != 0) continue;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    int status = 0;
    try {
      run_rank(shared, rank, size, port);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      status = 1;
    }
    ::_exit(status);
  }
  bool well = true;
  for (int status = 0; ::wait(&status) > 0;) well = well && status == 0;
  for (int when = 0; well && when < 2; ++when) {
    const auto& most = shared.most[when];
    std::printf("%s %d %lld %lld %lld\n", kWhen[when], size, static_cast<long long>(most.sockets),
                static_cast<long long>(most.endpoints), static_cast<long long>(most.kib));
  }
  return well;
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) {
    std::fputs("scale_memory_bench RANKS FREE_PORT\n", stderr);
    return 2;
  }
  return run_job(std::atoi(words[1]), std::atoi(words[2])) ? 0 : 1;
}
