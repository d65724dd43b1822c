// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/spread.h"

#include <gtest/gtest.h>

#include <bit>
#include <map>

namespace lamina::messaging {
namespace {

TEST(Spread, ReachesEachMemberOnceInFewMessagesOnAShortWay) {
  for (std::size_t size = 1; size <= 70; ++size) {
    std::vector<base::Rank> members;
    for (std::size_t i = 0; i < size; ++i) members.emplace_back(static_cast<int>(3 * i + 1));
    const auto most = static_cast<std::size_t>(std::bit_width(size - 1));
    std::map<base::Rank, std::size_t> steps{{members[0], 0}};
    std::vector<base::Rank> heard{members[0]};
    for (std::size_t i = 0; i < heard.size(); ++i) {
      const auto place = spread(members, heard[i]);
      EXPECT_EQ(place.from.has_value(), i > 0);
      EXPECT_LE(place.to.size(), most);
      for (const auto rank : place.to) {
        EXPECT_EQ(spread(members, rank).from, heard[i]);
        EXPECT_TRUE(steps.emplace(rank, steps[heard[i]] + 1).second) << rank << " is told twice";
        EXPECT_LE(steps[rank], most);
        heard.push_back(rank);
      }
    }
    EXPECT_EQ(heard.size(), size);
  }
}

}  // namespace
}  // namespace lamina::messaging
