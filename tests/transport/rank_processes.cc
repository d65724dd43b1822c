// SPDX-License-Identifier: Apache-2.0
#include "tests/transport/rank_processes.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/contact/secret.h"

namespace lamina::transport::testing {
namespace {

constexpr auto kMinute = std::chrono::seconds(60);
constexpr auto kWithin = std::chrono::seconds(5);

// Files of shared memory that no process has mapped: those of other jobs on this machine have one.
std::set<std::string> shared_memory_files() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) names.insert(entry.path().filename());
  for (const auto& process : std::filesystem::directory_iterator("/proc")) {
    std::ifstream maps(process.path() / "maps");
    std::string line;
    while (!names.empty() && std::getline(maps, line)) {
      const auto found = line.find("/dev/shm/");
      if (found != std::string::npos) names.erase(line.substr(found + std::strlen("/dev/shm/")));
    }
  }
  return names;
}

// System V segments that no process has attached: nothing will ever free them.
std::set<std::string> abandoned_segments() {
  std::ifstream table("/proc/sysvipc/shm");
  std::string line;
  std::getline(table, line);
  std::set<std::string> ids;
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string key, id, permissions, size, creator, last, attached;
    fields >> key >> id >> permissions >> size >> creator >> last >> attached;
    if (attached == "0") ids.insert(id);
  }
  return ids;
}

const std::set<std::string>& shared_memory_before() {
  static const auto names = shared_memory_files();
  return names;
}

// Names that were not there before, and are there whenever one looks. Another job on this machine is about to map, or
// to remove, what it has there alone.
template <class Look>
std::set<std::string> what_stays(const Look& look, const std::set<std::string>& before) {
  std::set<std::string> left = look();
  std::erase_if(left, [&](const auto& each) { return before.contains(each); });
  for (const auto end = std::chrono::steady_clock::now() + kWithin;
       !left.empty() && std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const std::set<std::string> now = look();
    std::erase_if(left, [&](const auto& each) { return !now.contains(each); });
  }
  return left;
}

}  // namespace

Transport::Events Inbox::events() {
  return {[this](Message message) {
            std::lock_guard guard(mutex_);
            messages_.push_back(std::move(message));
            changed_.notify_all();
          },
          [this](base::Rank rank, const std::string& why) {
            std::lock_guard guard(mutex_);
            lost_[rank] = why;
            ++losses_;
            changed_.notify_all();
          }};
}

void Inbox::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready, const char* what) {
  if (!changed_.wait_for(lock, kMinute, ready)) throw base::TimeoutError(base::str("no ", what, " within a minute"));
}

Message Inbox::next() {
  std::unique_lock lock(mutex_);
  wait(lock, [&] { return !messages_.empty(); }, "message");
  Message message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

std::string Inbox::lost(base::Rank rank) {
  std::unique_lock lock(mutex_);
  wait(lock, [&] { return lost_.contains(rank); }, "loss");
  return lost_.at(rank);
}

int Inbox::losses() {
  std::lock_guard guard(mutex_);
  return losses_;
}

std::size_t Inbox::waiting() {
  std::lock_guard guard(mutex_);
  return messages_.size();
}

Message object(std::string fields, value::Value body) {
  Message message;
  message.kind = "object";
  message.fields = std::move(fields);
  message.body = std::move(body);
  return message;
}

struct RankProcesses::Points {
  std::atomic<int> reached[16];
};

RankProcesses::RankProcesses(int size) : size_(size) {
  shared_memory_before();
  const contact::Secret secret = contact::random_secret();
  secret_ = ::memfd_create("lamina-secret", 0);
  EXPECT_EQ(::write(secret_, secret.data(), secret.size()), static_cast<ssize_t>(secret.size()));
  void* shared = ::mmap(nullptr, sizeof(Points), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  points_ = new (shared) Points{};
}

RankProcesses::~RankProcesses() {
  for (const auto& [rank, process] : running_) {
    ::kill(process, SIGKILL);
    ::waitpid(process, nullptr, 0);
  }
  ::close(secret_);
  ::munmap(points_, sizeof(Points));
  const std::set<std::string> nothing;
  EXPECT_EQ(what_stays(shared_memory_files, shared_memory_before()), nothing) << "shared memory left behind";
  EXPECT_EQ(what_stays(abandoned_segments, {}), nothing) << "shared memory left behind: see ipcs -m";
}

UcxOptions RankProcesses::options(int rank) const {
  UcxOptions options;
  options.rank = base::Rank(rank);
  options.size = size_;
  options.master_addr = "127.0.0.1";
  options.master_port = port();
  options.configuration = "the same";
  options.join_timeout = std::chrono::seconds(60);
  return options;
}

void RankProcesses::start(int rank, const std::function<void()>& body) {
  const pid_t process = ::fork();
  if (process != 0) {
    running_[rank] = process;
    return;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::setenv("LAMINA_SECRET_FD", std::to_string(secret_).c_str(), 1);
  base::set_log_name(base::str("rank ", rank, "/", size_));
  int status = 0;
  try {
    body();
  } catch (const std::exception& error) {
    std::cerr << "rank " << rank << ": " << error.what() << std::endl;
    status = 1;
  }
  std::cout.flush();
  ::_exit(::testing::Test::HasFailure() ? 1 : status);
}

void RankProcesses::run(const Body& body) {
  for (int rank = 0; rank < size_; ++rank) {
    start(rank, [&, rank] {
      const auto transport = open_ucx(options(rank));
      Inbox inbox;
      transport->start(inbox.events());
      body(*transport, inbox);
      transport->close(true);
    });
  }
}

void RankProcesses::kill(int rank, int signal) { ::kill(running_.at(rank), signal); }

int RankProcesses::wait(int rank) {
  const pid_t process = running_.at(rank);
  int status = 0;
  for (const auto end = std::chrono::steady_clock::now() + kMinute; ::waitpid(process, &status, WNOHANG) == 0;) {
    if (std::chrono::steady_clock::now() > end) {
      ADD_FAILURE() << "rank " << rank << " hangs";
      ::kill(process, SIGKILL);
      ::waitpid(process, &status, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  running_.erase(rank);
  return status;
}

void RankProcesses::expect_success() {
  while (!running_.empty()) {
    const int rank = running_.begin()->first;
    const int status = wait(rank);
    EXPECT_EQ(status, 0) << "rank " << rank << (WIFSIGNALED(status) ? ": signal " : ": exit ")
                         << (WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
  }
}

void RankProcesses::reach(int point) { ++points_->reached[point]; }

void RankProcesses::await(int point, int count) {
  const auto end = std::chrono::steady_clock::now() + kMinute;
  while (points_->reached[point] < count) {
    if (std::chrono::steady_clock::now() > end) throw base::TimeoutError(base::str("nobody reached point ", point));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace lamina::transport::testing
