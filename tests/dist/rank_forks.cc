// SPDX-License-Identifier: Apache-2.0
#include "tests/dist/rank_forks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "lamina/dist/dist.h"

namespace lamina::dist::testing {
namespace {

constexpr const char* kLauncher[] = {"RANK",        "WORLD_SIZE",  "LOCAL_RANK",      "LOCAL_WORLD_SIZE", "NODE_RANK",
                                     "MASTER_ADDR", "MASTER_PORT", "LAMINA_LAUNCHER", "GROUP_RANK"};

int run(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "it threw " << error.what();
  }
  return ::testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace

RankForks::RankForks(int size) : size_(size) {}

RankForks::~RankForks() {
  for (const auto& [rank, pid] : running_) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
}

Variables RankForks::variables(int rank) const {
  const auto own = std::to_string(rank), size = std::to_string(size_);
  return {{"RANK", own},
          {"WORLD_SIZE", size},
          {"LOCAL_RANK", own},
          {"LOCAL_WORLD_SIZE", size},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port_.number())}};
}

void RankForks::start(int rank, const std::function<void()>& body, const Variables& variables) {
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    for (const char* name : kLauncher) ::unsetenv(name);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    const int code = run(body);
    std::cout.flush();
    destroy_dist();
    ::_exit(code);
  }
  running_[rank] = pid;
}

void RankForks::expect_success(const std::vector<int>& killed) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!running_.empty() && std::chrono::steady_clock::now() < deadline) {
    std::erase_if(running_, [&](const auto& one) {
      int status = 0;
      if (::waitpid(one.second, &status, WNOHANG) != one.second) return false;
      const bool was_killed = std::ranges::find(killed, one.first) != killed.end();
      EXPECT_EQ(WIFSIGNALED(status), was_killed) << "rank " << one.first;
      EXPECT_TRUE(was_killed || status == 0) << "rank " << one.first << ": status " << status;
      return true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_TRUE(running_.empty()) << running_.size() << " ranks did not end";
}

void in_world(int size, const std::function<void()>& body) {
  RankForks ranks(size);
  for (int rank = 0; rank < size; ++rank) {
    ranks.start(rank, [&] {
      initialize_dist("cpu", std::chrono::seconds(30));
      body();
      barrier();
    });
  }
  ranks.expect_success();
}

void alone(const std::function<void()>& body) {
  RankForks one(1);
  one.start(0, body, {});
  one.expect_success();
}

}  // namespace lamina::dist::testing
