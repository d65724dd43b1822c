// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/presence.h"

#include <gtest/gtest.h>

#include "tests/messaging/mailboxes.h"

namespace lamina::messaging {
namespace {

const base::Patience kPatience{std::chrono::seconds(30), nullptr};

TEST(Presence, NamesThoseWhoDidNotSayThatTheyAreInTheOperation) {
  Mailboxes boxes(3);
  Presence first(boxes[0]), second(boxes[1]), third(boxes[2]);
  const Presence::Group all{"all", boxes.ranks()};
  for (Presence* each : {&first, &second, &third}) EXPECT_EQ(each->next_operation(all), 1);
  EXPECT_EQ(first.next_operation(all), 2);
  first.say(all, 2);
  third.say(all, 1);
  for (int rank = 0; rank < 3; ++rank) {  // which arrives after what was said before
    for (int to = 0; to < 3; ++to) boxes[rank].send(base::Rank(to), "said", std::int64_t{0});
  }
  for (int rank = 0; rank < 3; ++rank) {
    for (int from = 0; from < 3; ++from) boxes[rank].receive(base::Rank(from), "said", kPatience);
  }
  EXPECT_EQ(first.absent(all, 1), std::vector{base::Rank(1)});
  EXPECT_EQ(first.absent(all, 2), (std::vector{base::Rank(1), base::Rank(2)}));
  EXPECT_EQ(second.absent(all, 1), std::vector<base::Rank>());
  EXPECT_EQ(second.absent(all, 2), std::vector{base::Rank(2)});
  const Presence::Group pair{"pair", {base::Rank(0), base::Rank(1)}}, other{"other", boxes.ranks()};
  EXPECT_EQ(second.absent(pair, 1), std::vector{base::Rank(0)}) << "another group";
  EXPECT_EQ(second.absent(other, 1), (std::vector{base::Rank(0), base::Rank(2)})) << "of the same ranks";
}

}  // namespace
}  // namespace lamina::messaging
