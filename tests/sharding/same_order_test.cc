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
      for (const auto& parameters : asked(member)) last = order.begin("values", parameters);
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
    const Numbers one{0};
    const auto number = order.begin("values", one);
    EXPECT_THROW(order.check(number, patience), base::TimeoutError);
  });
}

}  // namespace
}  // namespace lamina::sharding
