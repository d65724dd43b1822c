// SPDX-License-Identifier: Apache-2.0
#include "lamina/parameter_server/protocol.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <random>

#include "lamina/base/error.h"
#include "tests/parameter_server/protocol_samples.h"

namespace lamina::parameter_server {
namespace {

using transport::Message;

// As it arrives on another rank.
Message sent(const Message& message) {
  auto frame = transport::pack(message);
  return transport::unpack(frame.head, std::move(frame.buffers));
}

TEST(ParameterServerProtocol, RequestsArriveWithEveryField) {
  for (auto& want : testing::requests()) {
    const auto verb = want.verb;
    const auto got = to_request(sent(to_message(Request(want))));
    EXPECT_EQ(got.verb, verb);
    EXPECT_EQ(got.asker, want.asker);
    EXPECT_EQ(got.number, want.number);
    EXPECT_EQ(got.job, want.job);
    EXPECT_EQ(got.subject, want.subject);
    EXPECT_EQ(got.context, want.context);
    EXPECT_STREQ(got.body.kind(), want.body.kind());
  }
}

TEST(ParameterServerProtocol, AModuleArrivesWithItsParameters) {
  const auto want = testing::module();
  const auto got = to_remote_module(to_answer(sent(to_message(Answer{2, to_value(want), {}}, base::Rank(1)))).body);
  EXPECT_EQ(got.address, want.address);
  EXPECT_EQ(got.name, want.name);
  ASSERT_EQ(got.parameters.size(), 2);
  EXPECT_EQ(got.parameters[0].address, want.parameters[0].address);
  EXPECT_EQ(got.parameters[0].name, "weight");
  EXPECT_EQ(got.parameters[0].sizes, want.parameters[0].sizes);
  EXPECT_EQ(got.parameters[0].dtype, at::kBFloat16);
  EXPECT_FALSE(got.parameters[0].requires_grad);
}

TEST(ParameterServerProtocol, FailuresAndEndsArrive) {
  const value::Failure failure{"ValueError", "wrong", "a traceback", base::Rank(3), {}};
  const auto answer = to_answer(sent(to_message(Answer{2, {}, failure}, base::Rank(1))));
  EXPECT_EQ(answer.number, 2);
  ASSERT_TRUE(answer.failure);
  EXPECT_EQ(answer.failure->type, "ValueError");
  const ContextId ended{base::Rank(5), 6};
  EXPECT_EQ(to_ended_context(sent(to_message(ended))), ended);
}

// Messages of any kind in which a field is changed, missing or of another kind.
TEST(ParameterServerProtocol, WhatIsNoMessageIsAFormatError) {
  std::mt19937 random(1);
  int malformed = 0;
  for (int round = 0; round < 2000; ++round) {
    auto messages = testing::messages();
    auto& message = messages[random() % messages.size()];
    if (auto* parts = message.body.get_if<value::Tuple>(); parts != nullptr && !parts->items.empty()) {
      auto& part = parts->items[random() % parts->items.size()];
      switch (random() % 4) {
        case 0:
          part = value::Value("text");
          break;
        case 1:
          part = value::Value(static_cast<std::int64_t>(random()) - (std::int64_t{1} << 31));
          break;
        case 2:
          part = value::List{{value::Value(1.5)}};
          break;
        default:
          parts->items.pop_back();
      }
    }
    try {
      testing::read(sent(message));
    } catch (const base::FormatError&) {
      ++malformed;
    }
  }
  EXPECT_GT(malformed, 100);
}

}  // namespace
}  // namespace lamina::parameter_server
