// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/passes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <latch>

#include "lamina/base/error.h"
#include "lamina/data_parallel/newcomers.h"
#include "tests/message_of.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::data_parallel {
namespace {

using namespace std::chrono_literals;

using Comes = Passes::Comes;

constexpr auto kLong = 60s;  // only a hang reaches it

// Replicas as threads of this process.
class PassesTest : public testing::Test {
 protected:
  void run(int size, const std::function<void(int, Passes&)>& replica, base::Clock::duration timeout = kLong) {
    messaging::Mailboxes boxes(size);
    const auto errors = boxes.run([&](int i) {
      Passes passes(boxes[i], boxes.ranks(), {timeout}, std::make_shared<value::Failures>());
      replica(i, passes);
    });
    for (const auto& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }
};

// One that never ends by itself.
void wait_in_a_collective(Passes& passes) {
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  base::wait_until(lock, never, passes.patience(), [] { return false; }, [] { return "a collective"; });
}

std::exception_ptr error_of(const std::string& text) { return std::make_exception_ptr(std::invalid_argument(text)); }

const std::vector<int> kBoth{0, 1};

TEST_F(PassesTest, EveryReplicaLearnsWhoTrains) {
  run(3, [](int i, Passes& passes) {
    EXPECT_EQ(passes.meet().present, (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(passes.meet({i != 1 ? Comes::kTrains : Comes::kHasNoData}).present, (std::vector<int>{0, 2}));
    EXPECT_EQ(passes.meet({Comes::kHasNoData}).present, std::vector<int>{});
  });
}

TEST_F(PassesTest, AllHearInTheSamePassThatNewcomersWait) {
  newcomers().wait = newcomers().heard = false;
  run(3, [](int i, Passes& passes) {
    passes.meet();
    EXPECT_FALSE(newcomers().heard);
  });
  newcomers().wait = true;  // of all of them here, which are one process
  run(2, [](int i, Passes& passes) {
    EXPECT_EQ(passes.meet({i == 0 ? Comes::kTrains : Comes::kHasNoData}).present, (std::vector<int>{0}));
    EXPECT_TRUE(newcomers().heard);
  });
  newcomers().wait = newcomers().heard = false;
}

TEST_F(PassesTest, ReplicasWithOneBatchAreToldUnlessItIsOnPurpose) {
  const std::vector<std::vector<std::int64_t>> batches{
      {7, 9, 7}, {5, 7, 9}, {7, Passes::kUnknownBatch, Passes::kUnknownBatch}, {7, 7, Passes::kSharedBatch}};
  for (const auto& each : batches) {
    testing::internal::CaptureStderr();
    run(3, [&](int i, Passes& passes) { passes.meet({.batch = each[i]}); });
    const auto said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("get_sampler") != std::string::npos, &each == &batches.front()) << said;
  }
}

TEST_F(PassesTest, AFailedStepEndsThePassOnAllAndTheNextOneIsAlike) {
  run(3, [](int i, Passes& passes) {
    passes.meet();
    for (const std::string each : {"bad batch", "worse batch"}) {
      if (i == 1) {
        passes.fail(error_of(each));
      } else {
        const auto message = message_of<value::RemoteFailure>([&] { passes.meet(); });
        EXPECT_TRUE(message.starts_with("std::invalid_argument on rank 1: " + each)) << message;
        EXPECT_NE(message.find("of all replicas; replica 1 met it"), std::string::npos) << message;
      }
    }
    EXPECT_EQ(passes.meet().present.size(), 3u);
  });
}

TEST_F(PassesTest, AFailureIsHeardWhileAnotherReplicaIsStillAtWork) {
  std::latch heard(1);
  run(3, [&](int i, Passes& passes) {
    if (i == 0) {
      EXPECT_THROW(passes.meet(), value::RemoteFailure);
      heard.count_down();
    } else if (i == 1) {
      heard.wait();
      EXPECT_THROW(passes.meet(), value::RemoteFailure);
    } else {
      passes.fail(error_of("early"));
    }
    EXPECT_EQ(passes.meet().present.size(), 3u);
  });
}

TEST_F(PassesTest, WhatFailsOnAllEndsOnePassOfEach) {
  run(2, [](int, Passes& passes) {
    passes.fail(error_of("alike"));
    EXPECT_EQ(passes.meet().present, kBoth);
    EXPECT_EQ(passes.meet().present, kBoth);
  });
}

TEST_F(PassesTest, AFailureThatCameFromAnotherRankStaysTheOneItWas) {
  run(2, [](int i, Passes& passes) {
    if (i == 0) {
      passes.fail(std::make_exception_ptr(value::RemoteFailure({"KeyError", "k", "there", base::Rank(7), {}})));
    } else {
      const auto message = message_of<value::RemoteFailure>([&] { passes.meet(); });
      EXPECT_TRUE(message.starts_with("KeyError on rank 7: k\nthere\nIt ended pass 0")) << message;
    }
  });
}

TEST_F(PassesTest, WhoBreaksOffEndsTheWaitsOfTheOthersAndNoPassFollows) {
  run(2, [](int i, Passes& passes) {
    EXPECT_EQ(passes.meet().present, kBoth);
    const auto compute = [&] {
      if (i == 0) throw std::invalid_argument("a hook");
      wait_in_a_collective(passes);
    };
    if (i == 0) {
      EXPECT_THROW(passes.together(compute), std::invalid_argument);
    } else {
      EXPECT_TRUE(message_of<value::RemoteFailure>([&] {
                    passes.together(compute);
                  }).starts_with("std::invalid_argument on rank 0: a hook"));
    }
    const auto message = message_of<base::PeerError>([&] { passes.meet(); });
    EXPECT_NE(message.find("was broken off before (std::invalid_argument on rank 0: a hook); start the job again"),
              std::string::npos)
        << message;
  });
}

TEST_F(PassesTest, AWaitHasADeadlineAndNamesWhoHasNotCome) {
  std::latch over(1);
  const auto replica = [&](int i, Passes& passes) {
    if (i == 0) {
      const auto message = message_of<base::TimeoutError>([&] { passes.meet(); });
      EXPECT_TRUE(message.starts_with(
          "averaging gradients over ranks 0-2 without rank 1, which has not come: no answer for 0 s"))
          << message;
      over.count_down();
    } else {
      over.wait();
      const auto come = [&] {
        passes.meet();  // the two that come later may meet before the word of the first is here
        passes.together([&] { wait_in_a_collective(passes); });
      };
      EXPECT_THROW(come(), value::RemoteFailure) << "who comes later hears of it";
    }
  };
  run(3, replica, 100ms);
}

TEST_F(PassesTest, ALostReplicaIsNamed) {
  messaging::Mailboxes boxes(2);
  Passes passes(boxes[0], boxes.ranks(), {kLong}, std::make_shared<value::Failures>());
  boxes.network().kill(base::Rank(1));
  const auto message = message_of<base::PeerError>([&] { passes.meet(); });
  EXPECT_TRUE(message.starts_with("averaging gradients over ranks 0, 1: rank 1 is lost")) << message;
}

TEST_F(PassesTest, ReplicasFromDifferentIterationsAreAnErrorOfAllAndNoLongerAtTheNextPass) {
  const std::vector<std::function<Passes::Coming(int, Passes&)>> ways{
      [](int i, Passes& passes) {
        for (int update = 0; update <= i; ++update) passes.note_update();
        return Passes::Coming();
      },
      [](int i, Passes&) { return Passes::Coming{.left_out = i}; },
      [](int i, Passes&) { return Passes::Coming{i == 0 ? Comes::kTrains : Comes::kUpdates}; }};
  for (const auto& way : ways) {
    run(3, [&](int i, Passes& passes) {
      const auto message = message_of<base::DesyncError>([&] { passes.meet(way(i / 2, passes)); });
      EXPECT_NE(message.find("from different iterations: replica 0 (rank 0) has ended a backward, after "),
                std::string::npos)
          << message;
      EXPECT_NE(message.find("; replica 2 (rank 2) "), std::string::npos) << message;
      EXPECT_EQ(passes.meet().present.size(), 3u);
    });
  }
}

TEST_F(PassesTest, WhoMayDifferLearnsThatOneIsAboutToUpdate) {
  run(2, [](int i, Passes& passes) {
    const Passes::Coming coming{i == 0 ? Comes::kTrains : Comes::kUpdates, /*left_out=*/i, {}, /*alike=*/false};
    EXPECT_TRUE(passes.meet(coming).updates);
    EXPECT_FALSE(passes.meet().updates);
  });
}

}  // namespace
}  // namespace lamina::data_parallel
