// SPDX-License-Identifier: Apache-2.0
#include "lamina/membership/member.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/membership/simulated_job.h"

namespace lamina::membership::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Time kNow = std::chrono::seconds(1);

Terms quick() {
  Terms terms;
  terms.patience = std::chrono::seconds(5);
  return terms;
}

std::vector<MemberId> ids(std::initializer_list<int> numbers) {
  std::vector<MemberId> ids;
  for (const int number : numbers) ids.emplace_back(number);
  return ids;
}

TEST(Majority, IsMoreThanHalfOrHalfWithTheFirst) {
  const Epoch epoch{1, ids({4, 1, 2, 3})};
  const auto holds = [&](std::initializer_list<int> numbers) {
    const auto some = ids(numbers);
    return is_majority(epoch, {some.begin(), some.end()});
  };
  EXPECT_TRUE(holds({1, 2, 3}));
  EXPECT_TRUE(holds({4, 1}));
  EXPECT_FALSE(holds({1, 2}));
  EXPECT_FALSE(holds({4, 7, 8}));
  EXPECT_FALSE(is_majority({1, {}}, {}));
}

TEST(Member, GoesOnWithoutOneThatIsLost) {
  SimulatedJob job(1, 4, quick());
  job.at(std::chrono::seconds(1), [&] { job.kill(MemberId(0)); });
  ASSERT_TRUE(job.run());
  EXPECT_THAT(job.living(), ElementsAre(MemberId(1), MemberId(2), MemberId(3)));
  EXPECT_EQ(job.member(MemberId(1)).epoch().text(), "epoch 1 of 3 members (1, 2, 3)");
}

TEST(Member, EndsOnTheSmallerSideOfASplit) {
  SimulatedJob job(2, 5, quick());
  job.at(std::chrono::seconds(1), [&] { job.split({MemberId(0), MemberId(1)}); });
  ASSERT_TRUE(job.run());
  EXPECT_THAT(job.living(), ElementsAre(MemberId(2), MemberId(3), MemberId(4)));
  EXPECT_THAT(job.member(MemberId(0)).ended(), HasSubstr("of epoch 0 of 5 members (0, 1, 2, 3, 4) are no majority"));
}

TEST(Member, OfTwoHalvesTheOneWithTheFirstGoesOn) {
  SimulatedJob job(3, 4, quick());
  job.at(std::chrono::seconds(1), [&] { job.split({MemberId(0), MemberId(3)}); });
  ASSERT_TRUE(job.run());
  EXPECT_THAT(job.living(), ElementsAre(MemberId(0), MemberId(3)));
}

TEST(Member, TheNextSessionBeginsOnceAllHaveOpenedIt) {
  SimulatedJob job(4, 3, quick());
  job.at(std::chrono::seconds(1), [&] { job.open(); });
  ASSERT_TRUE(job.run());
  EXPECT_THAT(job.living(), ElementsAre(MemberId(0), MemberId(1), MemberId(2)));
  for (const auto id : job.all()) {
    EXPECT_TRUE(job.member(id).epoch().is_over);
    EXPECT_FALSE(job.member(id).is_changing());
  }
}

TEST(Member, TheNextSessionDoesNotBeginWhereOneHasNotOpenedIt) {
  SimulatedJob job(5, 3, quick());
  job.at(std::chrono::seconds(1), [&] { job.open(MemberId(1)); });
  ASSERT_TRUE(job.run());
  for (const auto id : job.all()) EXPECT_EQ(job.member(id).epoch().number, 0);
}

TEST(Member, AnOpeningCountsInItsEpochAlone) {
  Member member(MemberId(0), {4, ids({0, 1, 2})}, quick());
  member.opened(3, kNow);
  EXPECT_FALSE(member.is_changing());
  member.opened(4, kNow);
  EXPECT_TRUE(member.is_changing());
}

TEST(Member, WhoHasHeardOfALossAloneGoesOverWithTheOthers) {
  Member member(MemberId(1), {0, ids({0, 1, 2})}, quick());
  member.lost(MemberId(2), kNow);
  member.receive(MemberId(0), {.kind = EpochWord::Kind::kDecided, .next = Epoch{1, ids({0, 1, 2}), 0, true}}, kNow);
  EXPECT_TRUE(member.epoch().is_over);
  EXPECT_FALSE(member.is_changing());
  EXPECT_EQ(member.ended(), "");
}

TEST(Member, EndsWhereTheJobNeedsMore) {
  auto terms = quick();
  terms.least = 3;
  SimulatedJob job(6, 3, terms);
  job.at(std::chrono::seconds(1), [&] { job.kill(MemberId(2)); });
  ASSERT_TRUE(job.run());
  EXPECT_THAT(job.living(), IsEmpty());
  EXPECT_THAT(job.member(MemberId(0)).ended(), HasSubstr("fewer than the 3 members"));
}

using enum EpochWord::Kind;

std::vector<EpochWord::Kind> kinds_of_words(Member& member) {
  std::vector<EpochWord::Kind> kinds;
  for (const auto& [to, word] : member.take_words()) kinds.push_back(word.kind);
  return kinds;
}

TEST(Member, ProposesWhatTheGreatestBallotHasAccepted) {
  Member member(MemberId(0), {0, ids({0, 1, 2, 3, 4})}, quick());
  member.lost(MemberId(4), kNow);
  const auto ballot = member.take_words().front().second.ballot;
  const Epoch early{1, ids({0, 1, 2})}, late{1, ids({1, 2, 3})};
  const auto promise = [&](int from, int round, const Epoch& accepted) {
    member.receive(
        MemberId(from),
        {.kind = kPromises, .epoch = 0, .ballot = ballot, .accepted = {round, MemberId(from)}, .next = accepted}, kNow);
  };
  promise(1, 1, early);
  promise(2, 3, late);
  promise(3, 2, early);
  const auto words = member.take_words();
  ASSERT_EQ(words.size(), 4U);
  EXPECT_EQ(words.front().second.kind, kProposes);
  EXPECT_EQ(words.front().second.next, late);
}

TEST(Member, WhoHasAcceptedRefusesSmallerBallots) {
  Member member(MemberId(2), {0, ids({0, 1, 2})}, quick());
  member.receive(MemberId(1),
                 {.kind = kProposes, .epoch = 0, .ballot = {5, MemberId(1)}, .next = Epoch{1, ids({1, 2})}}, kNow);
  EXPECT_THAT(kinds_of_words(member), ElementsAre(kAccepts));
  member.receive(MemberId(0), {.kind = kAsks, .epoch = 0, .ballot = {3, MemberId(0)}}, kNow);
  EXPECT_THAT(kinds_of_words(member), ElementsAre(kRefuses));
}

TEST(Member, AnswersAWordAboutALaterEpochWhenItHasHeardOfThat) {
  Member member(MemberId(2), {0, ids({0, 1, 2})}, quick());
  member.receive(MemberId(1), {.kind = kAsks, .epoch = 1, .ballot = {1, MemberId(1)}}, kNow);
  EXPECT_THAT(kinds_of_words(member), ElementsAre(kWonders));
  member.receive(MemberId(1), {.kind = kDecided, .next = Epoch{1, ids({1, 2})}}, kNow);
  EXPECT_THAT(kinds_of_words(member), ElementsAre(kPromises));
}

void check(const SimulatedJob& job) {
  ASSERT_TRUE(job.all_opened()) << "a session begins that some have not opened";
  for (const auto& [number, epochs] : job.seen()) {
    ASSERT_EQ(epochs.size(), 1U) << "epoch " << number << " has several successors";
  }
  const auto living = job.living();
  for (const auto id : living) {
    const auto& epoch = job.member(id).epoch();
    ASSERT_EQ(epoch, job.member(living.front()).epoch()) << "two jobs";
    if (epoch.is_over) continue;  // losses are the next session's
    for (const auto member : epoch.members) {
      ASSERT_THAT(living, ::testing::Contains(member)) << "a member of " << epoch.text() << " is gone";
    }
  }
}

TEST(Histories, DeathsOfFewerThanHalfEndWithAllOthersInOneEpoch) {
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    SCOPED_TRACE(seed);
    const int members = 3 + static_cast<int>(seed % 6), deaths = static_cast<int>(seed / 6 % ((members + 1) / 2));
    SimulatedJob job(seed, members, quick());
    job.trouble({.deaths = deaths, .within_s = seed % 5 == 0 ? 4 : 0.2});
    ASSERT_TRUE(job.run());
    ASSERT_NO_FATAL_FAILURE(check(job));
    ASSERT_GE(job.living().size(), static_cast<std::size_t>(members - deaths));
  }
}

TEST(Histories, OfWordsThatAreLostOrOvertakeOthersEndAsWell) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    const int members = 3 + static_cast<int>(seed % 6), deaths = static_cast<int>(seed / 6 % ((members + 1) / 2));
    auto terms = quick();
    terms.patience = std::chrono::seconds(20);
    terms.answer = std::chrono::milliseconds(50);
    SimulatedJob job(seed, members, terms);
    job.trouble({.deaths = deaths, .words_lost = 0.03, .within_s = seed % 5 == 0 ? 4 : 0.2});
    ASSERT_TRUE(job.run());
    ASSERT_NO_FATAL_FAILURE(check(job));
    ASSERT_GE(job.living().size(), static_cast<std::size_t>(members - deaths));
  }
}

TEST(Histories, OfTwoWhoLackEachOtherOneGoes) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    const int members = 3 + static_cast<int>(seed % 6), one = static_cast<int>(seed / 6 % members);
    SimulatedJob job(seed, members, quick());
    job.at(std::chrono::seconds(1), [&] { job.break_link(MemberId(one), MemberId((one + 1) % members)); });
    ASSERT_TRUE(job.run());
    ASSERT_NO_FATAL_FAILURE(check(job));
    ASSERT_EQ(job.living().size(), static_cast<std::size_t>(members - 1));
  }
}

TEST(Histories, OfADeathAndALinkTwoGoAtMost) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    const int members = 5 + static_cast<int>(seed % 4);
    SimulatedJob job(seed, members, quick());
    job.trouble({.deaths = 1, .broken_links = 1, .within_s = 0.3});
    ASSERT_TRUE(job.run());
    ASSERT_NO_FATAL_FAILURE(check(job));
    ASSERT_GE(job.living().size(), static_cast<std::size_t>(members - 2));
  }
}

TEST(Histories, OfAnythingHaveOneSuccessorForEachEpochAndAnEnd) {
  int went_on = 0, went_over = 0;
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto draw = [&](int most) { return static_cast<int>(random() % static_cast<std::uint64_t>(most + 1)); };
    SimulatedJob job(seed, 1 + draw(7), quick());
    job.trouble({.deaths = draw(2),
                 .freezes = draw(1),
                 .broken_links = draw(2),
                 .splits = draw(3) / 3,
                 .openings = draw(3),
                 .dies_in_a_message = draw(2) * 0.02,
                 .within_s = draw(1) == 0 ? 4 : 0.2});
    ASSERT_TRUE(job.run());
    ASSERT_NO_FATAL_FAILURE(check(job));
    went_on += job.living().empty() ? 0 : 1;
    went_over += job.is_over() ? 1 : 0;
  }
  EXPECT_GT(went_on, 3000);
  EXPECT_GT(went_over, 3000);
}

}  // namespace
}  // namespace lamina::membership::testing
