// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/protocol.h"

#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "lamina/base/error.h"
#include "lamina/runtime/modes.h"
#include "tests/remote/protocol_samples.h"

namespace lamina::remote {
namespace {

using testing::call;
using transport::Message;
using value::List;
using value::Tuple;
using value::Value;

// As it arrives on another rank.
Message sent(const Message& message) {
  auto frame = transport::pack(message);
  return transport::unpack(frame.head, std::move(frame.buffers));
}

void expect_equal(const Request& got, const Request& want) {
  EXPECT_EQ(got.call, want.call);
  EXPECT_EQ(got.module, want.module);
  EXPECT_EQ(got.deliveries, want.deliveries);
  EXPECT_EQ(got.released, want.released);
  EXPECT_EQ(got.expected, want.expected);
  EXPECT_EQ(got.after, want.after);
}

void expect_equal(const Tensors& got, const Tensors& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), want[i].defined());
    if (got[i].defined()) {
      EXPECT_TRUE(at::equal(got[i], want[i]));
    }
  }
}

TEST(Protocol, AForwardRequestArrivesWithEveryField) {
  const auto want = testing::forward_request();
  const auto message = sent(to_message(want));
  EXPECT_EQ(message.kind, kForward);
  const auto got = to_forward_request(Message(message));
  expect_equal(got, want);
  EXPECT_EQ(got.state, want.state);
  EXPECT_EQ(got.news, want.news);
  EXPECT_EQ(got.arguments.as<Tuple>().items.at(1).as<std::string>(), "text");
}

TEST(Protocol, ABackwardRequestArrivesWithEveryField) {
  const auto want = testing::backward_request();
  const auto message = sent(to_message(want));
  EXPECT_EQ(message.kind, kBackward);
  const auto got = to_backward_request(Message(message));
  expect_equal(got, want);
  EXPECT_EQ(got.forward, want.forward);
  EXPECT_TRUE(got.options.keep_graph);
  EXPECT_FALSE(got.options.accumulate);
  EXPECT_EQ(got.options.watched, want.options.watched);
  EXPECT_EQ(got.flags, want.flags);
  const auto& gradients = got.gradients.as<List>().items;
  ASSERT_EQ(gradients.size(), 2);
  EXPECT_FALSE(gradients[0].as<at::Tensor>().defined());
  EXPECT_EQ(gradients[1].as<List>().items.at(1).as<value::Reference>().name, call(20));
}

TEST(Protocol, AnAskAndValuesArriveWithEveryField) {
  const auto ask = testing::ask();
  const auto asked = to_ask(sent(to_message(ask)));
  EXPECT_EQ(asked.call, ask.call);
  EXPECT_EQ(asked.delivery, ask.delivery);
  const auto values = testing::values();
  const auto got = to_values(sent(to_message(values)));
  EXPECT_EQ(got.names, values.names);
  expect_equal(std::get<Tensors>(got.values), std::get<Tensors>(values.values));
  const auto failed = to_values(sent(to_message(Values{values.names, testing::failure()})));
  EXPECT_EQ(failed.names, values.names);
  EXPECT_EQ(std::get<value::Failure>(failed.values).message, testing::failure().message);
}

TEST(Protocol, AnAnswerArrivesWithWhatItHolds) {
  const auto answer = testing::answer();
  const auto got = to_answer(sent(to_message(answer)));
  EXPECT_EQ(got.call, answer.call);
  EXPECT_FALSE(got.done);
  EXPECT_EQ(got.note, answer.note);
  EXPECT_EQ(got.names, answer.names);
  expect_equal(got.outputs, answer.outputs);
  EXPECT_FALSE(got.failure);
  Answer waited{call(2)}, raised{call(2)};
  waited.result = "result";
  EXPECT_EQ(to_answer(sent(to_message(waited))).result.as<std::string>(), "result");
  raised.names = {call(3)};
  raised.failure = testing::failure();
  const auto error = to_answer(sent(to_message(raised)));
  EXPECT_EQ(error.names, raised.names);
  ASSERT_TRUE(error.failure);
  EXPECT_EQ(error.failure->message, testing::failure().message);
}

TEST(Protocol, FieldsThatAreCutOffOrGoOnAreMalformed) {
  for (const auto& message : testing::messages()) {
    for (std::size_t size = 0; size < message.fields.size(); ++size) {
      auto shorter = message;
      shorter.fields.resize(size);
      EXPECT_THROW(testing::read(std::move(shorter)), base::FormatError) << message.kind.words() << size;
    }
    auto longer = message;
    longer.fields += 'x';
    EXPECT_THROW(testing::read(std::move(longer)), base::FormatError) << message.kind.words();
  }
}

TEST(Protocol, BodiesOfAnyOtherShapeAreMalformed) {
  const Value number = std::int64_t{1};
  const auto expect_malformed = [](Message message, const Value& body) {
    message.body = body;
    EXPECT_THROW(testing::read(std::move(message)), base::FormatError) << message.kind.words() << body.kind();
  };
  for (const Value& wrong : {Value(), number, Value(Tuple{{number, true}})}) {
    expect_malformed(to_message(testing::backward_request()), wrong);
    expect_malformed(to_message(testing::values()), wrong);
    expect_malformed(to_message(testing::answer()), wrong);
  }
  for (const Value& wrong : {Value(List{}), Value(List{{number, number}}), Value(List{{at::arange(1)}})}) {
    expect_malformed(to_message(testing::values()), wrong);
    expect_malformed(to_message(testing::answer()), wrong);
  }
  for (const Value& wrong : {Value(), Value(List{}), Value(Tuple{{number, true}})}) {
    EXPECT_THROW(to_forward_answer(wrong), base::FormatError);
  }
  EXPECT_THROW(runtime::run_with_modes("1", [] {}), base::FormatError);
}

// LAMINA_SOAK multiplies the rounds.
int rounds() { return std::getenv("LAMINA_SOAK") != nullptr ? 1000000 : 30000; }

TEST(ProtocolFuzz, DamagedFieldsAreAMessageOrAFormatError) {
  const auto whole = testing::messages();
  std::mt19937_64 random(1);
  for (int i = 0; i < rounds() && !::testing::Test::HasFailure(); ++i) {
    auto message = whole[random() % whole.size()];
    auto& fields = message.fields;
    for (auto left = random() % 3; left < 3; ++left) {
      const auto at = random() % fields.size();
      fields[at] = static_cast<char>(random());
      if (random() % 4 == 0 && at + 8 <= fields.size()) std::memset(&fields[at], random() % 2 ? 0xff : 0x7f, 8);
    }
    if (random() % 4 == 0) fields.resize(random() % fields.size());
    try {
      testing::read(std::move(message));
    } catch (const base::FormatError&) {
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

}  // namespace
}  // namespace lamina::remote
