// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/same_order.h"

#include <gtest/gtest.h>

#include <array>

#include "lamina/base/error.h"
#include "tests/message_of.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::sharding {
namespace {

using namespace std::chrono_literals;

const base::Patience kPatience{20s};
using Numbers = std::vector<std::size_t>;

// Returns what each of three members hears that begins `asked(member)`, one collective after the other, and looks at
// the end.
std::array<std::string, 3> heard(const std::function<std::vector<Numbers>(int member)>& asked) {
  messaging::Mailboxes mailboxes(3);
  std::array<std::string, 3> messages;
  mailboxes.run([&](int member) {
    SameOrder order(mailboxes[member], mailboxes.ranks(), member, {"a", "b", "c", "d", "e"});
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
  const auto messages = heard([](int member) { return std::vector<Numbers>{{0}, {member == 1 ? 2u : 1u}, {3}}; });
  const std::string remedy =
      ": ranks of a sharding group that share no memory call the same modules in the same order [shard-order]";
  EXPECT_EQ(messages[0], "nothing was thrown");
  EXPECT_EQ(messages[1], "rank 1 wants the values of c, rank 0 the values of b" + remedy);
  EXPECT_EQ(messages[2], "rank 2 wants the values of b, rank 1 the values of c" + remedy);
}

TEST(SameOrder, NamesFewOfMany) {
  const auto messages = heard(
      [](int member) { return std::vector<Numbers>{member == 0 ? Numbers{0, 1, 2, 3, 4} : Numbers{0, 1, 2, 4, 3}}; });
  EXPECT_TRUE(messages[0].starts_with("rank 0 wants the values of a, b, c and 2 more, rank 2 the values of a, b, c"))
      << messages[0];
  EXPECT_NE(messages[1], "nothing was thrown");
  EXPECT_EQ(messages[2], "nothing was thrown");
}

TEST(SameOrder, NamesAMemberThatBeginsLess) {
  const auto patience = base::Patience{200ms};
  messaging::Mailboxes mailboxes(2);
  mailboxes.run([&](int member) {
    SameOrder order(mailboxes[member], mailboxes.ranks(), member, {"a"});
    if (member == 1) return;
    const auto number = order.begin({"values", {0}});
    EXPECT_THROW(order.check(number, patience), base::TimeoutError);
  });
}

// Passes given up.

value::Failure failure_of(int member) { return {"KeyError", "bad", "", base::Rank(member), {}}; }
SameOrder::Operation values_of(std::size_t parameter) { return {"values", {parameter}}; }

TEST(SameOrder, OneThatWaitsForWhatAnotherGaveUpStopsWithItsError) {
  messaging::Mailboxes mailboxes(3);
  mailboxes.run([&](int member) {
    SameOrder order(mailboxes[member], mailboxes.ranks(), member, {"a", "b"});
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
    SameOrder order(mailboxes[member], mailboxes.ranks(), member, {"a", "b", "c", "d"});
    order.check(order.begin(values_of(0)), kPatience);
    order.note_end(1);
    std::size_t begun = 1;
    for (int time = 1; time <= 3; ++time) {
      const int begins = (member + time) % 3;  // in the pass that fails
      for (int i = 0; i < begins; ++i) order.begin(values_of((begun + i) % 4));
      order.give_up(failure_of(member));
      if (time == 2) order.give_up(failure_of(member));  // the next pass, before anything was begun in it
      const auto lacking = order.lacking(kPatience);
      ASSERT_EQ(std::ssize(lacking), 2 - begins);
      for (std::size_t i = 0; i < lacking.size(); ++i) {
        EXPECT_EQ(lacking[i].what, "values");
        EXPECT_EQ(lacking[i].parameters, Numbers{(begun + begins + i) % 4});
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
}  // namespace lamina::sharding
