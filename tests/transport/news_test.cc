// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/news.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <functional>
#include <map>
#include <queue>
#include <random>
#include <ranges>
#include <set>
#include <utility>
#include <vector>

#include "lamina/base/str.h"
#include "tests/soak.h"

namespace lamina::transport {
namespace {

using base::Rank;
using Fate = News::Fate;
using Time = std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Time kLook = milliseconds(250);  // how often a rank looks for connections that it wants
constexpr Time kLinger = seconds(1);       // at most, for who leaves
constexpr Time kUnexplained = seconds(1);  // after which nobody is going to say how a rank ended
constexpr Time kBound = seconds(2);        // within which a loss is known everywhere
constexpr Time kHistory = seconds(3);      // in which things happen

std::vector<Rank> ranks(int size) {
  std::vector<Rank> all;
  for (int rank = 0; rank < size; ++rank) all.emplace_back(rank);
  return all;
}

TEST(Neighbours, AreAtDistancesOfPowersOfTwo) {
  EXPECT_THAT(neighbours(ranks(1), 0), IsEmpty());
  EXPECT_THAT(neighbours(ranks(2), 1), ElementsAre(Rank(0)));
  EXPECT_THAT(neighbours(ranks(5), 2), ElementsAre(Rank(0), Rank(1), Rank(3), Rank(4)));
  EXPECT_THAT(neighbours(ranks(12), 1), ElementsAre(Rank(0), Rank(2), Rank(3), Rank(5), Rank(9), Rank(11)));
  EXPECT_EQ(neighbours(ranks(256), 200).size(), 15);
}

TEST(Neighbours, AreEachOthers) {
  for (int size = 1; size <= 70; ++size) {
    for (const Rank one : ranks(size)) {
      for (const Rank other : neighbours(ranks(size), static_cast<std::size_t>(one.value))) {
        const auto back = neighbours(ranks(size), static_cast<std::size_t>(other.value));
        EXPECT_TRUE(std::ranges::find(back, one) != back.end()) << size << " " << one << " " << other;
      }
    }
  }
}

// Sets of ranks of small jobs: all of fewer ranks than one has neighbours. Of larger jobs the worst ones, which are the
// neighbours of one rank without one of them.
bool are_connected(int size, const std::set<Rank>& gone) {
  std::set<Rank> found;
  std::vector<Rank> open;
  for (const Rank rank : ranks(size)) {
    if (!gone.contains(rank) && open.empty()) open.push_back(rank);
  }
  while (!open.empty()) {
    const Rank rank = open.back();
    open.pop_back();
    if (gone.contains(rank) || !found.insert(rank).second) continue;
    for (const Rank next : neighbours(ranks(size), static_cast<std::size_t>(rank.value))) open.push_back(next);
  }
  return found.size() + gone.size() == static_cast<std::size_t>(size);
}

TEST(Neighbours, KeepTheRestConnectedWhereFewerGoThanOneHas) {
  for (int size = 2; size <= 14; ++size) {
    const int most = static_cast<int>(neighbours(ranks(size), 0).size()) - 1;
    for (unsigned set = 0; set < 1U << size; ++set) {
      if (std::popcount(set) > most) continue;
      std::set<Rank> gone;
      for (int rank = 0; rank < size; ++rank) {
        if (set >> rank & 1) gone.emplace(rank);
      }
      ASSERT_TRUE(are_connected(size, gone)) << size << " " << set;
    }
  }
  for (int size = 15; size <= 300; size += 19) {
    const auto around = neighbours(ranks(size), 0);
    for (const Rank spared : around) {
      std::set<Rank> gone(around.begin(), around.end());
      gone.erase(spared);
      ASSERT_TRUE(are_connected(size, gone)) << size << " " << spared;
    }
  }
}

// The ranks of a job in simulated time: words take random times, in order between two. Ranks die, leave, stop for a
// while and talk to others for the first time at random moments. The seed says all of it.
class SimulatedRanks {
 public:
  SimulatedRanks(std::uint64_t seed, int size) : random_(seed), size_(size) {
    for (const Rank rank : ranks(size)) ranks_.push_back({News(rank, size)});
    for (const Rank rank : ranks(size)) {
      for (const Rank peer : neighbours(ranks(size), static_cast<std::size_t>(rank.value))) open_at(rank, peer);
      in(duration(Time(0), kLook), [this, rank] { look(rank); });
    }
  }

  void at(Time time, std::function<void()> act) { events_.push({time, numbers_++, std::move(act)}); }

  void kill(Rank rank) {
    Process& process = of(rank);
    if (process.ended) return;
    process.died = true;
    end(rank);
  }

  void leave(Rank rank) {
    Process& process = of(rank);
    if (process.ended || process.leaving) return;
    if (process.frozen_until > now_) return at(process.frozen_until, [this, rank] { leave(rank); });
    process.leaving = true;
    process.ends_by = now_ + kLinger;
    for (const Rank peer : process.sockets) {
      send(rank, peer, [this, rank, peer] {
        of(peer).news.left(rank);
        tell(peer);
        send(peer, rank, [this, rank, peer] { of(rank).answered.insert(peer); });
      });
    }
    linger(rank);
  }

  void freeze(Rank rank, Time time) {
    of(rank).frozen_until = now_ + time;
    last_thaw_ = std::max(last_thaw_, now_ + time);
  }

  // Begins a connection: a first use, or one that is wanted.
  void connect(Rank from, Rank to) {
    if (from == to || of(from).peers.contains(to) || !of(from).dialing.insert(to).second) return;
    in(hop(), [this, from, to] { answer(from, to); });
  }

  void run() {
    while (!events_.empty() && events_.top().time <= std::max(kHistory, last_thaw_) + kBound + seconds(1)) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      event.act();
    }
  }

  // Nobody is wrong about anybody, and all others know in time that a rank has died. That a rank has ended, but not
  // how, is known where nobody is left who could tell.
  void check(const std::string& history) const {
    for (const Rank about : ranks(size_)) {
      const Process& other = ranks_[about.value];
      if (other.died && other.leaving) continue;  // it may have said so to all, or to nobody
      const Fate how = other.died ? Fate::kEnded : other.leaving ? Fate::kLeft : Fate::kPresent;
      const bool is_known = std::ranges::any_of(
          ranks_, [&](const Process& process) { return lives(process) && process.news.fate(about) == how; });
      const Fate expected = is_known ? how : Fate::kVanished;
      const Time since = std::max(other.ended_at, last_thaw_);
      for (const Process& process : ranks_) {
        if (!lives(process)) continue;
        EXPECT_EQ(process.news.fate(about), expected) << history << ": about rank " << about;
        if (other.died && process.heard.contains(about)) {
          EXPECT_LE(process.heard.at(about), since + kBound) << history << ": about rank " << about;
        }
      }
    }
  }

  std::mt19937_64& random() { return random_; }
  Time duration(Time least, Time most) {
    return least + Time(static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>((most - least).count() + 1)));
  }

 private:
  struct Process {
    News news;
    std::set<Rank> peers, dialing, answered;
    std::set<Rank> sockets;  // those of peers, and others that will be
    std::map<Rank, Time> refused, heard;
    bool died = false, leaving = false, ended = false;
    Time ended_at{}, frozen_until{}, ends_by{};
  };
  struct Event {
    Time time;
    std::uint64_t number;
    std::function<void()> act;
    bool operator<(const Event& other) const { return std::pair(time, number) > std::pair(other.time, other.number); }
  };

  static bool lives(const Process& process) { return !process.ended && !process.leaving; }
  Process& of(Rank rank) { return ranks_[rank.value]; }
  void in(Time time, std::function<void()> act) { at(now_ + time, std::move(act)); }
  // A word between processes; of a busy machine one takes up to as long as a transport sleeps.
  Time hop() { return random_() % 8 == 0 ? duration(Time(0), milliseconds(100)) : duration(Time(50), milliseconds(2)); }

  // On the connection of the two, after all that went there before.
  void send(Rank from, Rank to, std::function<void()> act) {
    Time& last = last_[{from, to}];
    last = std::max(last, now_ + hop());
    arrive(last, to, std::move(act));
  }
  void arrive(Time time, Rank to, std::function<void()> act) {
    at(time, [this, to, act = std::move(act)] {
      Process& process = of(to);
      if (process.ended) return;
      if (process.frozen_until > now_) return arrive(process.frozen_until, to, act);
      act();
    });
  }

  void open_at(Rank rank, Rank peer) {
    of(rank).peers.insert(peer);
    of(rank).sockets.insert(peer);
    of(rank).refused.erase(peer);
    of(rank).news.open(peer);
    tell(rank);
  }

  void tell(Rank rank) {
    for (const Rank about : ranks(size_)) {
      if (of(rank).news.fate(about) != Fate::kPresent) of(rank).heard.try_emplace(about, now_);
    }
    for (const News::Told& told : of(rank).news.take()) {
      send(rank, told.to, [this, rank, told] {
        if (of(told.to).news.hear(rank, told.word)) tell(told.to);
      });
    }
  }

  void answer(Rank from, Rank to) {
    Process& caller = of(from);
    const auto again = [&](Time time) { at(time, [this, from, to] { answer(from, to); }); };
    if (caller.ended || caller.leaving) return;
    if (caller.frozen_until > now_) return again(caller.frozen_until);
    if (of(to).ended || of(to).leaving) {
      caller.dialing.erase(to);
      caller.refused.try_emplace(to, now_);
      caller.news.unreachable(to);
      connect_wanted(from);
      return;
    }
    if (of(to).frozen_until > now_) return again(now_ + milliseconds(100));
    caller.dialing.erase(to);
    if (caller.peers.contains(to)) return;
    of(to).sockets.insert(from);
    open_at(from, to);
    send(from, to, [this, from, to] { open_at(to, from); });
  }

  void look(Rank rank) {
    Process& process = of(rank);
    if (process.ended || process.leaving) return;
    in(kLook, [this, rank] { look(rank); });
    if (process.frozen_until > now_) return;
    for (const auto& [peer, since] : process.refused) {
      if (now_ - since > kUnexplained) process.news.vanished(peer);
    }
    tell(rank);
    connect_wanted(rank);
  }

  void connect_wanted(Rank rank) {
    for (const Rank peer : of(rank).news.wanted()) connect(rank, peer);
  }

  void linger(Rank rank) {
    Process& process = of(rank);
    if (process.ended) return;
    const bool answered = std::ranges::all_of(process.sockets, [&](Rank peer) {
      return process.answered.contains(peer) || process.news.fate(peer) != Fate::kPresent;
    });
    const bool together =
        std::ranges::all_of(process.sockets, [&](Rank peer) { return process.news.fate(peer) != Fate::kPresent; });
    if (answered && (together || now_ >= process.ends_by)) return end(rank);
    if (now_ >= process.ends_by + kLinger) return end(rank);
    in(milliseconds(1), [this, rank] { linger(rank); });
  }

  void end(Rank rank) {
    of(rank).ended = true;
    of(rank).ended_at = now_;
    for (const Rank peer : of(rank).sockets) {
      send(rank, peer, [this, rank, peer] {
        if (!of(peer).peers.contains(rank)) return;
        of(peer).news.closed(rank, Fate::kEnded);
        of(peer).peers.erase(rank);
        tell(peer);
      });
    }
  }

  std::mt19937_64 random_;
  const int size_;
  Time now_{};
  Time last_thaw_{};
  std::vector<Process> ranks_;
  std::map<std::pair<Rank, Rank>, Time> last_;
  std::priority_queue<Event> events_;
  std::uint64_t numbers_ = 0;
};

struct Troubles {
  int deaths = 0, leaves = 0, freezes = 0, runs = 0;
};

void run_history(std::uint64_t seed, int most_ranks, const Troubles& most) {
  std::mt19937_64 random(seed);
  const int size = 2 + static_cast<int>(random() % (most_ranks - 1));
  SimulatedRanks job(seed, size);
  const auto any = [&] { return Rank(static_cast<std::int64_t>(job.random()() % size)); };
  const auto some = [&](int limit, const std::function<void()>& happens) {
    for (auto left = limit > 0 ? random() % (limit + 1) : 0; left > 0; --left) {
      job.at(job.duration(Time(0), kHistory), happens);
    }
  };
  some(most.deaths, [&] { job.kill(any()); });
  some(most.leaves, [&] { job.leave(any()); });
  some(most.freezes, [&] { job.freeze(any(), job.duration(Time(0), seconds(1))); });
  some(most.runs, [&] {  // of ranks that die at one moment
    const auto length = job.random()() % size;
    for (auto first = any().value; const auto i : std::views::iota(std::uint64_t(0), length)) {
      job.kill(Rank(static_cast<std::int64_t>((first + i) % size)));
    }
  });
  some(size, [&] { job.connect(any(), any()); });
  job.run();
  job.check(base::str("history ", seed, " of ", size, " ranks"));
}

class Histories : public ::testing::TestWithParam<Troubles> {};

TEST_P(Histories, AllHearOfALossInTimeAndOfNoneThatIsNone) {
  const int histories = test::in_a_soak(20000, 2000);
  for (int seed = 0; seed < histories && !HasFailure(); ++seed) {
    run_history(static_cast<std::uint64_t>(seed), seed % 100 == 0 ? 100 : 24, GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(News, Histories,
                         ::testing::Values(Troubles{.deaths = 1}, Troubles{.deaths = 12, .runs = 2},
                                           Troubles{.leaves = 24}, Troubles{.deaths = 4, .leaves = 24, .runs = 1},
                                           Troubles{.deaths = 4, .leaves = 4, .freezes = 6}));

TEST(News, OfARankWithWhichOneIsConnectedComesFromItsOwnSocket) {
  News news(Rank(0), 8);
  news.open(Rank(1));
  news.open(Rank(4));
  EXPECT_FALSE(news.hear(Rank(4), {Rank(1), Fate::kBroken}));
  EXPECT_EQ(news.fate(Rank(1)), Fate::kPresent);
  EXPECT_TRUE(news.hear(Rank(4), {Rank(3), Fate::kBroken}));
  EXPECT_FALSE(news.hear(Rank(1), {Rank(3), Fate::kEnded}));  // the first cause stays
  EXPECT_EQ(news.fate(Rank(3)), Fate::kBroken);
  const auto told = news.take();
  ASSERT_EQ(told.size(), 1);
  EXPECT_EQ(told[0].to, Rank(1));
  EXPECT_EQ(told[0].word.about, Rank(3));
}

TEST(News, AreToldToWhomeverOneConnectsWithLater) {
  News news(Rank(0), 8);
  news.open(Rank(1));
  news.hear(Rank(1), {Rank(3), Fate::kEnded});
  news.left(Rank(1));
  EXPECT_THAT(news.take(), IsEmpty());
  news.open(Rank(5));
  const auto told = news.take();
  ASSERT_EQ(told.size(), 2);
  for (const auto& each : told) EXPECT_EQ(each.to, Rank(5));
  EXPECT_EQ(told[0].word.fate, Fate::kLeft);
  EXPECT_EQ(told[1].word.fate, Fate::kEnded);
}

TEST(News, OfItselfARankBelievesNothing) {
  News news(Rank(2), 8);
  news.open(Rank(1));
  EXPECT_FALSE(news.hear(Rank(1), {Rank(2), Fate::kEnded}));
  EXPECT_THAT(news.take(), IsEmpty());
}

}  // namespace
}  // namespace lamina::transport
