// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "lamina/base/fd.h"

namespace lamina {

// Three processes that run one thing over and over, the last of which a signal meets.
class MemberProcesses {
 public:
  static constexpr int kMembers = 3, kLast = kMembers - 1;
  using Say = std::function<void(std::string line)>;
  // Forks them. Each calls `run` with a folder that they have in common, its rank, and what writes a line for hear();
  // its first line is "runs", once it does.
  explicit MemberProcesses(const std::function<void(const std::string& folder, int rank, const Say& say)>& run) {
    char name[] = "/tmp/lamina_members_XXXXXX";
    folder_ = ::mkdtemp(name);
    for (int rank = 0; rank < kMembers; ++rank) {
      std::array<int, 2> ends{};
      EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
      const pid_t pid = ::fork();
      if (pid == 0) {
        run(folder_, rank, [out = ends[1]](std::string line) {
          line += '\n';
          EXPECT_EQ(::write(out, line.data(), line.size()), std::ssize(line));
        });
        ::_exit(0);
      }
      pids_.push_back(pid);
      ::close(ends[1]);
      said_.emplace_back(ends[0]);
    }
    for (int rank = 0; rank < kMembers; ++rank) EXPECT_EQ(hear(rank), "runs");
  }
  ~MemberProcesses() {
    for (const pid_t pid : pids_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    std::filesystem::remove_all(folder_);
  }

  void signal_the_last(int number) const { ::kill(pids_.back(), number); }
  // The next line of a member.
  std::string hear(int rank) const {
    std::string line;
    for (char letter = 0; ::read(said_[rank].get(), &letter, 1) == 1 && letter != '\n';) line += letter;
    return line;
  }

 private:
  std::string folder_;
  std::vector<pid_t> pids_;
  std::vector<base::Fd> said_;
};

}  // namespace lamina
