// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/mailbox.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "lamina/base/rank_list.h"
#include "lamina/device/copies.h"
#include "lamina/messaging/outcome.h"

namespace lamina::messaging {
namespace {

// A member that was lost leaves those who hear of it from others this long: where it has done its part, all that is
// lacked is on its way.
constexpr auto kOnItsWay = std::chrono::seconds(1);
// One that is waited for itself, in a loose exchange, may have left for what a third one has told it: that is on its
// way here, too.
constexpr auto kCauseOnItsWay = std::chrono::milliseconds(300);

[[noreturn]] void throw_different(const Given::Caller& one, const Given::Caller& other) {
  throw base::DesyncError(base::str("rank ", one.rank, " is in ", one.call.name, " at ", one.call.where, ", rank ",
                                    other.rank, " in ", other.call.name, " at ", other.call.where,
                                    ": all ranks of a group make the same calls, in the same order"),
                          base::Code{"step-calls-differ"});
}

base::UsageError in_two_threads(base::Rank rank, const std::string& channel, const base::Call& call) {
  return base::UsageError(
      base::str("rank ", rank, " came to ", call.name.empty() ? base::str("an exchange on ", channel) : call.name,
                call.where.empty() ? "" : " at ", call.where,
                " while another of its threads waits in a call of the same ranks: make such calls in one thread"),
      base::Code{"group-two-threads"});
}

}  // namespace

// Ranks that are equally far apart are named by the first and the last one.
std::string group_channel(const char* what, std::span<const base::Rank> members) {
  std::string name = what;
  for (std::size_t i = 0; i < members.size();) {
    const auto apart = [&](std::size_t at) { return members[at + 1].value - members[at].value; };
    std::size_t last = i;
    while (last + 1 < members.size() && apart(last) == apart(i)) ++last;
    if (last < i + 2) last = i;
    name += base::str(" ", members[i]);
    if (last > i) name += base::str("-", members[last]);
    if (last > i && apart(i) != 1) name += base::str("/", apart(i));
    i = last + 1;
  }
  return name;
}

Mailbox::Mailbox(transport::Transport& transport, Handlers& handlers)
    : transport_(transport), waits_(transport, handlers) {
  handlers.on(kObject, [this](transport::Message&& message) { deliver(std::move(message)); });
  waits_.keep(WaitKind::kValue, values_kept());
  waits_.keep(WaitKind::kExchange, exchanges_kept());
}

MutualWaits::Keeper Mailbox::values_kept() {
  const auto has_come = [this](const WaitOperation& operation, base::Rank waiting) {
    std::lock_guard guard(mutex_);
    return sent_[{waiting, operation.key}] >= operation.number;
  };
  return {has_come, nullptr};
}

MutualWaits::Keeper Mailbox::exchanges_kept() {
  const auto has_come = [this](const WaitOperation& operation, base::Rank) {
    std::lock_guard guard(mutex_);
    return exchanges_[operation.key] >= operation.number;
  };
  // Members that have not come to it leave it out: the next one is the next of all.
  const auto given_up = [this](const WaitOperation& operation, base::Rank by) {
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
  const auto lacks = [&]() -> std::vector<base::Rank> {
    std::lock_guard guard(mutex_);
    return is_here(from, channel, 0) ? std::vector<base::Rank>() : std::vector{from};
  };
  MutualWaits::Scope scope(waits_, {{WaitKind::kValue, channel, number},
                                    base::str("a wait for \"", channel, "\""),
                                    {},
                                    lacks,
                                    patience.call,
                                    nullptr});
  return await({from, channel, 0, scope.call(), scope, nullptr}, scope.watched(patience));
}

bool Mailbox::is_here(base::Rank from, const std::string& channel, std::int64_t number) {
  forget({from, channel}, number - 1);
  const auto box = boxes_.find({from, channel});
  return box != boxes_.end() && (number == 0 || box->second.front().number == number);
}

std::string Mailbox::name(const Lacked& lacked) {
  const auto& [from, channel, number, call, scope, named, is_loose] = lacked;
  const auto awaited = scope.awaited({from});
  if (named) return named(awaited.absent) + beyond(awaited);
  const auto value = base::str("value on channel \"", channel, "\" from ", base::name_ranks(awaited.absent));
  if (call.name.empty()) return value + beyond(awaited);
  return base::str(value, " in ", call.name, call.where.empty() ? "" : " at ", call.where,
                   exchanging_.contains(channel) ? " (which every rank of its group calls)" : "", beyond(awaited));
}

void Mailbox::throw_lost(const base::Loss& loss, const Lacked& lacked) {
  if (lacked.named) {
    throw base::PeerError(base::str(lacked.named({}), ": ", loss.text()), loss, base::Code{"group-lost"});
  }
  throw base::PeerError(base::str(loss.text(), "; ", name(lacked), " will not come"), loss, base::Code{"group-lost"});
}

value::Value Mailbox::await(const Lacked& lacked, const base::Patience& patience) {
  std::unique_lock lock(mutex_);
  const auto ready = [&] {
    if (is_here(lacked.from, lacked.channel, lacked.number)) return true;
    const auto found = lost_.find(lacked.from);
    if (found == lost_.end()) return false;
    if (lacked.is_loose && base::Clock::now() - found->second.at < kCauseOnItsWay) return false;
    throw_lost(found->second.loss, lacked);
  };
  base::wait_until(lock, arrived_, patience, ready, [&] { return name(lacked); });
  return take(boxes_.find({lacked.from, lacked.channel}));
}

bool Mailbox::heard_enough(base::Rank from, const std::string& channel, const Take& take) {
  while (true) {
    const auto box = boxes_.find({from, channel});
    if (box == boxes_.end()) return false;
    if (take(from, this->take(box))) return true;
  }
}

void Mailbox::hear(std::vector<base::Rank> from, const std::string& channel, const base::Patience& patience,
                   const Take& take, const WaitNamer& what) {
  std::unique_lock lock(mutex_);
  const auto ready = [&] {
    std::erase_if(from, [&](base::Rank rank) { return heard_enough(rank, channel, take); });
    for (const auto rank : from) {
      const auto lost = lost_.find(rank);
      if (lost == lost_.end()) continue;
      const auto& loss = lost->second.loss;
      throw base::PeerError(base::str(what({}), ": ", loss.text()), loss, base::Code{"group-lost"});
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
  value::for_each_tensor(value, &devices::join_arrival);
  return std::move(value);
}

void Mailbox::forget(const Key& key, std::int64_t until) {
  const auto box = boxes_.find(key);
  if (box == boxes_.end()) return;
  std::erase_if(box->second, [&](const Item& item) { return item.number <= until; });
  if (box->second.empty()) boxes_.erase(box);
}

std::vector<value::Value> Mailbox::all_gather(std::span<const base::Rank> members, value::Value value,
                                              const base::Patience& patience) {
  const auto join = [](value::Value low, value::Value high) -> value::Value {
    auto& items = low.as<value::List>().items;
    for (auto& item : high.as<value::List>().items) items.push_back(std::move(item));
    return low;
  };
  return exchange(members, "gather", value::List{{std::move(value)}}, join, patience).as<value::List>().items;
}

void Mailbox::barrier(std::span<const base::Rank> members, const base::Patience& patience, const char* purpose) {
  exchange(members, purpose, value::None{}, [](value::Value low, const value::Value&) { return low; }, patience);
}

value::Value Mailbox::exchange(std::span<const base::Rank> members, const char* purpose, value::Value value,
                               const Merge& merge, const base::Patience& patience, const Course& course) {
  if (members.size() == 1) return value;
  const auto channel = group_channel(purpose, members);
  const auto call = patience.call && !course.is_loose ? patience.call() : base::Call();
  std::int64_t number = 0;
  {
    std::lock_guard guard(mutex_);
    if (!exchanging_.insert(channel).second) throw in_two_threads(rank(), channel, call);
    auto& count = exchanges_[channel];
    number = count = course.number.value_or(count + 1);
  }
  const auto over = c10::make_scope_exit([&] {
    std::lock_guard guard(mutex_);
    exchanging_.erase(channel);
  });
  Given given{.value = std::move(value)};
  if (!call.part.empty()) given.first = {rank(), call};
  auto in_call = patience;
  in_call.by = base::Deadline::after(patience.timeout);
  if (!course.is_loose) in_call.call = [&] { return call; };
  meet(members, channel, number, given, merge, in_call, call, course);
  if (!given.error.empty()) std::rethrow_exception(to_error(given.error));
  if (given.other) throw_different(*given.first, *given.other);
  return std::move(given.value);
}

void Mailbox::meet(std::span<const base::Rank> members, const std::string& channel, std::int64_t number, Given& given,
                   const Merge& merge, const base::Patience& patience, const base::Call& call, const Course& course) {
  std::optional<base::Rank> awaited;
  const auto lacks = [&]() -> std::vector<base::Rank> {
    std::lock_guard guard(mutex_);
    return awaited && !is_here(*awaited, channel, number) ? std::vector{*awaited} : std::vector<base::Rank>();
  };
  const auto give_up = [&] {
    std::lock_guard guard(mutex_);
    for (const auto rank : members) forget({rank, channel}, number);
  };
  MutualWaits::Scope scope(waits_,
                           {{WaitKind::kExchange, channel, number},
                            course.named ? course.named({}) : base::str("an exchange on channel \"", channel, "\""),
                            {members.begin(), members.end()},
                            lacks,
                            patience.call,
                            give_up});
  auto watched = scope.watched(patience);
  watched.check_interrupt = [&, check = watched.check_interrupt] {
    check();
    require_members(members, {*awaited, channel, number, call, scope, course.named});
  };
  const auto place = static_cast<std::size_t>(std::ranges::find(members, rank()) - members.begin());
  std::exception_ptr error;
  for (const auto& meeting : meetings(place, members.size())) {
    const auto with = members[meeting.with];
    try {
      if (meeting.gives) give(with, message(channel, number, to_value(given)));
      if (!meeting.takes || !given.error.empty()) continue;
      awaited = with;
      auto taken = to_given(await({with, channel, number, call, scope, course.named, course.is_loose}, watched));
      const bool is_before = meeting.with < place;
      auto& low = is_before ? taken : given;
      auto& high = is_before ? given : taken;
      given = meeting.ends ? std::move(taken) : messaging::merge(std::move(low), std::move(high), merge);
    } catch (const base::DesyncError&) {  // which all members hear of
      throw;
    } catch (...) {
      if (course.is_loose) throw;
      error = std::current_exception();
      given = {.error = to_text(error, rank())};
    }
  }
  if (error) std::rethrow_exception(error);
}

// One that is lost may have sent its own word before: who waits for that finds it, or the loss.
void Mailbox::give(base::Rank to, const transport::Message& word) {
  try {
    transport::carries_tensors(word) ? transport_.send(to, word) : transport_.tell(to, word);
  } catch (const base::PeerError&) {
  }
}

// Ends the wait for one member where another one is lost: those between may hear of that later.
void Mailbox::require_members(std::span<const base::Rank> members, const Lacked& lacked) {
  std::lock_guard guard(mutex_);
  for (const auto& [rank, lost] : lost_) {
    if (std::ranges::find(members, rank) == members.end()) continue;
    if (base::Clock::now() - lost.at < kOnItsWay) continue;
    throw_lost(lost.loss, {rank, lacked.channel, lacked.number, lacked.call, lacked.scope, lacked.named});
  }
}

std::optional<base::Loss> Mailbox::loss(std::span<const base::Rank> members, std::chrono::milliseconds within) {
  std::unique_lock lock(mutex_);
  std::optional<base::Loss> loss;
  const auto is_there = [&] {
    for (auto rank : members) {
      const auto lost = lost_.find(rank);
      if (lost != lost_.end()) loss = lost->second.loss;
    }
    return loss.has_value();
  };
  if (!is_there() && within.count() > 0) arrived_.wait_for(lock, within, is_there);
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
    lost_.try_emplace(loss.rank, Lost{loss, base::Clock::now()});
    if (!first_loss_) first_loss_ = loss;
  }
  arrived_.notify_all();
}

}  // namespace lamina::messaging
