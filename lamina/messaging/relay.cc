// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/relay.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <set>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/transport/news.h"

namespace lamina::messaging {
namespace {

using transport::Message;
using transport::Transport;
using value::Tuple;

std::vector<base::Rank> all_ranks(const Transport& transport) {
  std::vector<base::Rank> ranks;
  for (int rank = 0; rank < transport.size(); ++rank) ranks.emplace_back(rank);
  return ranks;
}

std::vector<base::Rank> neighbours_of(const Transport& transport, const std::vector<base::Rank>& ranks) {
  const auto own = std::ranges::find(ranks, transport.rank()) - ranks.begin();
  return transport::neighbours(ranks, static_cast<std::size_t>(own));
}

bool is_lost(Mailbox& mailbox, base::Rank rank) {
  return mailbox.loss({&rank, 1}, std::chrono::milliseconds(0)).has_value();
}

// The neighbours among all ranks, and among those that are left.
std::set<base::Rank> around(const Transport& transport, const std::function<bool(base::Rank)>& is_gone) {
  auto ranks = all_ranks(transport);
  const auto first = neighbours_of(transport, ranks);
  std::erase_if(ranks, [&](base::Rank rank) { return rank != transport.rank() && is_gone(rank); });
  const auto now = neighbours_of(transport, ranks);
  std::set<base::Rank> found(first.begin(), first.end());
  found.insert(now.begin(), now.end());
  return found;
}

bool tell(Transport& transport, base::Rank to, const Message& word) {
  try {
    transport.tell(to, word);
  } catch (const base::Error&) {  // of a rank that is lost itself, or takes nothing any more
    return false;
  }
  return true;
}

// Around the circle of all ranks.
std::int64_t distance(base::Rank one, base::Rank other, int size) {
  const auto apart = std::abs(one.value - other.value);
  return std::min(apart, size - apart);
}

void send_to(Mailbox& mailbox, Transport& transport, base::Rank to, const Message& word) {
  const auto away = [&](base::Rank from) { return distance(from, to, transport.size()); };
  const auto is_no_step = [&](base::Rank rank) {
    return away(rank) >= away(transport.rank()) || is_lost(mailbox, rank);
  };
  auto steps = neighbours_of(transport, all_ranks(transport));
  std::erase_if(steps, is_no_step);
  if (steps.empty()) {
    const auto found = around(transport, [&](base::Rank rank) { return is_lost(mailbox, rank); });
    std::ranges::remove_copy_if(found, std::back_inserter(steps), is_no_step);
  }
  std::ranges::stable_sort(steps, {}, away);
  if (steps.empty()) steps.push_back(to);
  for (const auto step : steps) {
    if (tell(transport, step, word)) return;
  }
}

}  // namespace

void tell_failed(Transport& transport, const std::string& why) {
  Message word;
  word.kind = kFailedRank;
  word.call.origin = transport.rank();
  word.fields = why;
  for (const auto rank : neighbours_of(transport, all_ranks(transport))) tell(transport, rank, word);
  tell(transport, transport.rank(), word);
}

void relay(Mailbox& mailbox, Transport& transport, base::Rank to, const std::string& channel, value::Value value) {
  Message word;
  word.kind = kRelayed;
  word.call.origin = transport.rank();
  word.fields = channel;
  word.body = Tuple{{to.value, std::move(value)}};
  if (!is_lost(mailbox, to)) send_to(mailbox, transport, to, word);
}

bool send_on(Mailbox& mailbox, Transport& transport, const Message& message) {
  const base::Rank to(message.body.as<Tuple>().items.at(0).as<std::int64_t>());
  if (to == transport.rank()) return false;
  if (!is_lost(mailbox, to)) send_to(mailbox, transport, to, message);
  return true;
}

Message arrived(Message&& message) {
  message.kind = kObject;
  message.body = value::Value(std::move(message.body.as<Tuple>().items.at(1)));
  return std::move(message);
}

bool Rumours::hear(const Message& word) {
  const bool is_new = !is_known_of(word.call.origin);
  if (is_new) words_.push_back(word);
  return is_new;
}

bool Rumours::is_known_of(base::Rank rank) const {
  return std::ranges::any_of(words_, [&](const Message& word) { return word.call.origin == rank; });
}

// Also to those that have failed, and by them: these are there for a while. To others that are lost nothing can be
// told.
void Rumours::pass_on() {
  if (words_.empty()) return;
  const auto is_gone = [&](base::Rank rank) { return !is_known_of(rank) && is_lost(mailbox_, rank); };
  for (const auto rank : around(transport_, is_gone)) {
    for (auto& told = told_[rank]; told < words_.size(); ++told) {
      if (words_[told].call.origin != rank) tell(transport_, rank, words_[told]);
    }
  }
}

}  // namespace lamina::messaging
