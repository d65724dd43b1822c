// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/epoch_talk.h"

#include <set>
#include <thread>
#include <utility>

#include "lamina/base/deadline.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/messaging/relay.h"

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

Epoch first_epoch(int size) {
  Epoch epoch;
  for (int rank = 0; rank < size; ++rank) epoch.members.emplace_back(rank);
  return epoch;
}

}  // namespace

EpochTalk::EpochTalk(messaging::Mailbox& mailbox, transport::Transport& transport, std::size_t least,
                     base::Patience patience)
    : mailbox_(mailbox),
      transport_(transport),
      patience_(std::move(patience)),
      member_(member_of(mailbox.rank()), first_epoch(transport.size()),
              {.least = least, .patience = std::chrono::duration_cast<membership::Time>(patience_.timeout)}) {}

std::vector<base::Rank> EpochTalk::next() {
  const auto deadline = base::Deadline::after(patience_.timeout);
  while (member_.epoch()->number == ended_ || member_.is_changing()) {
    attend();
    if (!member_.ended().empty()) {
      throw base::PeerError("the ranks that are left do not go on: " + member_.ended(), mailbox_.first_loss(),
                            base::Code{"elastic-ended"});
    }
    if (deadline.expired()) {
      throw base::TimeoutError("the ranks that are left do not go on: nobody of " + member_.epoch()->text() +
                               " is lost");
    }
    if (patience_.check_interrupt) patience_.check_interrupt();
    std::this_thread::sleep_for(kPause);
  }
  ended_ = member_.epoch()->number;
  std::vector<base::Rank> members;
  for (const auto member : member_.epoch()->members) members.push_back(rank_of(member));
  return members;
}

std::vector<Value> EpochTalk::all_gather(std::span<const base::Rank> members, Value value) {
  auto patience = patience_;
  patience.check_interrupt = [this] {
    if (patience_.check_interrupt) patience_.check_interrupt();
    attend();
  };
  const auto deadline = base::Deadline::after(patience_.timeout);
  while (true) {
    try {
      return mailbox_.all_gather(members, value, patience);
    } catch (const base::DesyncError&) {
      if (deadline.expired()) throw;
    }
  }
}

// Hears what others say, and answers.
void EpochTalk::attend() {
  for (int rank = 0; rank < transport_.size(); ++rank) {
    const base::Rank other(rank);
    if (other == mailbox_.rank()) continue;
    while (const auto word = mailbox_.poll(other, kChannel)) member_.receive(member_of(other), to_word(*word), now());
    if (mailbox_.loss({&other, 1}, std::chrono::milliseconds(0))) member_.lost(member_of(other), now());
  }
  member_.pass(now());
  // To the last one: this member's own words may decide, and the others are to hear of it.
  for (auto words = member_.take_words(); !words.empty(); words = member_.take_words()) {
    for (const auto& [to, word] : words) {
      if (rank_of(to) == mailbox_.rank()) {
        member_.receive(to, word, now());
      } else {
        messaging::relay(mailbox_, transport_, rank_of(to), kChannel, to_value(word));
      }
    }
  }
}

}  // namespace lamina::session
