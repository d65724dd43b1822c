// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "lamina/base/fd.h"

namespace lamina::environment {
namespace {

// The channel that a reporter is started with, and the other end of it.
class ProgressTest : public ::testing::Test {
 protected:
  void connect(int type) {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, type | SOCK_NONBLOCK, 0, ends), 0);
    launcher_ = base::Fd(ends[0]);
    rank_ = base::Fd(ends[1]);
    ::setenv("LAMINA_PROGRESS_FD", std::to_string(rank_.get()).c_str(), 1);
  }
  ~ProgressTest() override { ::unsetenv("LAMINA_PROGRESS_FD"); }

  base::Fd launcher_, rank_;
};

TEST_F(ProgressTest, TellsWhichStepBeginsAndEndsInWhichProcess) {
  connect(SOCK_DGRAM);
  const ProgressReporter reporter;
  reporter.begin(7);
  reporter.end(7);
  for (const int inside : {1, 0}) {
    Progress progress;
    ASSERT_EQ(::recv(launcher_.get(), &progress, sizeof progress, 0), static_cast<ssize_t>(sizeof progress));
    EXPECT_EQ(progress.step, 7);
    EXPECT_EQ(progress.inside, inside);
    EXPECT_EQ(progress.process, ::getpid());
  }
}

// Else a rank that ends in order would look as if it had left in its last step.
TEST_F(ProgressTest, TheEndOfASessionIsToldThoughTheSocketIsFull) {
  connect(SOCK_DGRAM);
  ::fcntl(launcher_.get(), F_SETFL, 0);  // it may have read all before the last report is sent
  const timeval limit{.tv_sec = 10};
  ::setsockopt(launcher_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  const ProgressReporter reporter;
  for (int step = 0; step < 100000; ++step) reporter.begin(step);
  std::jthread launcher([&] {
    Progress progress;
    while (progress.inside != Progress::kClosed) {
      ASSERT_EQ(::recv(launcher_.get(), &progress, sizeof progress, 0), static_cast<ssize_t>(sizeof progress));
    }
  });
  reporter.close();
}

TEST_F(ProgressTest, NeitherWaitsNorFailsWhenNobodyListens) {
  connect(SOCK_DGRAM);
  const ProgressReporter reporter;
  for (int step = 0; step < 100000; ++step) reporter.begin(step);  // more than the socket holds
  launcher_.reset();
  reporter.begin(0);
}

TEST_F(ProgressTest, WritesNothingToADescriptorThatIsSomethingElse) {
  connect(SOCK_STREAM);
  ProgressReporter().begin(1);
  char byte = 0;
  EXPECT_LT(::recv(launcher_.get(), &byte, 1, 0), 0);
}

TEST_F(ProgressTest, WithoutALauncherNothingIsReported) { ProgressReporter().begin(1); }

}  // namespace
}  // namespace lamina::environment
