// SPDX-License-Identifier: Apache-2.0
// Members are threads over the in-process transport.
#include "lamina/collective/posted_gather.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/transport/inproc/network.h"
#include "tests/message_of.h"

namespace lamina::collective {
namespace {

using ::testing::HasSubstr;
using Parts = std::vector<at::Tensor>;
const shared_memory::Check kPatient = [](const std::string&) {};

struct Member {
  int rank;
  transport::Transport& transport;
  PostedGather gather;
  transport::inproc::Network& network;
};

void together(int size, const std::function<void(Member&)>& work) {
  transport::inproc::Network network(size, /*seed=*/3);
  std::vector<base::Rank> members;
  for (int rank = 0; rank < size; ++rank) members.emplace_back(rank);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto transport = network.connect(base::Rank(rank));
      Member member{rank, *transport, {*transport, "across", members}, network};
      work(member);
    });
  }
}

void expect_gathers(PostedGather& gather, int rank, std::int64_t count) {
  const auto all = at::full({gather.size(), count}, -1.);
  const auto parts = all.unbind(0);
  gather.run(parts, at::full({count}, 1. * rank), kPatient);
  for (int member = 0; member < gather.size(); ++member) {
    EXPECT_TRUE(at::equal(parts[member], at::full({count}, 1. * member)));
  }
}

TEST(PostedGather, EveryMemberHasAllParts) {
  together(3, [](Member& member) {
    for (const std::int64_t count : {0, 1, 100, 100000}) expect_gathers(member.gather, member.rank, count);
  });
}

TEST(PostedGather, APartMayLieInItsPlaceAlready) {
  together(2, [](Member& member) {
    const auto all = at::full({2, 5}, 1. * member.rank);
    const auto parts = all.unbind(0);
    member.gather.run(parts, parts[member.rank], kPatient);
    EXPECT_TRUE(at::equal(all.select(1, 0), at::arange(2.)));
  });
}

TEST(PostedGather, GroupsOfTheSameMembersDoNotMix) {
  together(2, [](Member& member) {
    const std::vector<base::Rank> members{base::Rank(0), base::Rank(1)};
    PostedGather other(member.transport, "other", members);
    std::jthread beside([&] {
      for (int i = 1; i < 50; ++i) expect_gathers(other, member.rank, i);
    });
    for (int i = 1; i < 50; ++i) expect_gathers(member.gather, member.rank, 50 - i);
  });
}

TEST(PostedGather, MembersThatDifferAreNamedOnAllAndGoOn) {
  struct Case {
    std::int64_t count;
    at::ScalarType dtype;
    const char* said;
  };
  const Case kCases[] = {{3, at::kFloat, "gives 12 bytes (Float)"}, {2, at::kInt, "gives 8 bytes (Int)"}};
  together(3, [&](Member& member) {
    for (const auto& [count, dtype, said] : kCases) {
      const bool odd = member.rank == 1;
      const auto mine = odd ? at::zeros({count}, dtype) : at::zeros({2});
      const auto parts = at::empty({3, mine.numel()}, mine.options()).unbind(0);
      const auto text = message_of<base::DesyncError>([&] { member.gather.run(parts, mine, kPatient); });
      EXPECT_THAT(text, HasSubstr("all_gather of across over ranks 0-2, number "));
      EXPECT_THAT(text, HasSubstr(odd ? "takes " : base::str("rank 1 ", said)));
    }
    expect_gathers(member.gather, member.rank, 7);
  });
}

TEST(PostedGather, ACheckEndsTheWaitAndTheNextOneGoesOn) {
  std::latch given_up(1);
  together(2, [&](Member& member) {
    if (member.rank == 0) {
      const auto parts = at::empty({2, 5}).unbind(0);
      const auto impatient = [](const std::string& what) { throw base::TimeoutError(what); };
      const auto text = message_of<base::TimeoutError>([&] { member.gather.run(parts, at::zeros({5}), impatient); });
      EXPECT_EQ(text, "the parts of ranks 0, 1");
      given_up.count_down();
    } else {
      given_up.wait();
      const auto parts = at::empty({2, 5}).unbind(0);
      const auto text = message_of<base::CancelledError>([&] { member.gather.run(parts, at::zeros({5}), kPatient); });
      EXPECT_THAT(text, HasSubstr("rank 0 has given it up"));
    }
    expect_gathers(member.gather, member.rank, 5);
  });
}

TEST(PostedGather, AMemberThatIsLostEndsItOnAllThatWait) {
  together(3, [](Member& member) {
    if (member.rank == 2) return member.network.kill(base::Rank(2));
    const auto parts = at::empty({3, 5}).unbind(0);
    const auto text = message_of<base::PeerError>([&] { member.gather.run(parts, at::zeros({5}), kPatient); });
    EXPECT_THAT(text, HasSubstr("rank 2 is lost"));
  });
}

}  // namespace
}  // namespace lamina::collective
