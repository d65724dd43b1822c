// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/mailbox.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>

namespace lamina::messaging {
namespace {

// The values that members exchanged; what each had written besides says that they meant the same.
std::vector<value::Value> without_signatures(std::span<const base::Rank> members, std::vector<value::Value> exchanged) {
  const auto word = [&](std::size_t i, int place) {
    return exchanged[i].as<value::Tuple>().items.at(place).as<std::string>();
  };
  for (std::size_t i = 1; i < members.size(); ++i) {
    if (word(i, 0).empty() || word(0, 0).empty() || word(i, 0) == word(0, 0)) continue;
    throw base::DesyncError(
        base::str("rank ", members[0], " is in ", word(0, 1), " at ", word(0, 2), ", rank ", members[i], " in ",
                  word(i, 1), " at ", word(i, 2), ": all ranks of a group make the same calls, in the same order"),
        base::Code{"step-calls-differ"});
  }
  std::vector<value::Value> values;
  for (auto& one : exchanged) values.push_back(std::move(one.as<value::Tuple>().items.at(3)));
  return values;
}

base::UsageError in_two_threads(base::Rank rank, const std::string& channel, const base::Call& call) {
  return base::UsageError(
      base::str("rank ", rank, " came to ", call.name.empty() ? base::str("an exchange on ", channel) : call.name,
                call.where.empty() ? "" : " at ", call.where,
                " while another of its threads waits in a call of the same ranks: make such calls in one thread"),
      base::Code{"group-two-threads"});
}

}  // namespace

std::string group_channel(const char* what, std::span<const base::Rank> members) {
  std::string name = what;
  for (auto rank : members) name += base::str(" ", rank);
  return name;
}

Mailbox::Mailbox(transport::Transport& transport, Handlers& handlers)
    : transport_(transport), waits_(transport, handlers) {
  handlers.on(kObject, [this](transport::Message&& message) { deliver(std::move(message)); });
  waits_.keep(MutualWaits::Kind::kValue, values_kept());
  waits_.keep(MutualWaits::Kind::kExchange, exchanges_kept());
}

MutualWaits::Keeper Mailbox::values_kept() {
  const auto has_come = [this](const MutualWaits::Operation& operation, base::Rank waiting) {
    std::lock_guard guard(mutex_);
    return sent_[{waiting, operation.key}] >= operation.number;
  };
  return {has_come, nullptr};
}

MutualWaits::Keeper Mailbox::exchanges_kept() {
  const auto has_come = [this](const MutualWaits::Operation& operation, base::Rank) {
    std::lock_guard guard(mutex_);
    return exchanges_[operation.key] >= operation.number;
  };
  // Members that have not come to it leave it out: the next one is the next of all.
  const auto given_up = [this](const MutualWaits::Operation& operation, base::Rank by) {
    std::lock_guard guard(mutex_);
    auto& count = exchanges_[operation.key];
    count = std::max(count, operation.number);
    forget({by, operation.key}, operation.number);
  };
  return {has_come, given_up};
}

transport::Message Mailbox::message(const std::string& channel, std::int64_t number, value::Value value) const {
  transport::Message message;
  message.kind = kObject;
  message.call.origin = transport_.rank();
  message.call.counter = number;
  message.fields = channel;
  message.body = std::move(value);
  return message;
}

std::int64_t Mailbox::next_number(base::Rank to, const std::string& channel) {
  std::lock_guard guard(mutex_);
  return ++sent_[{to, channel}];
}

void Mailbox::send(base::Rank to, const std::string& channel, value::Value value) {
  transport_.send(to, message(channel, next_number(to, channel), std::move(value)));
}

void Mailbox::tell(base::Rank to, const std::string& channel, value::Value value) {
  transport_.tell(to, message(channel, next_number(to, channel), std::move(value)));
}

value::Value Mailbox::receive(base::Rank from, const std::string& channel, const base::Patience& patience) {
  const Key key{from, channel};
  std::int64_t number = 0;
  {
    std::lock_guard guard(mutex_);
    if (const auto box = boxes_.find(key); box != boxes_.end()) return take(box);
    number = taken_[key] + 1;
  }
  const std::vector<base::Rank> members{from};
  MutualWaits::Scope scope(waits_, {{MutualWaits::Kind::kValue, channel, number},
                                    base::str("a wait for \"", channel, "\""),
                                    {},
                                    [&] { return lacking(members, channel, 0); },
                                    patience.call,
                                    nullptr});
  return await(from, channel, scope.watched(patience), scope.call());
}

value::Value Mailbox::await(base::Rank from, const std::string& channel, const base::Patience& patience,
                            const base::Call& call) {
  std::unique_lock lock(mutex_);
  const Key key{from, channel};
  const auto what = [&] {
    const auto value = base::str("value on channel \"", channel, "\" from rank ", from);
    return call.name.empty() ? value
                             : base::str(value, " in ", call.name, call.where.empty() ? "" : " at ", call.where,
                                         exchanging_.contains(channel) ? ", which every rank of its group calls" : "");
  };
  const auto ready = [&] {
    if (boxes_.contains(key)) return true;
    if (const auto lost = lost_.find(from); lost != lost_.end()) {
      throw base::PeerError(base::str(lost->second.text(), "; ", what(), " will not come"), lost->second,
                            base::Code{"group-lost"});
    }
    return false;
  };
  base::wait_until(lock, arrived_, patience, ready, what);
  return take(boxes_.find(key));
}

bool Mailbox::heard_enough(base::Rank from, const std::string& channel, const Take& take) {
  while (true) {
    const auto box = boxes_.find({from, channel});
    if (box == boxes_.end()) return false;
    if (take(from, this->take(box))) return true;
  }
}

void Mailbox::hear(std::vector<base::Rank> from, const std::string& channel, const base::Patience& patience,
                   const Take& take, const Named& what) {
  std::unique_lock lock(mutex_);
  const auto ready = [&] {
    std::erase_if(from, [&](base::Rank rank) { return heard_enough(rank, channel, take); });
    for (const auto rank : from) {
      const auto lost = lost_.find(rank);
      if (lost == lost_.end()) continue;
      throw base::PeerError(base::str(what({}), ": ", lost->second.text()), lost->second, base::Code{"group-lost"});
    }
    return from.empty();
  };
  base::wait_until(lock, arrived_, patience, ready, [&] { return what(from); });
}

std::optional<value::Value> Mailbox::poll(base::Rank from, const std::string& channel) {
  std::lock_guard guard(mutex_);
  const auto box = boxes_.find({from, channel});
  return box == boxes_.end() ? std::nullopt : std::optional(take(box));
}

value::Value Mailbox::take(Boxes::iterator box) {
  auto [number, value] = std::move(box->second.front());
  taken_[box->first] = number;
  box->second.pop_front();
  if (box->second.empty()) boxes_.erase(box);
  return std::move(value);
}

void Mailbox::forget(const Key& key, std::int64_t until) {
  const auto box = boxes_.find(key);
  if (box == boxes_.end()) return;
  std::erase_if(box->second, [&](const Item& item) { return item.number <= until; });
  if (box->second.empty()) boxes_.erase(box);
}

std::vector<base::Rank> Mailbox::lacking(std::span<const base::Rank> members, const std::string& channel,
                                         std::size_t taken) {
  std::lock_guard guard(mutex_);
  std::vector<base::Rank> ranks;
  for (auto rank : members.subspan(taken)) {
    if (rank != transport_.rank() && !boxes_.contains({rank, channel})) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<value::Value> Mailbox::all_gather(std::span<const base::Rank> members, value::Value value,
                                              const base::Patience& patience) {
  return exchange(members, group_channel("gather", members), value, patience);
}

void Mailbox::barrier(std::span<const base::Rank> members, const base::Patience& patience) {
  exchange(members, group_channel("barrier", members), value::None{}, patience);
}

std::vector<value::Value> Mailbox::exchange(std::span<const base::Rank> members, const std::string& channel,
                                            const value::Value& value, const base::Patience& patience) {
  if (members.size() == 1) return {value};
  const auto call = patience.call ? patience.call() : base::Call();
  std::int64_t number = 0;
  {
    std::lock_guard guard(mutex_);
    if (!exchanging_.insert(channel).second) throw in_two_threads(rank(), channel, call);
    number = ++exchanges_[channel];
    for (auto rank : members) forget({rank, channel}, number - 1);  // of one that was given up meanwhile
  }
  const auto over = c10::make_scope_exit([&] {
    std::lock_guard guard(mutex_);
    exchanging_.erase(channel);
  });
  const auto deadline = base::Deadline::after(patience.timeout);
  const value::Value signed_value = value::Tuple{{call.part, call.name, call.where, value}};
  const auto word = message(channel, number, signed_value);
  for (auto rank : members) {
    if (rank == transport_.rank()) continue;
    transport::carries_tensors(word) ? transport_.send(rank, word) : transport_.tell(rank, word);
  }
  std::vector<value::Value> values;
  MutualWaits::Scope scope(waits_, {{MutualWaits::Kind::kExchange, channel, number},
                                    base::str("an exchange on channel \"", channel, "\""),
                                    {members.begin(), members.end()},
                                    [&] { return lacking(members, channel, values.size()); },
                                    [&] { return call; },
                                    [&] {
                                      std::lock_guard guard(mutex_);
                                      for (auto rank : members) forget({rank, channel}, number);
                                    }});
  auto watched = scope.watched(patience);
  watched.by = deadline;
  for (auto rank : members) {
    values.push_back(rank == transport_.rank() ? signed_value : await(rank, channel, watched, call));
  }
  return without_signatures(members, std::move(values));
}

std::optional<base::Loss> Mailbox::loss(std::span<const base::Rank> members, std::chrono::milliseconds within) {
  std::unique_lock lock(mutex_);
  std::optional<base::Loss> loss;
  arrived_.wait_for(lock, within, [&] {
    for (auto rank : members) {
      const auto lost = lost_.find(rank);
      if (lost != lost_.end()) loss = lost->second;
    }
    return loss.has_value();
  });
  return loss;
}

std::optional<base::Loss> Mailbox::first_loss() {
  std::lock_guard guard(mutex_);
  return first_loss_;
}

void Mailbox::deliver(transport::Message&& message) {
  {
    std::lock_guard guard(mutex_);
    boxes_[{message.call.origin, std::move(message.fields)}].push_back({message.call.counter, std::move(message.body)});
  }
  arrived_.notify_all();
}

void Mailbox::lose(const base::Loss& loss) {
  {
    std::lock_guard guard(mutex_);
    lost_.try_emplace(loss.rank, loss);
    if (!first_loss_) first_loss_ = loss;
  }
  arrived_.notify_all();
}

}  // namespace lamina::messaging
