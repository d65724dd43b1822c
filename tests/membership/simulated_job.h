// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <vector>

#include "lamina/membership/member.h"
#include "lamina/membership/witness.h"

namespace lamina::membership::testing {

// How often each kind of trouble comes to a job.
struct Troubles {
  int deaths = 0, freezes = 0, broken_links = 0, splits = 0;
  int openings = 0;  // of the next session, by all
  int machines_lost = 0, witness_deaths = 0, witness_links = 0;
  double dies_in_a_message = 0;  // the probability, for each batch of words that a member sends
  double words_lost = 0;         // the probability for each, but to oneself; then words overtake each other, too
  double within_s = 4;           // of the beginning
};

// Members of a job in simulated time: words take random times, in order between two; deaths, freezes and broken
// connections come at random, and others hear of them at random. Members may open the next session: each tells the
// others of its epoch when it has. The seed says all of it.
class SimulatedJob {
 public:
  // With a witness where the members are on several machines, `terms.machines`.
  SimulatedJob(std::uint64_t seed, int members, Terms terms = {});

  void trouble(const Troubles& troubles);
  // Until nothing happens any more. False if it did not come to that.
  bool run();

  void kill(MemberId member);
  void kill_witness();
  void lose_machine(int machine);
  void break_link(MemberId one, MemberId other);
  // The witness may be on that side, too.
  void split(const std::set<MemberId>& side);  // no word goes between these and the others from now on
  // All open the next session, each after a random time; one that `fails` cannot.
  void open(std::optional<MemberId> fails = std::nullopt);

  const Member& member(MemberId id) const { return *processes_.at(id).member; }
  std::vector<MemberId> living() const;  // that have neither died nor ended
  std::vector<MemberId> all() const;
  // By number, all epochs that any member has been in, as text, and whether the session is over in it.
  using Seen = std::map<std::int64_t, std::set<std::pair<std::string, bool>>>;
  const Seen& seen() const { return seen_; }
  bool is_over() const;     // somebody goes on in the next session
  bool all_opened() const;  // whoever had to, where somebody does
  Time now() const { return now_; }
  Time duration(double least_s, double most_s);
  void at(Time time, std::function<void()> act);

 private:
  using Opening = std::pair<std::int64_t, int>;  // the epoch in which it is tried, and which try it is
  struct Process {
    std::unique_ptr<Member> member;
    bool dead = false, frozen = false;
    std::deque<std::function<void()>> later;  // what has come while it is frozen
    std::set<MemberId> closed;                // connections, at this end
    std::map<Opening, std::set<MemberId>> opened;
  };
  using Pair = std::pair<MemberId, MemberId>;

  void add(MemberId id, std::unique_ptr<Member> member);
  bool works(MemberId id) const;
  void freeze(MemberId id);
  void hear_of_end(MemberId of, MemberId by);
  void in(MemberId id, std::function<void()> act);
  void act(MemberId id, const std::function<void(Member&)>& what);
  void deliver(MemberId from, MemberId to, EpochWord word);
  void deliver(MemberId from, MemberId to, std::function<void()> arrive);
  void hear_of_opening(MemberId from, MemberId by, const Opening& opening);
  void ask_witness(MemberId from, const EpochWord& word);
  void tick(MemberId id);
  MemberId any();

  std::mt19937_64 random_;
  const Terms terms_;
  double dies_in_a_message_ = 0, words_lost_ = 0;
  Time now_{};
  std::map<MemberId, Process> processes_;
  std::optional<Witness> witness_;  // none: there is none, or it is dead
  std::map<Pair, Time> last_;       // when the last word between two arrives
  std::set<Pair> broken_;
  struct Event {
    Time time;
    std::uint64_t number;
    std::function<void()> act;
    bool operator<(const Event& other) const { return std::pair(time, number) > std::pair(other.time, other.number); }
  };
  std::priority_queue<Event> events_;
  std::uint64_t numbers_ = 0;
  std::size_t awaited_ = 0;  // events that are no ticks
  int openings_ = 0;
  std::map<Opening, std::set<MemberId>> opened_;
  Seen seen_;
};

}  // namespace lamina::membership::testing
