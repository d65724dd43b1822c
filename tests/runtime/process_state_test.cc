// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/process_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <c10/core/DefaultDtype.h>
#include <gtest/gtest.h>

#include <barrier>
#include <set>
#include <stdexcept>

#include "lamina/base/error.h"
#include "lamina/runtime/default_dtype.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/modes.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/runtime/stream_seed.h"
#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::runtime {
namespace {

using base::Microbatch;
using base::Step;
using schedule::Phase;

// Three numbers leave a cached normal behind, as 16 and more would not.
at::Tensor draw() { return at::randn({3}); }

std::vector<at::Tensor> draws(int count) {
  std::vector<at::Tensor> drawn;
  for (int i = 0; i < count; ++i) drawn.push_back(draw());
  return drawn;
}

class Process : public testing::Test {
 protected:
  Process() { at::manual_seed(5); }

  // Says that the process goes on as if nothing had happened since `at::manual_seed(5)` and `before` draws.
  static bool undisturbed(int before) {
    const auto next = draw();
    at::manual_seed(5);
    draws(before);
    return at::equal(draw(), next) && c10::get_default_dtype_as_scalartype() == at::kFloat;
  }

  WorkerPool pool_{{}};
  StepContext step_{
      pool_, {.microbatches = 2, .turns = schedule::TeamTurns::alone(schedule::make_schedule("interleaved", 4))}};
};

using StateOfTheProcess = Process;
using Streams = Process;

TEST_F(StateOfTheProcess, OfEachActivityIsItsOwnWhateverTheOrderOfTheirTurns) {
  const auto expected = [](std::uint64_t seed, at::ScalarType dtype) {
    const DefaultDtype set(dtype);
    at::manual_seed(seed);
    return draws(6);
  };
  const auto in_float = expected(11, at::kFloat), in_double = expected(12, at::kDouble);
  at::manual_seed(5);
  draw();
  std::barrier both(2);
  const auto body = [&](Microbatch microbatch, std::uint64_t seed, const std::vector<at::Tensor>& numbers) {
    ExecutionContext context(step_, microbatch, Phase::kStart, seed);
    c10::set_default_dtype(numbers.front().dtype());
    for (const auto& number : numbers) {
      EXPECT_TRUE(at::equal(draw(), number)) << "microbatch " << microbatch;
      context.without_slot(Phase::kForward, [&] { both.arrive_and_wait(); });
      context.queue_again(Phase::kBackwardStart);
    }
  };
  std::thread first([&] { body(Microbatch(0), 11, in_float); });
  std::thread second([&] { body(Microbatch(1), 12, in_double); });
  first.join();
  second.join();
  EXPECT_TRUE(undisturbed(1));
}

TEST_F(StateOfTheProcess, IsNotChangedByAnActivityThatHasLostItsTurn) {
  draw();
  {
    ExecutionContext context(step_, Microbatch(0), Phase::kStart, 11);
    EXPECT_THROW(
        {
          const DefaultDtype dtype(at::kDouble);
          const RngStream stream(12);
          draw();
          step_.slot().cancel();
          context.without_slot(Phase::kForward, [] {});
        },
        base::CancelledError);
  }
  EXPECT_TRUE(undisturbed(1));
}

TEST_F(Streams, BeginAndEndWithinTheCallersAlsoWhenTheWorkThrows) {
  draw();
  try {
    const RngStream stream(11);
    const auto drawn = draws(2);
    {
      const RngStream inner(12);
      draw();
    }
    const auto after = draw();
    at::manual_seed(11);
    EXPECT_TRUE(at::equal(draw(), drawn[0]));
    EXPECT_TRUE(at::equal(draw(), drawn[1]));
    EXPECT_TRUE(at::equal(draw(), after));
    throw std::runtime_error("of the work");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(undisturbed(1));
}

TEST_F(Streams, OfModulesAreTheSeedThatTheirCallerGaveAndHasNotDrawnFrom) {
  const InlineBody body(stream_seed(3));
  const auto other = next_seed();
  at::manual_seed(7);
  const auto by_hand = next_seed(), after = next_seed();
  EXPECT_EQ(by_hand, 7);
  {
    const RngStream stream(by_hand);
    EXPECT_EQ(next_seed(), 7) << "a module in the module";
  }
  {
    const RngStream stream(by_hand);
    draw();
    EXPECT_NE(next_seed(), 7);
  }
  EXPECT_EQ(std::set({other, by_hand, after}).size(), 3);
  at::manual_seed(7);
  next_seed();
  EXPECT_EQ(next_seed(), after);
}

TEST_F(Streams, AreInABodyAndAnActivityAndNowhereElse) {
  EXPECT_FALSE(in_step());
  {
    const InlineBody body(3);
    EXPECT_TRUE(in_step());
    std::thread([] { EXPECT_FALSE(in_step()); }).join();
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(at::kDouble));
    draw();
  }
  {
    ExecutionContext context(step_, Microbatch(0), Phase::kStart);
    EXPECT_TRUE(in_step());
  }
  EXPECT_FALSE(in_step());
  EXPECT_TRUE(undisturbed(0));
}

TEST_F(Streams, OfTwoReplicasAreThoseOfOneWithAllTheirMicrobatches) {
  RootSeeds whole(7, 0), second(7, 2);
  std::set<std::uint64_t> different;
  for (int step = 0; step < 3; ++step) {
    whole.begin_step();
    second.begin_step();
    for (int i = 0; i < 2; ++i) EXPECT_EQ(whole.of(Microbatch(2 + i)), second.of(Microbatch(i)));
    for (int i = 0; i < 4; ++i) different.insert(whole.of(Microbatch(i)));
  }
  second.begin_at(3);  // as of a replica before it that has one more
  EXPECT_EQ(whole.of(Microbatch(3)), second.of(Microbatch(0)));
  EXPECT_EQ(different.size(), 12);
  EXPECT_TRUE(undisturbed(0)) << "a configured seed draws nothing";
}

TEST_F(Streams, WithoutASeedOfTheirOwnComeFromOneDrawOfTheProcess) {
  RootSeeds seeds(std::nullopt, 0);
  const auto of_step = [&] {
    seeds.begin_step();
    return seeds.of(Microbatch(0));
  };
  const auto first = of_step(), second = of_step();
  EXPECT_NE(first, second);
  at::manual_seed(5);
  EXPECT_EQ(of_step(), first);
  draw_seed();
  const auto next = draw();
  at::manual_seed(5);
  draw_seed();
  draw_seed();
  EXPECT_TRUE(at::equal(draw(), next));
}

TEST_F(Streams, AreSeededByAllBitsOfWhatIsMixed) {
  std::set<std::uint32_t> low;
  for (int bit = 0; bit < 64; ++bit) {
    low.insert(static_cast<std::uint32_t>(mix(1ull << bit, 0)));
    low.insert(static_cast<std::uint32_t>(mix(0, 1ull << bit)));
  }
  EXPECT_EQ(low.size(), 128) << "torch's engine takes the low 32 bits of a seed";
}

// Numbers that the two microbatches of a step draw after a module that draws `count` times.
std::vector<at::Tensor> drawn_after_a_module_that_draws(int count) {
  pipeline::Pipeline alone(1, "interleaved");
  const auto draws_too = [&](pipeline::Job&) {
    return [count](value::Value x) {
      draws(count);
      return x;
    };
  };
  const auto module = alone.add("draws", 0, draws_too, /*starts_rng_stream=*/true);
  at::manual_seed(5);
  std::vector<at::Tensor> found;
  const auto body = [&](Microbatch) {
    alone.job(0).call(module, {});
    return value::Value(draw());
  };
  const auto outcome = alone.step(2, body).front();
  EXPECT_EQ(pipeline::message_of(outcome.error), "");
  for (const auto& output : outcome.outputs) found.push_back(output.as<at::Tensor>());
  return found;
}

TEST_F(Streams, KeepWhatAModuleDrawsFromItsCallerAndTheProcess) {
  const auto none = drawn_after_a_module_that_draws(0), some = drawn_after_a_module_that_draws(7);
  ASSERT_EQ(none.size(), 2);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(none[i], some[i])) << "microbatch " << i;
  EXPECT_FALSE(at::equal(none[0], none[1]));
  const auto next = draw();
  at::manual_seed(5);
  draw_seed();
  EXPECT_TRUE(at::equal(draw(), next)) << "a step takes one draw";
}

TEST(Modes, BringTheDefaultDtypeForAsLongAsTheWorkRuns) {
  std::string modes;
  {
    const DefaultDtype dtype(at::kDouble);
    modes = capture_modes();
  }
  EXPECT_NE(modes, capture_modes());
  EXPECT_THROW(run_with_modes(modes,
                              [] {
                                EXPECT_EQ(c10::get_default_dtype_as_scalartype(), at::kDouble);
                                throw std::runtime_error("of the work");
                              }),
               std::runtime_error);
  EXPECT_EQ(c10::get_default_dtype_as_scalartype(), at::kFloat);
  modes[2] = static_cast<char>(at::kLong);
  EXPECT_THROW(run_with_modes(modes, [] { ADD_FAILURE(); }), base::FormatError);
}

}  // namespace
}  // namespace lamina::runtime
