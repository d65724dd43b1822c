// SPDX-License-Identifier: Apache-2.0
// Random numbers of an accelerator are kept, seeded and recorded as the host's are.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/generators.h"
#include "lamina/device/rank_device.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/runtime/stream_seed.h"
#include "lamina/schedule/schedule.h"
#include "lamina/tensor_parallel/dropout.h"
#include "lamina/verification/run_recorder.h"
#include "tests/emulated/emulated.h"

namespace lamina {
namespace {

using base::Microbatch;
using runtime::ExecutionContext;
using runtime::InlineBody;
using runtime::next_seed;
using runtime::RngStream;
using schedule::Phase;

class OfADevice : public testing::Test {
 protected:
  OfADevice() {
    devices::set_rank_device({at::kPrivateUse1, 1});
    at::manual_seed(5);
  }
  ~OfADevice() override { devices::set_rank_device({devices::kHost}); }

  static at::TensorOptions there() { return at::device(devices::rank_device()); }
  static at::Tensor draw() { return at::rand({3}, there()).cpu(); }
  static std::vector<at::Tensor> draws(int count) {
    std::vector<at::Tensor> drawn;
    for (int i = 0; i < count; ++i) drawn.push_back(draw());
    return drawn;
  }
  // Draws after a seed by hand.
  static std::vector<at::Tensor> draws_after(std::uint64_t seed, int count) {
    at::manual_seed(seed);
    return draws(count);
  }
  // Says that the device goes on as if nothing had happened since `at::manual_seed(5)` and `before` draws.
  static bool undisturbed(int before) {
    const auto next = draw();
    return at::equal(draws_after(5, before + 1).back(), next);
  }

  static runtime::StepContext::Options of_two_microbatches() {
    return {.microbatches = 2, .turns = schedule::TeamTurns::alone(schedule::make_schedule("interleaved", 4))};
  }

  runtime::WorkerPool pool_{{}};
};

using RandomNumbers = OfADevice;

TEST_F(RandomNumbers, OfEachActivityAreItsOwnWhateverTheOrderOfTheirTurns) {
  const auto first_ones = draws_after(11, 6), second_ones = draws_after(12, 6);
  at::manual_seed(5);
  draw();
  std::barrier both(2);
  runtime::StepContext step(pool_, of_two_microbatches());
  const auto body = [&](Microbatch microbatch, std::uint64_t seed, const std::vector<at::Tensor>& numbers) {
    ExecutionContext context(step, microbatch, Phase::kStart, seed);
    for (const auto& number : numbers) {
      EXPECT_TRUE(at::equal(draw(), number)) << "microbatch " << microbatch;
      context.without_slot(Phase::kForward, [&] { both.arrive_and_wait(); });
      context.queue_again(Phase::kBackwardStart);
    }
  };
  std::thread first([&] { body(Microbatch(0), 11, first_ones); });
  std::thread second([&] { body(Microbatch(1), 12, second_ones); });
  first.join();
  second.join();
  EXPECT_TRUE(undisturbed(1));
}

TEST_F(RandomNumbers, OfAStreamBeginAndEndWithinTheCallers) {
  const auto numbers = draws_after(11, 3);
  at::manual_seed(5);
  draw();
  {
    const RngStream stream(11);
    EXPECT_TRUE(at::equal(draw(), numbers[0]));
    {
      const RngStream inner(12);
      draw();
    }
    EXPECT_TRUE(at::equal(draw(), numbers[1]));
  }
  EXPECT_TRUE(undisturbed(1));
}

TEST_F(RandomNumbers, ThatWereDrawnAfterASeedByHandAreNotDrawnAgainByAModule) {
  const InlineBody body(runtime::stream_seed(3));
  at::manual_seed(7);
  EXPECT_EQ(next_seed(), 7);
  at::manual_seed(7);
  draw();
  EXPECT_NE(next_seed(), 7);
  const RngStream stream(7);
  const auto drawn = draw();
  EXPECT_NE(next_seed(), 7) << "a module in the module";
  EXPECT_TRUE(at::equal(drawn, draws_after(7, 1).back()));
}

TEST_F(RandomNumbers, AreReadAndSetWithoutAWaitOnTheRanksDeviceAlone) {
  auto x = at::ones({1000}, there());
  emulated::reset_counts();
  for (int i = 0; i < 100; ++i) {
    const RngStream stream(11);
    x = at::dropout(x, 0.5, /*train=*/true);
  }
  EXPECT_EQ(emulated::counts().waits, 0U);
  EXPECT_THAT(emulated::counts().contexts, testing::ElementsAre(1));
}

TEST_F(RandomNumbers, OfWhatAnotherTypeHasSavedAreNone) {
  const auto own = devices::rank_generator();
  EXPECT_TRUE(devices::takes_state(own, devices::state_of(own)));
  EXPECT_FALSE(devices::takes_state(own, devices::state_of(devices::generator(devices::kHost))));
}

TEST_F(RandomNumbers, OfThePartOfALayerAreThoseOfTheWhole) {
  const auto dropout = [](std::int64_t features) {
    at::manual_seed(7);
    return at::dropout(at::ones({4, features}, there()), 0.5, /*train=*/true).cpu();
  };
  const auto whole = dropout(12);
  tensor_parallel::note_given({.own = 5, .first = 7, .all = 12}, std::nullopt);
  const auto part = dropout(5);
  tensor_parallel::note_taken();
  EXPECT_TRUE(at::equal(part, whole.narrow(1, 7, 5)));
  EXPECT_FALSE(at::equal(dropout(5), part)) << "no part any more";
}

// Gives what a recorder says of a call that does this.
std::string recorded(const std::function<void()>& work) {
  verification::RunRecorder recorder({}, {});
  const model::ModuleCall call{.name = "drops"};
  recorder.before_forward(call);
  work();
  recorder.after_forward(call);
  recorder.end();
  return recorder.text();
}

TEST_F(RandomNumbers, ThatACallDrawsAreRecorded) {
  const auto none = recorded([] {}), some = recorded([] { draw(); }), later = recorded([] {});
  EXPECT_THAT(none, testing::HasSubstr("\"drew\":false"));
  EXPECT_THAT(some, testing::HasSubstr("\"drew\":true"));
  EXPECT_NE(none, later) << "they begin at another place";
}

TEST_F(OfADevice, BackwardsOfABodyStayInItsThread) {
  const InlineBody body(3);
  bool is_here = false;
  const auto x = at::ones({3}, there()).requires_grad_(), y = x * 2;
  y.register_hook([&, own = std::this_thread::get_id()](const at::Tensor&) {
    is_here = std::this_thread::get_id() == own && runtime::in_step();
  });
  y.sum().backward();
  EXPECT_TRUE(is_here);
}

}  // namespace
}  // namespace lamina
