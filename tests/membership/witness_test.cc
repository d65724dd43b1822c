// SPDX-License-Identifier: Apache-2.0
#include "lamina/membership/witness.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "lamina/base/error.h"
#include "lamina/membership/witness_words.h"
#include "tests/membership/simulated_job.h"

namespace lamina::membership::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<MemberId> members(std::initializer_list<int> numbers) {
  std::vector<MemberId> ids;
  for (const int number : numbers) ids.emplace_back(number);
  return ids;
}

// Members on machines with so many each.
Terms on_machines(const std::vector<int>& sizes) {
  Terms terms;
  terms.patience = seconds(5);
  int member = 0, machine = 0;
  for (const int size : sizes) {
    for (int i = 0; i < size; ++i) terms.machines[MemberId(member++)] = machine;
    ++machine;
  }
  return terms;
}

SimulatedJob job_on(std::uint64_t seed, const std::vector<int>& sizes) {
  int all = 0;
  for (const int size : sizes) all += size;
  return {seed, all, on_machines(sizes)};
}

std::vector<MemberId> of_machine(const SimulatedJob& job, const std::vector<int>& sizes, int machine) {
  const auto terms = on_machines(sizes);
  auto ids = job.all();
  std::erase_if(ids, [&](MemberId id) { return terms.machines.at(id) != machine; });
  return ids;
}

void check_one_job(const SimulatedJob& job) {
  ASSERT_TRUE(job.all_opened()) << "a session begins that some have not opened";
  for (const auto& [number, all] : job.seen()) {
    ASSERT_EQ(all.size(), 1U) << "epoch " << number << " has several successors";
  }
  const auto living = job.living();
  for (const auto id : living) {
    const auto& epoch = job.member(id).epoch();
    ASSERT_EQ(epoch.text(), job.member(living.front()).epoch().text()) << "two jobs";
    if (epoch.is_over) continue;  // losses are the next session's
    for (const auto member : epoch.members) {
      ASSERT_THAT(living, ::testing::Contains(member)) << "a member of " << epoch.text() << " is gone";
    }
  }
}

std::set<MemberId> subset(int bits, int members, bool with_witness) {
  std::set<MemberId> some;
  for (int i = 0; i < members; ++i) {
    if ((bits >> i & 1) != 0) some.insert(MemberId(i));
  }
  if (with_witness) some.insert(kWitness);
  return some;
}

TEST(MajorityWithAWitness, IsOneMachineAndItOrAllButFewer) {
  Epoch epoch{0, members({0, 1, 2, 3, 4, 5}), enough_with_witness({0, 0, 0, 0, 1, 1})};
  EXPECT_EQ(epoch.with_witness, 2U);
  EXPECT_TRUE(is_majority(epoch, subset(0b110000, 6, true)));
  EXPECT_FALSE(is_majority(epoch, subset(0b100000, 6, true)));
  EXPECT_FALSE(is_majority(epoch, subset(0b001111, 6, false)));
  EXPECT_TRUE(is_majority(epoch, subset(0b101111, 6, false)));
  EXPECT_EQ(enough_with_witness({0}), 1U);
  EXPECT_EQ(enough_with_witness({0, 0, 0, 0}), 2U);
}

TEST(MajorityWithAWitness, AnyTwoHaveAVoiceInCommon) {
  for (int all = 1; all <= 6; ++all) {
    Epoch epoch;
    for (int i = 0; i < all; ++i) epoch.members.emplace_back(i);
    for (int enough = 1; enough <= std::max(1, all / 2); ++enough) {
      epoch.with_witness = static_cast<std::size_t>(enough);
      std::vector<std::set<MemberId>> majorities;
      for (int bits = 0; bits < 2 << all; ++bits) {
        const auto some = subset(bits >> 1, all, bits % 2 == 1);
        if (is_majority(epoch, some)) majorities.push_back(some);
      }
      ASSERT_FALSE(majorities.empty());
      for (const auto& one : majorities) {
        for (const auto& other : majorities) {
          ASSERT_TRUE(std::ranges::any_of(one, [&](MemberId id) { return other.contains(id); }))
              << enough << " of " << all;
        }
      }
    }
  }
}

TEST(EpochWords, AreReadAsTheyWereWritten) {
  const EpochWord word{.kind = EpochWord::Kind::kPromises,
                       .epoch = 3,
                       .ballot = {4, MemberId(1)},
                       .accepted = {2, MemberId(5)},
                       .next = Epoch{4, members({5, 1}), 1, true},
                       .lost = {MemberId(2), MemberId(7)}};
  EXPECT_EQ(EpochWord::read(word.to_text()), word);
  EXPECT_EQ(EpochWord::read(EpochWord().to_text()), EpochWord());
  for (const char* text : {"", "[]", "[99,0,[0,0],[0,0],[],[]]", "[0,0,0,0,0,0]", "{}"}) {
    EXPECT_THROW(EpochWord::read(text), base::FormatError) << text;
  }
}

TEST(WitnessWords, AreReadAsTheyWereWritten) {
  const EpochWord word{.kind = EpochWord::Kind::kAsks, .epoch = 3, .ballot = {4, MemberId(1)}};
  const auto [session, read] = read_question(question(-7, word));
  EXPECT_EQ(session, -7);
  EXPECT_EQ(read, word);
  for (const auto* text : {"", "7", "x []", "7 []", " [0]"}) {
    EXPECT_THROW(read_question(text), base::FormatError) << text;
  }
  EXPECT_TRUE(is_refusal(refusal("why")));
  EXPECT_FALSE(is_refusal(word.to_text()));
  EXPECT_FALSE(is_refusal(kHere));
  EXPECT_EQ(refusal_in(refusal("why")), "why");
}

TEST(Witness, AnswersThoseOfAnEpochWhoHaveAskedFirst) {
  Witness witness;
  const EpochWord asks{.kind = EpochWord::Kind::kAsks, .epoch = 4, .ballot = {1, MemberId(0)}};
  EXPECT_EQ(witness.answer(1, asks)->kind, EpochWord::Kind::kPromises);
  EXPECT_EQ(witness.answer(2, asks), std::nullopt);
  EXPECT_EQ(witness.answer(1, asks)->kind, EpochWord::Kind::kPromises);
  EXPECT_THROW(witness.answer(1, {}), base::FormatError);
}

TEST(AJobWithAWitness, GoesOnWithoutTheMachineOfTheFirst) {
  for (const auto& sizes : std::vector<std::vector<int>>{{1, 1}, {2, 2}, {2, 1}, {3, 1}, {1, 3}, {2, 2, 2}}) {
    auto job = job_on(1, sizes);
    job.at(seconds(1), [&] { job.lose_machine(0); });
    ASSERT_TRUE(job.run());
    EXPECT_EQ(static_cast<int>(job.living().size()), static_cast<int>(job.all().size()) - sizes.front());
    check_one_job(job);
  }
}

TEST(AJobWithAWitness, GoesOnOnOneSideOfACut) {
  const std::vector<int> sizes{2, 2};
  int firsts = 0;
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    auto job = job_on(seed, sizes);
    job.at(seconds(1), [&] {
      for (const auto one : of_machine(job, sizes, 0)) {
        for (const auto other : of_machine(job, sizes, 1)) job.break_link(one, other);
      }
    });
    ASSERT_TRUE(job.run());
    ASSERT_NO_FATAL_FAILURE(check_one_job(job));
    ASSERT_EQ(job.living().size(), 2U) << seed;
    firsts += job.living().front() == MemberId(0) ? 1 : 0;
  }
  EXPECT_GT(firsts, 400);  // the others ask later
}

TEST(AJobWithAWitness, OfThreeMachinesTheOneThatIsCutOffEnds) {
  auto job = job_on(3, {2, 2, 2});
  job.at(seconds(1), [&] { job.split({MemberId(0), MemberId(1)}); });
  ASSERT_TRUE(job.run());
  EXPECT_THAT(job.living(), ElementsAre(MemberId(2), MemberId(3), MemberId(4), MemberId(5)));
}

TEST(AJobWithAWitness, LosesARankWithoutIt) {
  auto job = job_on(4, {2, 2});
  job.at(seconds(1), [&] {
    job.kill_witness();
    job.kill(MemberId(0));
  });
  ASSERT_TRUE(job.run());
  EXPECT_THAT(job.living(), ElementsAre(MemberId(1), MemberId(2), MemberId(3)));
}

TEST(AJobThatHasLostItsWitness, IsNotGivenUpByOneThatTakesPartInABallot) {
  const auto gives_up = [](bool has_promised) {
    Member member(MemberId(2), {0, members({0, 1, 2, 3}), 2}, on_machines({2, 2}));
    if (has_promised) {
      member.receive(MemberId(0), {.kind = EpochWord::Kind::kAsks, .epoch = 0, .ballot = {1, MemberId(0)}}, seconds(1));
    }
    member.lost(kWitness, seconds(1));
    const auto words = member.take_words();
    return std::ranges::any_of(words, [](const auto& word) { return word.second.kind == EpochWord::Kind::kGivesUp; });
  };
  EXPECT_TRUE(gives_up(false));
  EXPECT_FALSE(gives_up(true));
}

TEST(AJobThatHasLostItsWitness, IsOneWithout) {
  for (const int lost : {0, 1}) {
    auto job = job_on(5, {2, 2});
    job.at(seconds(1), [&] { job.kill_witness(); });
    job.at(seconds(3), [&] { job.lose_machine(lost); });
    ASSERT_TRUE(job.run());
    if (lost == 1) {
      EXPECT_THAT(job.living(), ElementsAre(MemberId(0), MemberId(1)));
    } else {
      EXPECT_THAT(job.living(), IsEmpty());
    }
  }
}

TEST(AJobThatHasLostItsWitness, EndsWhereAMachineIsLostAtTheSameTime) {
  auto job = job_on(6, {2, 2});
  job.at(seconds(1), [&] { job.split({MemberId(0), MemberId(1)}); });
  job.at(seconds(1), [&] {
    for (const int i : {0, 1, 2, 3}) job.break_link(MemberId(i), kWitness);
  });
  ASSERT_TRUE(job.run());
  EXPECT_THAT(job.living(), IsEmpty());
  EXPECT_THAT(job.member(MemberId(0)).ended(), HasSubstr("are no majority, without 2, 3 and the witness"));
}

TEST(AJobThatHasLostItsWitness, GivesItUpWhereOneCannotReachIt) {
  auto job = job_on(7, {2, 2});
  job.at(seconds(1), [&] { job.break_link(MemberId(1), kWitness); });
  job.at(seconds(3), [&] { job.lose_machine(1); });
  ASSERT_TRUE(job.run());
  EXPECT_THAT(job.living(), ElementsAre(MemberId(0), MemberId(1)));
}

std::vector<int> drawn_sizes(std::mt19937_64& random) {
  std::vector<int> sizes(2 + random() % 2);
  for (auto& size : sizes) size = 1 + static_cast<int>(random() % 3);
  return sizes;
}

TEST(HistoriesWithAWitness, OfALostMachineEndWithAllOthersInOneEpoch) {
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto sizes = drawn_sizes(random);
    auto job = job_on(seed, sizes);
    const auto machine = static_cast<int>(random() % sizes.size());
    job.at(milliseconds(random() % 2000), [&] { job.lose_machine(machine); });
    ASSERT_TRUE(job.run());
    ASSERT_NO_FATAL_FAILURE(check_one_job(job));
    ASSERT_EQ(job.living().size(), job.all().size() - static_cast<std::size_t>(sizes[machine]));
  }
}

TEST(HistoriesWithAWitness, OfAnythingHaveOneSuccessorForEachEpochAndAnEnd) {
  int went_on = 0, went_over = 0, without_the_first = 0;
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto draw = [&](int most) { return static_cast<int>(random() % static_cast<std::uint64_t>(most + 1)); };
    const auto sizes = drawn_sizes(random);
    auto job = job_on(seed, sizes);
    job.trouble({.deaths = draw(1),
                 .freezes = draw(1),
                 .broken_links = draw(2),
                 .splits = draw(2) / 2,
                 .openings = draw(3),
                 .machines_lost = draw(2) / 2,
                 .witness_deaths = draw(1),
                 .witness_links = draw(3) / 2,
                 .dies_in_a_message = draw(2) * 0.02,
                 .within_s = draw(1) == 0 ? 4 : 0.2});
    ASSERT_TRUE(job.run());
    ASSERT_NO_FATAL_FAILURE(check_one_job(job));
    went_on += job.living().empty() ? 0 : 1;
    went_over += job.is_over() ? 1 : 0;
    without_the_first += !job.living().empty() && job.living().front() != MemberId(0) ? 1 : 0;
  }
  EXPECT_GT(went_on, 3000);
  EXPECT_GT(went_over, 2000);
  EXPECT_GT(without_the_first, 1000);
}

TEST(HistoriesWithAWitness, OfWordsThatAreLostOrOvertakeOthersHaveOneSuccessorAsWell) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto sizes = drawn_sizes(random);
    auto terms = on_machines(sizes);
    terms.patience = seconds(20);
    terms.answer = milliseconds(50);
    SimulatedJob job(seed, static_cast<int>(terms.machines.size()), terms);
    job.trouble({.deaths = static_cast<int>(random() % 2),
                 .machines_lost = static_cast<int>(random() % 2),
                 .witness_deaths = static_cast<int>(random() % 2),
                 .words_lost = 0.03,
                 .within_s = seed % 3 == 0 ? 4 : 0.2});
    ASSERT_TRUE(job.run());
    ASSERT_NO_FATAL_FAILURE(check_one_job(job));
  }
}

}  // namespace
}  // namespace lamina::membership::testing
