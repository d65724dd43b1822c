// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/same_order.h"

#include <gtest/gtest.h>

#include <array>

#include "lamina/base/error.h"
#include "tests/message_of.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::collective {
namespace {

using namespace std::chrono_literals;

const base::Patience kPatience{20s};
using Numbers = std::vector<std::int64_t>;

std::string in_words(const SameOrder::Operation& operation) {
  auto text = operation.what;
  for (const auto number : operation.numbers) text += base::str(" ", number);
  return text;
}

SameOrder::Words words() {
  const auto error = [](const std::string& difference) { return base::DesyncError(difference + ": begin the same"); };
  return {"letters", in_words, error};
}

// Returns what each of three members hears that begins `asked(member)`, one collective after the other, and looks at
// the end.
std::array<std::string, 3> heard(const std::function<std::vector<Numbers>(int member)>& asked) {
  messaging::Mailboxes mailboxes(3);
  std::array<std::string, 3> messages;
  mailboxes.run([&](int member) {
    SameOrder order(mailboxes[member], mailboxes.ranks(), member, words());
    messages[member] = message_of<base::DesyncError>([&] {
      std::int64_t last = 0;
      for (const auto& parameters : asked(member)) last = order.begin({"values", parameters});
      order.check(last, kPatience);
    });
  });
  return messages;
}

TEST(SameOrder, IsSilentWhereAllBeginTheSame) {
  for (const auto& message : heard([](int) { return std::vector<Numbers>{{0}, {1, 2}, {}, {0}}; })) {
    EXPECT_EQ(message, "nothing was thrown");
  }
}

TEST(SameOrder, NamesBothSidesOfADifference) {
  const auto messages = heard([](int member) { return std::vector<Numbers>{{0}, {member == 1 ? 2 : 1}, {3}}; });
  const std::string remedy = ": begin the same";
  EXPECT_EQ(messages[0], "nothing was thrown");
  EXPECT_EQ(messages[1], "rank 1 wants the values 2, rank 0 the values 1" + remedy);
  EXPECT_EQ(messages[2], "rank 2 wants the values 1, rank 1 the values 2" + remedy);
}

TEST(SameOrder, NamesAMemberThatBeginsLess) {
  const auto patience = base::Patience{200ms};
  messaging::Mailboxes mailboxes(2);
  mailboxes.run([&](int member) {
    SameOrder order(mailboxes[member], mailboxes.ranks(), member, words());
    if (member == 1) return;
    const auto number = order.begin({"values", {0}});
    EXPECT_THROW(order.check(number, patience), base::TimeoutError);
  });
}

// Passes given up.

value::Failure failure_of(int member) { return {"KeyError", "bad", "", base::Rank(member), {}}; }
SameOrder::Operation values_of(std::int64_t parameter) { return {"values", {parameter}}; }

TEST(SameOrder, OneThatWaitsForWhatAnotherGaveUpStopsWithItsError) {
  messaging::Mailboxes mailboxes(3);
  mailboxes.run([&](int member) {
    SameOrder order(mailboxes[member], mailboxes.ranks(), member, words());
    auto number = order.begin(values_of(0));
    if (member == 2) return order.give_up(failure_of(2));  // this one has begun one, which the others wait for
    order.check(number, kPatience);
    number = order.begin(values_of(1));
    const auto message = message_of<value::RemoteFailure>([&] {
      order.check(number, kPatience);
      while (true) order.require_all_begin(number);  // of member 1, whose neighbour has begun it
    });
    EXPECT_TRUE(message.find("bad") != std::string::npos) << message;
  });
}

TEST(SameOrder, MembersThatGaveUpLackWhatTheFarthestHasBegun) {
  messaging::Mailboxes mailboxes(3);
  mailboxes.run([&](int member) {
    SameOrder order(mailboxes[member], mailboxes.ranks(), member, words());
    order.check(order.begin(values_of(0)), kPatience);
    order.note_end(1);
    std::int64_t begun = 1;
    for (int time = 1; time <= 3; ++time) {
      const int begins = (member + time) % 3;  // in the pass that fails
      for (int i = 0; i < begins; ++i) order.begin(values_of((begun + i) % 4));
      order.give_up(failure_of(member));
      if (time == 2) order.give_up(failure_of(member));  // the next pass, before anything was begun in it
      const auto lacking = order.lacking(kPatience);
      ASSERT_EQ(std::ssize(lacking), 2 - begins);
      for (std::int64_t i = 0; i < std::ssize(lacking); ++i) {
        EXPECT_EQ(lacking[i].what, "values");
        EXPECT_EQ(lacking[i].numbers, Numbers{(begun + begins + i) % 4});
        order.begin(lacking[i]);
      }
      EXPECT_TRUE(order.lacking(kPatience).empty()) << "once";
      begun += 2;
      const auto number = order.begin(values_of(0));
      order.check(number, kPatience);
      order.require_all_begin(number);
      order.note_end(number);
      ++begun;
    }
  });
}

}  // namespace
}  // namespace lamina::collective
