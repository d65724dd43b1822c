// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/step_messages.h"

#include <gtest/gtest.h>

#include "lamina/base/error.h"

namespace lamina::pipeline {
namespace {

using transport::Message;

constexpr base::Step kStep{7};
constexpr base::Rank kFrom{3};

// As it arrives on another rank.
Message sent(const Message& message) {
  auto frame = transport::pack(message);
  return transport::unpack(frame.head, std::move(frame.buffers));
}

TEST(StepMessages, ArriveWithEveryField) {
  const auto begin = to_new_step(sent(to_message(NewStep{kStep, kFrom, {"train_step", "train.py:12", ""}, 4})));
  EXPECT_EQ(begin.step, kStep);
  EXPECT_EQ(begin.from, kFrom);
  EXPECT_EQ(begin.call.name, "train_step");
  EXPECT_EQ(begin.call.where, "train.py:12");
  EXPECT_EQ(begin.first_split, 4);
  const auto refusal = to_refusal(sent(to_message(Refusal{kStep, kFrom, "another one"})));
  EXPECT_EQ(refusal.step, kStep);
  EXPECT_EQ(refusal.from, kFrom);
  EXPECT_EQ(refusal.why, "another one");
  const auto end = to_end_of_step(sent(to_message(EndOfStep{kStep, kFrom, {"a", "b"}, true, "flags", {}})));
  EXPECT_EQ(end.step, kStep);
  ASSERT_EQ(end.outputs.size(), 2);
  EXPECT_EQ(end.outputs[1].as<std::string>(), "b");
  EXPECT_EQ(end.flags, "flags");
  EXPECT_FALSE(end.failure);
  const value::Failure failure{"ValueError", "wrong", "", kFrom, {}};
  const auto failed = to_end_of_step(sent(to_message(EndOfStep{kStep, kFrom, {}, false, "", failure})));
  ASSERT_TRUE(failed.failure);
  EXPECT_EQ(failed.failure->message, "wrong");
}

TEST(StepMessages, AreOfTheWholeStep) {
  for (const auto& message : {to_message(NewStep{kStep, kFrom, {}}), to_message(Refusal{kStep, kFrom, ""}),
                              to_message(EndOfStep{kStep, kFrom, {}, false, "", {}})}) {
    EXPECT_EQ(message.call.step, kStep);
    EXPECT_EQ(message.call.microbatch, transport::kWholeStep);
  }
}

TEST(StepMessages, OfAnyOtherShapeAreMalformed) {
  auto begin = to_message(NewStep{kStep, kFrom, {"train_step", "train.py:12", ""}});
  const auto whole = begin.fields;
  for (std::size_t size = 0; size < whole.size(); ++size) {
    begin.fields = whole.substr(0, size);
    EXPECT_THROW(to_new_step(begin), base::FormatError) << size;
  }
  begin.fields = whole + "x";
  EXPECT_THROW(to_new_step(begin), base::FormatError);
  for (const value::Value& body : {value::Value(), value::Value("text"), value::Value(value::Tuple{{true}})}) {
    auto end = to_message(EndOfStep{kStep, kFrom, {}, false, "", {}});
    end.body = body;
    EXPECT_THROW(to_end_of_step(std::move(end)), base::FormatError) << body.kind();
  }
}

}  // namespace
}  // namespace lamina::pipeline
