// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/first_call.h"

#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::frontend {
namespace {

using namespace std::chrono_literals;

TEST(FirstCall, AWaitForACutThatNobodyMakesEndsAtItsDeadline) {
  const auto first = std::make_shared<FirstCall>([](const auto&) {}, 50ms);
  pipeline::Pipeline alone(1, "interleaved");
  const auto outcomes = alone.step(1, [&](base::Microbatch) -> value::Value {
    first->ask(std::nullopt);
    return {};
  });
  const auto message = pipeline::message_of(outcomes.front().error);
  EXPECT_TRUE(message.starts_with("the cut of the model, which its first call waits for: no answer for 0 s"))
      << message;
}

TEST(FirstCall, IsRefusedInAThreadThatRunsNoBody) {
  const auto first = std::make_shared<FirstCall>([](const auto&) { FAIL(); }, 50ms);
  EXPECT_THROW(first->ask(std::nullopt), base::UsageError);
  EXPECT_THROW(first->find(nullptr), base::UsageError);
  first->serve();
}

}  // namespace
}  // namespace lamina::frontend
