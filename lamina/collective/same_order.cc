// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/same_order.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/messaging/agreement.h"
#include "lamina/value/numbers.h"

namespace lamina::collective {
namespace {

// After it a member that waits in a collective asks whether the others have ended the turn in which it waits.
constexpr auto kLong = std::chrono::milliseconds(500);

base::Rank neighbour(const std::vector<base::Rank>& members, int member, int step) {
  const auto size = static_cast<int>(members.size());
  return members.at(static_cast<std::size_t>((member + step + size) % size));
}

}  // namespace

SameOrder::SameOrder(messaging::Mailbox& mailbox, std::vector<base::Rank> members, int member, Words words, Turn turn)
    : mailbox_(mailbox),
      self_(neighbour(members, member, 0)),
      next_(neighbour(members, member, 1)),
      previous_(neighbour(members, member, -1)),
      others_(members),
      words_(std::move(words)),
      turn_(std::move(turn)),
      channel_(messaging::group_channel(words_.who.c_str(), members)),
      farewells_(messaging::group_channel((words_.who + " given up").c_str(), members)) {
  std::erase(others_, self_);
}

std::int64_t SameOrder::begin(const Operation& operation) {
  const bool is_compared = begun_ >= level_;
  if (is_compared && turn_.begins) turn_.begins(words_.in_words(operation));
  mailbox_.send(next_, channel_, value::Tuple{{caught_up_, ++begun_, to_value(operation)}});
  if (is_compared) unchecked_.push_back(operation);
  not_ended_.push_back(operation);
  return begun_;
}

void SameOrder::check(std::int64_t number, const base::Patience& patience) {
  if (turn_.waits && checked_ < number) turn_.waits();
  const auto until_heard = watched(number, patience);
  while (checked_ < number) {
    const auto heard = mailbox_.receive(previous_, channel_, until_heard);
    const auto& items = heard.as<value::Tuple>().items;
    if (items.at(0).as<std::int64_t>() < caught_up_ || items.at(1).as<std::int64_t>() <= level_) continue;
    const auto others = to_operation(items.at(2));
    const auto mine = std::move(unchecked_.front());
    unchecked_.pop_front();
    ++checked_;
    if (mine == others) continue;
    if (words_.beside && mine.beside != others.beside) words_.beside(self_, mine, previous_, others);
    if (mine.what == others.what && mine.numbers == others.numbers) continue;
    throw words_.error(base::str("rank ", self_, " wants the ", words_.in_words(mine), ", rank ", previous_, " the ",
                                 words_.in_words(others)));
  }
}

base::Patience SameOrder::watched(std::int64_t number, const base::Patience& patience) {
  auto watched = patience;
  auto long_from = std::optional(base::Clock::now() + kLong);
  watched.check_interrupt = [this, number, long_from, interrupt = patience.check_interrupt]() mutable {
    if (interrupt) interrupt();
    require_all_begin(number);
    if (!turn_.waits_long || !long_from || base::Clock::now() < *long_from) return;
    long_from.reset();
    turn_.waits_long();
  };
  return watched;
}

void SameOrder::take_back() {
  if (checked_ == begun_) {
    --checked_;
  } else {
    unchecked_.pop_back();
  }
  --begun_;
  not_ended_.pop_back();
}

void SameOrder::note_end(std::int64_t number) {
  while (begun_ - std::ssize(not_ended_) < number) not_ended_.pop_front();
}

// Collectives that are given up.

void SameOrder::give_up(const value::Failure& failure) {
  value::List not_ended;
  for (const auto& operation : not_ended_) not_ended.items.push_back(to_value(operation));
  const value::Tuple farewell{{++given_up_, begun_, std::move(not_ended), value::to_value(failure)}};
  for (const auto rank : others_) {
    try {
      mailbox_.send(rank, farewells_, farewell);
    } catch (const base::Error&) {  // of a rank that is lost: who waits for it learns of that
    }
  }
}

void SameOrder::end_together(const std::optional<value::Failure>& failure, const base::Patience& patience) {
  if (failure) give_up(*failure);
  auto members = others_;
  members.push_back(self_);
  std::ranges::sort(members);
  std::optional<messaging::FirstGiven> first;
  try {
    first = messaging::first_given(mailbox_, members, failure ? std::optional(value::to_value(*failure)) : std::nullopt,
                                   patience);
  } catch (...) {
    if (!failure) throw;
  }
  if (failure || !first) return;
  const auto others = value::to_failure(first->value);
  give_up(others);
  throw value::RemoteFailure(others);
}

void SameOrder::require_all_begin(std::int64_t number) {
  listen();
  for (const auto& [rank, farewells] : heard_) {
    for (const auto& farewell : farewells) {
      if (farewell.time > given_up_ && farewell.begun < number) throw value::RemoteFailure(farewell.failure);
    }
  }
}

void SameOrder::require_nobody_gave_up() { require_all_begin(std::numeric_limits<std::int64_t>::max()); }

std::vector<SameOrder::Operation> SameOrder::lacking(const base::Patience& patience) {
  if (caught_up_ == given_up_) return {};
  const Farewell* farthest = nullptr;
  for (const auto rank : others_) {
    auto& farewells = heard_[rank];
    while (farewells.empty() || farewells.front().time < given_up_) {
      if (farewells.empty()) {
        farewells.push_back(to_farewell(mailbox_.receive(rank, farewells_, patience)));
      } else {
        farewells.pop_front();
      }
    }
    if (farthest == nullptr || farewells.front().begun > farthest->begun) farthest = &farewells.front();
  }
  caught_up_ = given_up_;
  level_ = checked_ = std::max(begun_, farthest->begun);
  unchecked_.clear();
  const auto count = std::max(farthest->begun - begun_, std::int64_t{0});
  const auto& known = farthest->not_ended;
  base::internal_check(count <= std::ssize(known), "a collective that this member never began has ended");
  return {known.end() - count, known.end()};
}

void SameOrder::listen() {
  for (const auto rank : others_) {
    while (const auto farewell = mailbox_.poll(rank, farewells_)) heard_[rank].push_back(to_farewell(*farewell));
  }
}

SameOrder::Farewell SameOrder::to_farewell(const value::Value& value) {
  const auto& items = value.as<value::Tuple>().items;
  if (items.size() != 4) throw base::FormatError("a member's farewell to a pass without four parts");
  Farewell farewell{items[0].as<std::int64_t>(), items[1].as<std::int64_t>(), {}, value::to_failure(items[3])};
  for (const auto& operation : items[2].as<value::List>().items) farewell.not_ended.push_back(to_operation(operation));
  return farewell;
}

value::Value SameOrder::to_value(const Operation& operation) {
  return value::Tuple{{operation.what, value::to_list(operation.numbers), value::to_list(operation.beside)}};
}

SameOrder::Operation SameOrder::to_operation(const value::Value& value) {
  const auto& items = value.as<value::Tuple>().items;
  if (items.size() != 3) throw base::FormatError("a member's collective without three parts");
  return {items[0].as<std::string>(), value::to_numbers(items[1]), value::to_numbers(items[2])};
}

}  // namespace lamina::collective
