// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/mutual_waits.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "lamina/base/error.h"
#include "lamina/messaging/presence.h"
#include "tests/comes_true.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::messaging {
namespace {

using base::Rank;
using value::Value;
using Clock = base::Clock;

constexpr auto kPromised = std::chrono::seconds(2);

base::Patience in(const std::string& name, const std::string& where) {
  base::Patience patience{std::chrono::seconds(60), nullptr};
  patience.call = [=] { return base::Call{name, where, name}; };
  return patience;
}

std::string message_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const base::DesyncError& desync) {
    return desync.what();
  } catch (const std::exception& other) {
    return std::string("not a DesyncError: ") + other.what();
  }
  return "";
}

void expect_all(const std::vector<std::exception_ptr>& errors, const std::vector<std::string>& words) {
  for (const auto& error : errors) {
    for (const auto& word : words) EXPECT_NE(message_of(error).find(word), std::string::npos) << message_of(error);
  }
}

void expect_exact(Mailboxes& boxes, std::int64_t base) {
  const auto errors = boxes.run([&](int rank) {
    for (std::int64_t round = base; round < base + 20; ++round) {
      boxes[rank].barrier(boxes.ranks(), in("barrier()", "d.py:1"));
      const auto values = boxes[rank].all_gather(boxes.ranks(), 10 * round + rank, in("allgather()", "d.py:2"));
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(values[i].as<std::int64_t>(), 10 * round + static_cast<std::int64_t>(i));
      }
    }
  });
  for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
}

TEST(MutualWaits, InTwoCallsAreToldOnBothSidesWithin2sWithBothCallsAndTheNextOnesAreExact) {
  Mailboxes boxes(2, 1);
  for (std::int64_t round = 0; round < 2; ++round) {
    const auto began = Clock::now();
    const auto errors = boxes.run([&](int rank) {
      if (rank == 0) {
        boxes[0].all_gather(boxes.ranks(), std::int64_t{-1}, in("model.state_dict()", "a.py:1"));
      } else {
        boxes[1].barrier(boxes.ranks(), in("lamina.barrier()", "b.py:2"));
      }
    });
    EXPECT_LT(Clock::now() - began, kPromised);
    expect_all(errors, {"rank 0 waits in model.state_dict() at a.py:1 for rank 1",
                        "rank 1 waits in lamina.barrier() at b.py:2 for rank 0"});
    expect_exact(boxes, 100 * round);
  }
}

TEST(MutualWaits, OfThreeInACircleAreToldOnAll) {
  Mailboxes boxes(3, 2);
  const auto began = Clock::now();
  const auto errors = boxes.run([&](int rank) {
    boxes[rank].receive(Rank((rank + 1) % 3), "user", in("lamina.recv_from()", base::str("c.py:", rank)));
  });
  EXPECT_LT(Clock::now() - began, kPromised);
  expect_all(errors, {"rank 0 waits in lamina.recv_from() at c.py:0 for rank 1",
                      "rank 1 waits in lamina.recv_from() at c.py:1 for rank 2",
                      "rank 2 waits in lamina.recv_from() at c.py:2 for rank 0"});
  expect_exact(boxes, 0);
}

TEST(MutualWaits, EndACallForThoseWhoHaveOnlyJoinedIt) {
  Mailboxes boxes(3, 3);
  const std::vector<Rank> pair = {Rank(0), Rank(1)};
  const auto errors = boxes.run([&](int rank) {
    if (rank == 1) {
      boxes[1].all_gather(pair, std::int64_t{1}, in("clip_grad_norm_()", "b.py:1"));
    } else {
      boxes[rank].all_gather(boxes.ranks(), std::int64_t{-1}, in("Metrics.close()", "a.py:1"));
    }
  });
  expect_all(errors, {"clip_grad_norm_() at b.py:1", "Metrics.close() at a.py:1"});
  expect_exact(boxes, 0);
}

// The next operation of rank 1 may have the number of the one that rank 0 waits in.
TEST(MutualWaits, AreWithdrawnAsSoonAsAnotherRankGivesUpThoughNobodyLooksHere) {
  Mailboxes boxes(2, 7);
  std::exception_ptr error;
  std::thread other([&] {
    try {
      boxes[1].barrier(boxes.ranks(), in("lamina.barrier()", "b.py:1"));
    } catch (...) {
      error = std::current_exception();
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(800));  // until rank 1 has told of its wait
  std::atomic<bool> withdrawn = false;
  {
    MutualWaits::Scope scope(boxes[0].waits(), {{WaitKind::kExchange, "mine", 1},
                                                "an exchange",
                                                boxes.ranks(),
                                                [] { return std::vector{Rank(1)}; },
                                                nullptr,
                                                [&] { withdrawn = true; }});
    scope.check();  // adds this wait to the path of the other one
    other.join();
    EXPECT_TRUE(withdrawn);
    EXPECT_THROW(scope.check(), base::DesyncError);
  }
  expect_all({error}, {"rank 1 waits in lamina.barrier() at b.py:1 for rank 0", "rank 0 waits in an exchange"});
  expect_exact(boxes, 0);
}

// A step that was never announced keeps its number: rank 1 waits in it again when it hears that rank 2 gave up the
// first.
TEST(MutualWaits, OfAnEarlierAttemptEndNothing) {
  Mailboxes boxes(3, 8);
  boxes.network().hold(Rank(2), Rank(1));
  const auto wait_in_step = [&] {
    return MutualWaits::Wait{.operation = {WaitKind::kExchange, "step", 5},
                             .what = "a step",
                             .members = boxes.ranks(),
                             .lacks = [] { return std::vector{Rank(0)}; },
                             .call = nullptr,
                             .give_up = [] {}};
  };
  const auto errors = boxes.run([&](int rank) {
    if (rank == 0) return boxes[0].barrier(boxes.ranks(), in("lamina.barrier()", "b.py:1"));
    MutualWaits::Scope scope(boxes[rank].waits(), wait_in_step());
    for (const auto end = Clock::now() + kPromised; Clock::now() < end;) {
      scope.check();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  expect_all(errors, {"waits in lamina.barrier() at b.py:1", "waits in a step for rank 0"});

  MutualWaits::Scope again(boxes[1].waits(), wait_in_step());
  boxes[2].send(Rank(1), "user", std::int64_t{1});
  boxes.network().release(Rank(2), Rank(1));
  boxes[1].receive(Rank(2), "user", in("lamina.recv_from()", "b.py:2"));  // so it has come, after what was held
  EXPECT_NO_THROW(again.check());
}

// Rank 0 waits long for a rank that waits long for one that computes: all come in the end.
TEST(MutualWaits, AreNotSeenWhereSomebodyComputesOrWaitsForOneWhoDoes) {
  Mailboxes boxes(3, 4);
  const std::vector<Rank> front = {Rank(0), Rank(1)}, back = {Rank(1), Rank(2)};
  const auto errors = boxes.run([&](int rank) {
    const auto computed = Clock::now() + std::chrono::milliseconds(1500);
    while (rank == 2 && Clock::now() < computed) std::this_thread::yield();
    if (rank > 0) boxes[rank].barrier(back, in("barrier()", "b.py:1"));
    if (rank < 2) boxes[rank].barrier(front, in("barrier()", "b.py:2"));
    boxes[rank].barrier(boxes.ranks(), in("barrier()", "b.py:3"));
  });
  for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
}

// A value that was sent before its sender waited for its receiver is on its way: delivery is slow, nothing is wrong.
TEST(MutualWaits, AreNotSeenWhereWhatIsLackedWasSentBefore) {
  Mailboxes boxes(2, 5);
  const auto errors = boxes.run([&](int rank) {
    for (std::int64_t round = 0; round < 3; ++round) {
      boxes[rank].send(Rank(1 - rank), "user", round);
      const auto slow = Clock::now() + std::chrono::milliseconds(rank == 0 ? 700 : 0);
      auto patience = in("lamina.recv_from()", "c.py:1");
      patience.check_interrupt = [slow] {
        while (Clock::now() < slow) std::this_thread::yield();
      };
      boxes[rank].receive(Rank(1 - rank), "user", patience);
      boxes[rank].barrier(boxes.ranks(), patience);
    }
  });
  for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
}

TEST(AllGather, OfDifferentCallsIsAnErrorOnAllThatNamesThem) {
  Mailboxes boxes(3, 6);
  const auto errors = boxes.run([&](int rank) {
    const auto name = rank == 1 ? "optimizer.state_dict()" : "model.state_dict()";
    boxes[rank].all_gather(boxes.ranks(), std::int64_t{-1}, in(name, base::str("e.py:", rank)));
  });
  expect_all(errors, {"rank 0 is in model.state_dict() at e.py:0, rank 1 in optimizer.state_dict() at e.py:1"});
  expect_exact(boxes, 0);
}

TEST(MutualWaits, TellHowARankLeft) {
  Mailboxes boxes(2);
  boxes[1].waits().tell_leaving("came to the end of its program");
  boxes[1].send(Rank(0), "after", std::int64_t{0});
  boxes[0].receive(Rank(1), "after", in("", ""));
  EXPECT_EQ(boxes[0].waits().left(Rank(1)), "came to the end of its program");
  EXPECT_EQ(boxes[1].waits().left(Rank(0)), "");
}

// Ranks that would hear it from one that is lost hear it all the same.
TEST(MutualWaits, TellAllThatAreLeftHowARankLeft) {
  constexpr int kSize = 13, kLeaves = 5;
  Mailboxes boxes(kSize);
  const std::set<int> ended{0, 7, 9};  // of which the others are 8 places after, 2 and 4
  for (const int rank : ended) boxes.network().kill(Rank(rank));
  for (const int rank : ended) {
    const Rank ranks[] = {Rank(rank)};
    ASSERT_TRUE(boxes[kLeaves].loss(ranks, std::chrono::seconds(20)));
  }
  boxes[kLeaves].waits().tell_leaving("came to the end of its program");
  for (int rank = 0; rank < kSize; ++rank) {
    if (rank == kLeaves || ended.contains(rank)) continue;
    EXPECT_TRUE(comes_true([&] { return boxes[rank].waits().left(Rank(kLeaves)) == "came to the end of its program"; }))
        << rank;
  }
}

// A wait for what never comes from `of`.
MutualWaits::Wait for_ever(Mailboxes& boxes, const WaitOperation& operation, std::vector<Rank> of) {
  return {.operation = operation, .what = "a wait", .members = boxes.ranks(), .lacks = [of] { return of; }};
}

// Lets these waits look until `heard`; false where they do not hear in time.
bool look_until(const std::vector<MutualWaits::Scope*>& waits, const std::function<bool()>& heard) {
  for (const auto end = Clock::now() + std::chrono::seconds(20); !heard();) {
    if (Clock::now() > end) return false;
    for (auto* wait : waits) wait->check();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (auto* wait : waits) wait->check();
  return true;
}

// Becomes true when a word has come that this rank sends now, after all that it has said before.
std::function<bool()> word_of(Mailboxes& boxes, Rank from) {
  boxes[static_cast<int>(from.value)].send(Rank(0), "word", std::int64_t{0});
  return [&boxes, from] { return boxes[0].poll(from, "word").has_value(); };
}

const WaitOperation kFirst{WaitKind::kExchange, "first", 1};
const WaitOperation kSecond{WaitKind::kExchange, "second", 1};

// Deadlines of all who wait for one rank come at the same time: the last of them names it, too.
TEST(MutualWaits, ThatEndByAnErrorStillSayForWhomTheyWere) {
  Mailboxes boxes(3, 9);
  MutualWaits::Scope waiting(boxes[0].waits(), for_ever(boxes, kFirst, {Rank(1)}));
  const auto last = [&] { return waiting.awaited({Rank(1)}).last; };
  try {
    MutualWaits::Scope between(boxes[1].waits(), for_ever(boxes, kSecond, {Rank(2)}));
    EXPECT_TRUE(look_until({&waiting, &between}, [&] { return last() == std::vector{Rank(2)}; }));
    throw base::TimeoutError("no answer");
  } catch (const base::TimeoutError&) {
  }
  EXPECT_TRUE(look_until({&waiting}, word_of(boxes, Rank(1))));
  EXPECT_EQ(last(), std::vector{Rank(2)});
  {
    const MutualWaits::Scope next(boxes[1].waits(), for_ever(boxes, kSecond, {Rank(2)}));
  }
  EXPECT_TRUE(look_until({&waiting}, word_of(boxes, Rank(1))));
  EXPECT_EQ(last(), std::vector{Rank(1)}) << "its next wait has ended well: it computes";
}

TEST(MutualWaits, AreAnsweredAgainAfterAWaitInsideThem) {
  Mailboxes boxes(3, 10);
  MutualWaits::Scope waiting(boxes[0].waits(), for_ever(boxes, kFirst, {Rank(1)}));
  MutualWaits::Scope between(boxes[1].waits(), for_ever(boxes, kSecond, {Rank(2)}));
  const auto names_2 = [&] { return waiting.awaited({Rank(1)}).last == std::vector{Rank(2)}; };
  EXPECT_TRUE(look_until({&waiting, &between}, names_2));
  {
    MutualWaits::Scope inner(boxes[1].waits(), for_ever(boxes, kSecond, {}));
    EXPECT_TRUE(look_until({&waiting, &inner}, [&] { return !names_2(); }));
  }
  EXPECT_TRUE(look_until({&waiting, &between}, names_2));
}

TEST(MutualWaits, InACollectiveDoNotNameThoseWhoHaveDoneTheirPart) {
  Mailboxes boxes(3, 11);
  Presence first(boxes[0]), second(boxes[1]);
  const Presence::Group all{"all", boxes.ranks()};
  const auto number = first.next_operation(all);
  second.next_operation(all);
  MutualWaits::Scope waiting(boxes[0].waits(), for_ever(boxes, first.operation(all, number), {Rank(1), Rank(2)}));
  const auto names_2 = [&] { return waiting.awaited({Rank(1), Rank(2)}).absent == std::vector{Rank(2)}; };
  {
    MutualWaits::Scope next(boxes[1].waits(), for_ever(boxes, kSecond, {Rank(2)}));
    EXPECT_TRUE(look_until({&waiting, &next}, names_2));
  }
  EXPECT_TRUE(look_until({&waiting}, word_of(boxes, Rank(1))));
  EXPECT_TRUE(names_2()) << "which stays so";
}

// A step's other threads compute in turns: none can while one keeps its turn.
TEST(MutualWaits, OfAThreadThatKeepsItsTurnInAStepAreThoseOfTheRank) {
  using Role = MutualWaits::Role;
  static thread_local Role role = Role::kOutside;
  Mailboxes boxes(2, 13);
  boxes[0].waits().keep_steps({nullptr, nullptr, [] { return role; }});
  const WaitOperation step{WaitKind::kStep, "0", 1};
  const auto began = Clock::now();
  const auto errors = boxes.run([&](int rank) {
    if (rank == 1) return boxes[1].barrier(boxes.ranks(), in("lamina.barrier()", "b.py:1"));
    MutualWaits::Scope end_of_step(boxes[0].waits(), for_ever(boxes, step, {}));
    std::exception_ptr error;
    std::thread body([&] {
      role = Role::kInTurn;
      try {
        boxes[0].all_gather(boxes.ranks(), std::int64_t{1}, in("an all-reduce", "a.py:1"));
      } catch (...) {
        error = std::current_exception();
      }
    });
    body.join();
    end_of_step.check();
    std::rethrow_exception(error);
  });
  EXPECT_LT(Clock::now() - began, kPromised);
  expect_all(errors, {"rank 0 waits in an all-reduce at a.py:1 for rank 1", "lamina.barrier() at b.py:1 for rank 0"});
  expect_exact(boxes, 0);
}

TEST(MutualWaits, OfNoOperationAreAnsweredAndTellNobody) {
  Mailboxes boxes(3, 12);
  MutualWaits::Scope waiting(boxes[0].waits(), for_ever(boxes, kFirst, {Rank(1)}));
  MutualWaits::Scope between(
      boxes[1].waits(),
      {.what = "a look at memory", .lacks = [] { return std::vector{Rank(0), Rank(2)}; }, .only_answers = true});
  EXPECT_TRUE(
      look_until({&waiting, &between}, [&] { return waiting.awaited({Rank(1)}).last == std::vector{Rank(2)}; }));
  EXPECT_TRUE(look_until({&waiting, &between}, word_of(boxes, Rank(1)))) << "no circle is proven";
}

}  // namespace
}  // namespace lamina::messaging
