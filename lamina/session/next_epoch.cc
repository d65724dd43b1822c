// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/next_epoch.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "lamina/base/deadline.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/wait.h"
#include "lamina/session/change.h"

namespace lamina::session {
namespace {

using membership::Ballot;
using membership::Epoch;
using membership::EpochWord;
using membership::MemberId;
using value::List;
using value::Value;

constexpr auto kChannel = "epoch";
constexpr auto kPause = std::chrono::milliseconds(2);
constexpr auto kHeard = std::chrono::seconds(1);  // after an operation has found a rank lost

membership::Time now() { return base::Clock::now().time_since_epoch(); }
MemberId member_of(base::Rank rank) { return MemberId(rank.value); }
base::Rank rank_of(MemberId member) { return base::Rank(member.value); }

template <class Members>
List to_list(const Members& members) {
  List list;
  for (const auto member : members) list.items.emplace_back(member.value);
  return list;
}

std::vector<MemberId> to_members(const Value& told) {
  std::vector<MemberId> members;
  for (const auto& item : told.as<List>().items) members.emplace_back(item.as<std::int64_t>());
  return members;
}

std::set<MemberId> to_set(const Value& told) {
  const auto members = to_members(told);
  return {members.begin(), members.end()};
}

List to_list(const Ballot& ballot) { return {{ballot.round, ballot.by.value}}; }

Ballot to_ballot(const Value& told) {
  const auto& items = told.as<List>().items;
  return {items.at(0).as<std::int64_t>(), MemberId(items.at(1).as<std::int64_t>())};
}

Value to_value(const EpochWord& word) {
  List next;
  if (word.next) next.items = {word.next->number, to_list(word.next->members)};
  return List{{static_cast<std::int64_t>(word.kind), word.epoch, to_list(word.ballot), to_list(word.accepted), next,
               to_list(word.lost), to_list(word.leaving), to_list(word.joining)}};
}

EpochWord to_word(const Value& told) {
  const auto& items = told.as<List>().items;
  EpochWord word{.kind = static_cast<EpochWord::Kind>(items.at(0).as<std::int64_t>()),
                 .epoch = items.at(1).as<std::int64_t>(),
                 .ballot = to_ballot(items.at(2)),
                 .accepted = to_ballot(items.at(3))};
  const auto& next = items.at(4).as<List>().items;
  if (!next.empty()) word.next = Epoch{next.at(0).as<std::int64_t>(), to_members(next.at(1))};
  word.lost = to_set(items.at(5));
  word.leaving = to_set(items.at(6));
  word.joining = to_set(items.at(7));
  return word;
}

Epoch first_epoch(const Session& session) {
  Epoch epoch;
  for (int rank = 0; rank < session.world().size; ++rank) epoch.members.emplace_back(rank);
  return epoch;
}

}  // namespace

EpochEnd::EpochEnd(Session& session)
    : before_(session),
      member_(member_of(session.world().rank), first_epoch(session),
              {.patience = std::chrono::duration_cast<membership::Time>(session.patience().timeout)}) {}

// Words go over the session's own messages, and the ends of its connections are what members hear of losses.
void EpochEnd::agree() {
  auto& mailbox = before_.mailbox();
  const auto patience = before_.patience();
  const auto self = member_of(before_.world().rank);
  const auto began = member_.epoch()->number;
  const auto deadline = base::Deadline::after(patience.timeout);
  while (member_.epoch()->number == began || member_.is_changing()) {
    for (int rank = 0; rank < before_.world().size; ++rank) {
      const base::Rank other(rank);
      if (member_of(other) == self) continue;
      while (const auto word = mailbox.poll(other, kChannel)) member_.receive(member_of(other), to_word(*word), now());
      const base::Rank ranks[] = {other};
      if (mailbox.loss(ranks, std::chrono::milliseconds(0))) member_.lost(member_of(other), now());
    }
    member_.pass(now());
    // To the last one: this member's own words may decide, and the others are to hear of it.
    for (auto words = member_.take_words(); !words.empty(); words = member_.take_words()) {
      for (const auto& [to, word] : words) tell(to, word);
    }
    if (!member_.ended().empty()) {
      throw base::PeerError("the ranks that are left do not go on: " + member_.ended(), mailbox.first_loss(),
                            base::Code{"elastic-ended"});
    }
    if (deadline.expired()) {
      throw base::TimeoutError("the ranks that are left do not go on: nobody of " + member_.epoch()->text() +
                               " is lost");
    }
    if (patience.check_interrupt) patience.check_interrupt();
    std::this_thread::sleep_for(kPause);
  }
}

void EpochEnd::tell(MemberId to, const EpochWord& word) {
  if (to == member_of(before_.world().rank)) return member_.receive(to, word, now());
  try {
    before_.mailbox().tell(rank_of(to), kChannel, to_value(word));
  } catch (const base::PeerError&) {  // of which the mailbox is about to hear
    member_.lost(to, now());
  }
}

NextEpoch EpochEnd::next(const Value& word, std::int64_t progress) {
  base::internal_check(before_.mailbox().first_loss().has_value(), "an epoch ends without a loss");
  while (true) {
    agree();
    std::vector<base::Rank> members;
    for (const auto member : member_.epoch()->members) members.push_back(rank_of(member));
    std::vector<Value> told;
    try {
      told = before_.mailbox().all_gather(members, value::Tuple{{progress, word}}, before_.patience());
    } catch (const base::PeerError&) {
      if (!before_.mailbox().loss(members, kHeard)) throw;
      continue;
    }
    std::vector<std::size_t> order(members.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto progress_of = [&](std::size_t at) { return told[at].as<value::Tuple>().items.at(0).as<std::int64_t>(); };
    std::rotate(order.begin(), std::ranges::max_element(order, {}, progress_of), order.end());
    std::sort(order.begin() + 1, order.end());
    NextEpoch next{.number = member_.epoch()->number, .members = {}, .words = {}};
    for (const auto at : order) {
      if (members[at] == before_.world().rank) next.rank = static_cast<int>(next.members.size());
      next.members.push_back(members[at]);
      next.words.push_back(told[at].as<value::Tuple>().items.at(1));
    }
    return next;
  }
}

std::shared_ptr<Session> EpochEnd::open(const NextEpoch& next, std::optional<int> microbatches,
                                        environment::World world, FaceHooks hooks) {
  const auto copies = static_cast<std::int64_t>(next.members.size());
  const auto all = std::int64_t{before_.job().microbatches()} * before_.world().size;
  auto config = before_.config();
  if (!microbatches && all % copies != 0) {
    throw base::ConfigError(
        base::str(copies, " copies of the model that are left cannot share out ", all,
                  " microbatches alike, which a batch of all copies has: give init() such `microbatches` that fewer "
                  "copies can"),
        base::Code{"elastic-refused"});
  }
  config.microbatches = microbatches.value_or(static_cast<int>(all / copies));
  config.verify_steps = 0;
  return open_beside(before_, std::move(config), std::move(world), std::move(hooks), next.members,
                     "the ranks that are left meet");
}

}  // namespace lamina::session
