// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/handlers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"

namespace lamina::messaging {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr transport::Kind kFirst = "first", kSecond = "second";

transport::Message message(transport::Kind kind, const char* body) {
  transport::Message message;
  message.kind = kind;
  message.body = body;
  return message;
}

class HandlersTest : public ::testing::Test {
 protected:
  HandlersTest() {
    for (const auto kind : {kFirst, kSecond}) {
      handlers_.on(kind, [this, kind](transport::Message&& message) {
        seen_.push_back(std::string(kind.words()) + " " + message.body.as<std::string>());
      });
    }
  }
  Handlers handlers_;
  std::vector<std::string> seen_;
};

TEST_F(HandlersTest, EachKindGoesToWhoHandlesIt) {
  handlers_.receive(message(kSecond, "a"));
  handlers_.receive(message(kFirst, "b"));
  handlers_.receive(message(kSecond, "c"));
  EXPECT_THAT(seen_, ElementsAre("second a", "first b", "second c"));
}

TEST_F(HandlersTest, AKindThatNobodyHandlesIsAnErrorThatNamesIt) {
  EXPECT_THAT([&] { handlers_.receive(message("third", "a")); },
              ThrowsMessage<base::FormatError>(HasSubstr("nobody here handles messages \"third\"")));
  EXPECT_THAT(seen_, ElementsAre());
}

TEST_F(HandlersTest, AKindHasOneHandler) {
  EXPECT_THAT([&] { handlers_.on(kFirst, [](transport::Message&&) {}); },
              ThrowsMessage<base::InternalError>(
                  HasSubstr("two handlers of messages \"first\" (lamina/messaging/handlers.cc:")));
}

}  // namespace
}  // namespace lamina::messaging
