// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/mailbox.h"

#include "lamina/transport/lost.h"

namespace lamina::collective {

std::string group_channel(const char* what, std::span<const base::Rank> members) {
  std::string name = what;
  for (auto rank : members) name += base::str(" ", rank);
  return name;
}

void Mailbox::send(base::Rank to, const std::string& channel, value::Value value) {
  transport::Message message;
  message.kind = transport::Kind::kObject;
  message.caller = transport_.rank();
  message.channel = channel;
  message.body = std::move(value);
  transport_.send(to, message);
}

value::Value Mailbox::receive(base::Rank from, const std::string& channel, const base::Patience& patience) {
  std::unique_lock lock(mutex_);
  const Key key{from, channel};
  const auto what = [&] { return base::str("value on channel \"", channel, "\" from rank ", from); };
  const auto ready = [&] {
    if (boxes_.contains(key)) return true;
    if (const auto lost = lost_.find(from); lost != lost_.end()) {
      throw base::PeerError(base::str(transport::lost(from, lost->second), "; ", what(), " will not come"));
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
      if (lost != lost_.end()) throw base::PeerError(base::str(what({}), ": ", transport::lost(rank, lost->second)));
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
  auto value = std::move(box->second.front());
  box->second.pop_front();
  if (box->second.empty()) boxes_.erase(box);
  return value;
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
  for (auto rank : members) {
    if (rank != transport_.rank()) send(rank, channel, value);
  }
  std::vector<value::Value> values;
  for (auto rank : members) {
    values.push_back(rank == transport_.rank() ? value : receive(rank, channel, patience));
  }
  return values;
}

std::string Mailbox::loss(std::span<const base::Rank> members, std::chrono::milliseconds within) {
  std::unique_lock lock(mutex_);
  std::string clause;
  arrived_.wait_for(lock, within, [&] {
    for (auto rank : members) {
      const auto lost = lost_.find(rank);
      if (lost != lost_.end()) clause = transport::lost(rank, lost->second);
    }
    return !clause.empty();
  });
  return clause;
}

std::string Mailbox::first_loss() {
  std::lock_guard guard(mutex_);
  return first_loss_;
}

void Mailbox::deliver(transport::Message&& message) {
  {
    std::lock_guard guard(mutex_);
    boxes_[{message.caller, message.channel}].push_back(std::move(message.body));
  }
  arrived_.notify_all();
}

void Mailbox::lose(base::Rank rank, const std::string& why) {
  {
    std::lock_guard guard(mutex_);
    lost_.try_emplace(rank, why);
    if (first_loss_.empty()) first_loss_ = transport::lost(rank, why);
  }
  arrived_.notify_all();
}

}  // namespace lamina::collective
