// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/doorway.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>  // setenv
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "lamina/environment/address.h"
#include "lamina/environment/environment.h"
#include "lamina/session/next_place.h"

namespace lamina::session {
namespace {

// Under `lamina run --elastic 1`.
struct Leaving : testing::Test {
  Leaving() { ::setenv("LAMINA_ELASTIC", "1", 1); }
  ~Leaving() override { ::unsetenv("LAMINA_ELASTIC"); }
  Doorway doorway{[] { return Facts(); }};
};

TEST_F(Leaving, SigtermIsNotedAndComesAfterATrainingThatIsOver) {
  const auto told = [&] {
    doorway.watch_sigterm();
    ::raise(SIGTERM);
    if (!doorway.leaves()) ::_exit(1);
    doorway.forget_sigterm();
    ::_exit(2);
  };
  EXPECT_EXIT(told(), testing::KilledBySignal(SIGTERM), "");
}

TEST_F(Leaving, OneThatLeavesEndsTheProcessInOrderWhereOthersGoOn) {
  const auto code = [&](bool others_go_on) {
    doorway.watch_sigterm();
    ::raise(SIGTERM);
    try {
      doorway.leave(others_go_on);
    } catch (const ProcessEnds& ends) {
      EXPECT_FALSE(doorway.leaves());
      doorway.forget_sigterm();
      return ends.code;
    }
  };
  EXPECT_EQ(code(true), 0);
  EXPECT_EQ(code(false), 128 + SIGTERM);
}

TEST_F(Leaving, AChildIsEndedBySigtermAsEver) {
  doorway.watch_sigterm();
  const auto child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::raise(SIGTERM);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
  EXPECT_FALSE(doorway.leaves());
  doorway.forget_sigterm();
}

void own(int) {}

TEST_F(Leaving, AHandlerOfTheProgramCounts) {
  ::signal(SIGTERM, own);
  doorway.watch_sigterm();
  ::raise(SIGTERM);
  EXPECT_FALSE(doorway.leaves());
  doorway.forget_sigterm();
  EXPECT_EQ(::signal(SIGTERM, SIG_DFL), own);
}

TEST(FactsOfTraining, NameWhatNewcomersHaveInCommon) {
  const auto file = testing::TempDir() + "/program";
  std::ofstream(file) << "abc";
  const auto facts = facts_of_training("program", file, {{"w", at::zeros({2, 3})}}, nullptr, "SGD", {1, 2});
  const Facts expected{
      {"program (SHA-256)", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"model", "w Float [2, 3]"},
      {"optimizer", "SGD\na group of 1 parameters\na group of 2 parameters"},
  };
  EXPECT_EQ(facts, expected);
}

TEST(NextPlace, IsWhatTheEnvironmentSaysFromNowOn) {
  ::setenv("LAMINA_NEWCOMER", "1", 1);
  const auto before = said_place();
  environment::World place{.rank = base::Rank(1), .size = 3, .local_rank = 1, .local_size = 3};
  place.master_port = 4711;
  take_place(place, 5);
  const auto world = environment::read_world(environment::process_environment());
  EXPECT_EQ(world.rank, base::Rank(1));
  EXPECT_EQ(world.size, 3);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_size, 3);
  EXPECT_EQ(world.master_port, 4711);
  EXPECT_TRUE(world.launched);
  EXPECT_EQ(epoch_of_environment(), 5);
  EXPECT_FALSE(environment::is_newcomer());
  const auto said = said_place();
  EXPECT_NE(std::ranges::find(said, std::pair<std::string, std::string>("LAMINA_EPOCH", "5")), said.end());
  for (const auto& [name, value] : said) ::unsetenv(name.c_str());
  for (const auto& [name, value] : before) ::setenv(name.c_str(), value.c_str(), 1);
}

TEST(FreePort, IsNobodyElsesUntilItIsLetGo) {
  const Session alone({}, {}, {});
  int number = 0;
  {
    const FreePort one(alone), other(alone);
    EXPECT_NE(one.number(), other.number());
    number = one.number();
  }
  EXPECT_TRUE(environment::Address::parse("127.0.0.1 " + std::to_string(number)).listen());
}

}  // namespace
}  // namespace lamina::session
