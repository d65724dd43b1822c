// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/epoch_talk.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "lamina/base/deadline.h"
#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/contact/secret.h"
#include "lamina/messaging/agreement.h"
#include "lamina/messaging/relay.h"
#include "lamina/session/witness_line.h"

namespace lamina::session {
namespace {

using membership::Epoch;
using membership::EpochWord;
using membership::MemberId;
using value::Tuple;
using value::Value;

constexpr auto kChannel = "epoch";
constexpr auto kPause = std::chrono::milliseconds(2);
constexpr auto kCalls = std::chrono::seconds(2);         // of a newcomer to the witness, while the others wait for it
constexpr auto kLooks = std::chrono::milliseconds(500);  // after the witness, each time
constexpr auto kHeardOf = std::chrono::seconds(1);       // a loss, after a wait has found it

membership::Time now() { return base::Clock::now().time_since_epoch(); }
MemberId member_of(base::Rank rank) { return MemberId(rank.value); }
base::Rank rank_of(MemberId member) { return base::Rank(member.value); }

// Machines are known under `lamina run --elastic` alone, where there may be a witness.
membership::Terms terms_of(std::size_t least, const base::Patience& patience, const FirstEpoch& first) {
  membership::Terms terms{.least = least, .patience = std::chrono::duration_cast<membership::Time>(patience.timeout)};
  for (std::size_t rank = 0; rank < first.machines.size(); ++rank) {
    terms.machines[MemberId(static_cast<std::int64_t>(rank))] = first.machines[rank];
  }
  return terms;
}

Epoch epoch_of(int size, const FirstEpoch& first) {
  Epoch epoch{.number = first.number};
  for (int rank = 0; rank < size; ++rank) epoch.members.emplace_back(rank);
  if (first.has_witness) epoch.with_witness = membership::enough_with_witness(first.machines);
  return epoch;
}

std::int64_t drawn_number() {
  const auto random = contact::random_secret();
  std::int64_t number = 0;
  std::memcpy(&number, random.data(), sizeof number);
  return number;
}

}  // namespace

FirstEpoch FirstEpoch::learn(const FirstEpoch* before, messaging::Mailbox& mailbox,
                             const std::vector<base::Rank>& ranks, std::vector<int> machines,
                             base::Clock::duration silence, const base::Patience& patience) {
  if (!WitnessLine::address()) return {};
  FirstEpoch first;
  if (before != nullptr) {
    first = *before;
  } else {
    first.has_witness = !machines.empty();
  }
  if (ranks.size() == 1) return first;
  first.machines = std::move(machines);
  const auto own = [&]() -> Value {
    return Tuple{{first.number, first.has_witness, drawn_number(), first.line ? first.line->job() : std::string()}};
  };
  const auto told = messaging::made_by_first(mailbox, ranks, own, patience);
  const auto& items = told.as<Tuple>().items;
  first.number = items.at(0).as<std::int64_t>();
  first.has_witness = items.at(1).as<bool>();
  first.session = items.at(2).as<std::int64_t>();
  const auto job = before == nullptr ? base::str("job ", first.session) : items.at(3).as<std::string>();
  if (!first.has_witness || first.line != nullptr || job.empty()) return first;
  const auto by = base::Deadline::after(before == nullptr ? silence : std::min<base::Clock::duration>(silence, kCalls));
  first.line = std::make_shared<WitnessLine>(job, silence, by, patience.check_interrupt);
  return first;
}

EpochTalk::EpochTalk(messaging::Mailbox& mailbox, transport::Transport& transport, std::size_t least,
                     base::Patience patience, FirstEpoch first)
    : mailbox_(mailbox),
      transport_(transport),
      patience_(std::move(patience)),
      first_(std::move(first)),
      member_(member_of(mailbox.rank()), epoch_of(transport.size(), first_), terms_of(least, patience_, first_)),
      ended_(first_.number) {}

std::vector<base::Rank> EpochTalk::next() {
  await([this] { return member_.epoch().number != ended_ && !member_.is_changing(); });
  ended_ = member_.epoch().number;
  if (first_.has_witness) tell_witness_lost();
  return members();
}

bool EpochTalk::begins(bool is_open) {
  const auto all = members();
  const auto number = member_.epoch().number;  // the next one may come while they say so
  try {
    for (const auto& each : all_gather(all, is_open)) {
      if (!each.as<bool>()) return false;
    }
    member_.opened(number, now());
  } catch (const base::PeerError&) {
    if (!mailbox_.loss(all, kHeardOf)) throw;
  }
  await([&] { return member_.epoch().number != number; });
  if (!member_.epoch().is_over) return false;
  try {
    all_gather(all, value::None{});
  } catch (const base::PeerError&) {  // of one that is lost to the session that begins, too
  }
  return true;
}

void EpochTalk::await(const std::function<bool()>& is_decided) {
  const auto deadline = base::Deadline::after(patience_.timeout);
  while (!is_decided()) {
    attend();
    if (!member_.ended().empty()) {
      throw base::PeerError("the ranks that are left do not go on: " + member_.ended(), mailbox_.first_loss(),
                            base::Code{"elastic-ended"});
    }
    if (deadline.expired()) {
      throw base::TimeoutError("the ranks that are left do not go on: nobody of " + member_.epoch().text() +
                               " is lost");
    }
    if (patience_.check_interrupt) patience_.check_interrupt();
    std::this_thread::sleep_for(kPause);
  }
}

std::vector<base::Rank> EpochTalk::members() const {
  std::vector<base::Rank> members;
  for (const auto member : member_.epoch().members) members.push_back(rank_of(member));
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

void EpochTalk::look_after_witness() {
  if (!first_.has_witness || base::Clock::now() - looked_ < kLooks) return;
  looked_ = base::Clock::now();
  exchange(/*tells_losses=*/false);
  tell_witness_lost();
}

FirstEpoch EpochTalk::follows() const {
  const bool has_witness = member_.epoch().with_witness > 0;
  return {
      .number = member_.epoch().number + 1, .has_witness = has_witness, .line = has_witness ? first_.line : nullptr};
}

// Hears what others say, and answers.
void EpochTalk::attend() { exchange(/*tells_losses=*/true); }

void EpochTalk::exchange(bool tells_losses) {
  if (first_.has_witness) hear_witness();
  for (int rank = 0; rank < transport_.size(); ++rank) {
    const base::Rank other(rank);
    if (other == mailbox_.rank()) continue;
    while (const auto word = mailbox_.poll(other, kChannel)) {
      member_.receive(member_of(other), EpochWord::read(word->as<std::string>()), now());
    }
    if (tells_losses && mailbox_.loss({&other, 1}, std::chrono::milliseconds(0))) member_.lost(member_of(other), now());
  }
  member_.pass(now());
  // To the last one: this member's own words may decide, and the others are to hear of it.
  for (auto words = member_.take_words(); !words.empty(); words = member_.take_words()) {
    for (const auto& [to, word] : words) {
      if (to == membership::kWitness) {
        first_.line->ask(first_.session, word);
      } else if (rank_of(to) == mailbox_.rank()) {
        member_.receive(to, word, now());
      } else {
        messaging::relay(mailbox_, transport_, rank_of(to), kChannel, word.to_text());
      }
    }
  }
}

void EpochTalk::hear_witness() {
  if (first_.line != nullptr) {
    for (const auto& word : first_.line->hear()) member_.receive(membership::kWitness, word, now());
  }
  if (first_.line == nullptr || !first_.line->lost().empty()) member_.lost(membership::kWitness, now());
}

void EpochTalk::tell_witness_lost() {
  if (member_.has_witness() || std::exchange(has_told_, true)) return;
  if (first_.line != nullptr) first_.line->give_up("another rank has lost it");
  if (mailbox_.rank() != members().front()) return;
  base::log_warning(base::str("the witness at ", WitnessLine::address().value_or("another place"), " is lost (",
                              first_.line == nullptr ? "no connection" : first_.line->lost(),
                              "): the job goes on without one. From now on half of its ranks go on with the first one "
                              "alone, so that the loss of a machine may end it"));
}

}  // namespace lamina::session
