// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/first_call.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <thread>

#include "lamina/base/error.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/rng_streams.h"
#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::pipeline {
namespace {

using namespace std::chrono_literals;
using value::Value;

// Steps of one rank in which the model is cut.
class FirstCalls : public testing::Test {
 protected:
  // The step's error; `unasked` cuts where no body asks.
  std::string step(const StepSpec::Body& body, const std::function<void()>& unasked = [] { FAIL(); }) {
    try {
      job().run_step({.microbatches = 4, .body = body, .check_interrupt = [] {}, .cut = unasked});
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }
  Job& job() { return alone_.job(0); }

 private:
  Pipeline alone_{1, "interleaved"};
};

TEST_F(FirstCalls, CutOnceInTheThreadThatEnteredTheStepBeforeAnyGoesOn) {
  const auto main = std::this_thread::get_id();
  std::atomic<int> cuts = 0, went_on = 0;
  EXPECT_EQ(step([&](base::Microbatch) -> Value {
              job().cut_here([&] {
                EXPECT_EQ(std::this_thread::get_id(), main);
                EXPECT_EQ(went_on, 0);
                ++cuts;
              });
              ++went_on;
              return {};
            }),
            "");
  EXPECT_EQ(cuts, 1);
  EXPECT_EQ(went_on, 4);
}

// A trace runs the model: it must find what the thread that entered the step has, and leave the body's as it was.
TEST_F(FirstCalls, CutWithTheRandomNumbersOfTheThreadThatEnteredTheStep) {
  const auto draw = [] { return at::rand({1}).item<float>(); };
  at::manual_seed(5);
  runtime::draw_seed();  // of the root streams
  const float expected = draw();
  for (int round = 0; round < 300; ++round) {
    at::manual_seed(5);
    float drawn = -1;
    EXPECT_EQ(step([&](base::Microbatch) -> Value {
                job().cut_here([&] { drawn = draw(); });
                return {};
              }),
              "");
    ASSERT_EQ(drawn, expected) << "round " << round;
  }
}

TEST_F(FirstCalls, ThatNobodyMakesAreMadeUpForAtTheEndOfABodyAlsoOfOneThatRaises) {
  int cuts = 0;
  EXPECT_EQ(step([](base::Microbatch) { return Value(); }, [&] { ++cuts; }), "");
  EXPECT_EQ(step([](base::Microbatch) -> Value { throw base::UsageError("of a body"); }, [&] { ++cuts; }), "of a body");
  EXPECT_EQ(cuts, 2);
}

TEST_F(FirstCalls, EndWithTheErrorOfTheCutWhichIsTheSteps) {
  std::atomic<int> cancelled = 0;
  const auto body = [&](base::Microbatch) -> Value {
    try {
      job().cut_here([] { throw base::UsageError("of the cut"); });
    } catch (const base::CancelledError&) {
      ++cancelled;
      throw;
    }
    return {};
  };
  EXPECT_EQ(step(body), "of the cut");
  EXPECT_EQ(cancelled, 1);  // the others have not begun
}

TEST_F(FirstCalls, AreRefusedWhereNoBodyRuns) {
  EXPECT_THROW(job().cut_here([] { FAIL(); }), base::InternalError);
  const auto error = step(
      [&](base::Microbatch) -> Value {
        std::thread([&] { EXPECT_THROW(job().cut_here([] { FAIL(); }), base::UsageError); }).join();
        return {};
      },
      [] {});
  EXPECT_EQ(error, "");
}

TEST_F(FirstCalls, WhoseCutNobodyMakesEndAtTheirDeadline) {
  const auto error = step(
      [&](base::Microbatch) -> Value {
        FirstCall first(runtime::ExecutionContext::current()->step(), 50ms);
        first.ask([] {});
        return {};
      },
      [] {});
  EXPECT_TRUE(error.starts_with("the cut of the model, which its first call waits for: no answer for 0 s")) << error;
}

}  // namespace
}  // namespace lamina::pipeline
