// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/agreement.h"

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/messaging/outcome.h"

namespace lamina::messaging {

using value::List;
using value::Tuple;
using value::Value;

std::optional<FirstGiven> first_given(Mailbox& mailbox, std::span<const base::Rank> members, std::optional<Value> own,
                                      const base::Patience& patience) {
  const auto first = [](Value low, Value high) { return low.get_if<value::None>() == nullptr ? low : high; };
  Value given;
  if (own) given = Tuple{{mailbox.rank().value, std::move(*own)}};
  const auto found = mailbox.exchange(members, "first given", std::move(given), first, patience);
  if (found.get_if<value::None>() != nullptr) return std::nullopt;
  const auto& items = found.as<Tuple>().items;
  return FirstGiven{base::Rank(items.at(0).as<std::int64_t>()), items.at(1)};
}

bool are_alike(Mailbox& mailbox, std::span<const base::Rank> members, std::int64_t own,
               const base::Patience& patience) {
  return hear_first(mailbox, members, own, {}, patience).are_alike;
}

Led hear_first(Mailbox& mailbox, std::span<const base::Rank> members, std::int64_t own, Value word,
               const base::Patience& patience) {
  const auto lead = [](Value low, const Value& high) -> Value {
    auto& number = low.as<Tuple>().items.at(0);
    const auto* one = number.get_if<std::int64_t>();
    const auto* other = high.as<Tuple>().items.at(0).get_if<std::int64_t>();
    if (one == nullptr || other == nullptr || *one != *other) number = value::None{};
    return low;
  };
  if (mailbox.rank() != members.front()) word = {};
  auto led = mailbox.exchange(members, "alike", Tuple{{own, std::move(word)}}, lead, patience);
  auto& items = led.as<Tuple>().items;
  return {items.at(0).get_if<std::int64_t>() != nullptr, std::move(items.at(1))};
}

std::vector<double> largest(Mailbox& mailbox, std::span<const base::Rank> members, std::vector<double> own,
                            const base::Patience& patience) {
  const auto merge = [](Value low, const Value& high) -> Value {
    auto& both = low.as<List>().items;
    const auto& others = high.as<List>().items;
    if (both.size() != others.size()) {
      throw base::UsageError(base::str("ranks give ", both.size(), " and ", others.size(),
                                       " numbers to one exchange: they are in different calls"));
    }
    for (std::size_t i = 0; i < both.size(); ++i) {
      both[i].as<double>() = std::max(both[i].as<double>(), others[i].as<double>());
    }
    return low;
  };
  List numbers;
  for (const auto each : own) numbers.items.emplace_back(each);
  const auto all = mailbox.exchange(members, "largest", std::move(numbers), merge, patience);
  std::ranges::transform(all.as<List>().items, own.begin(), [](const Value& each) { return each.as<double>(); });
  return own;
}

void act_together(Mailbox& mailbox, std::span<const base::Rank> members, const std::function<void()>& act,
                  const base::Patience& patience) {
  std::exception_ptr error;
  try {
    act();
  } catch (...) {
    error = std::current_exception();
  }
  std::optional<Value> problem;
  if (error) problem = to_text(error, mailbox.rank());
  const auto first = first_given(mailbox, members, std::move(problem), patience);
  if (!first) return;
  std::rethrow_exception(first->rank == mailbox.rank() ? error : to_error(first->value.as<std::string>()));
}

value::Value made_by_first(Mailbox& mailbox, std::span<const base::Rank> members, const std::function<Value()>& make,
                           const base::Patience& patience) {
  std::exception_ptr error;
  std::optional<Value> own;  // whether it failed; then a text, else what was made
  if (mailbox.rank() == members.front()) {
    try {
      own = Tuple{{false, make()}};
    } catch (...) {
      error = std::current_exception();
      own = Tuple{{true, to_text(error, mailbox.rank())}};
    }
  }
  auto first = first_given(mailbox, members, std::move(own), patience)->value;
  auto& items = first.as<Tuple>().items;
  if (!items.at(0).as<bool>()) return std::move(items.at(1));
  std::rethrow_exception(error ? error : to_error(items.at(1).as<std::string>()));
}

}  // namespace lamina::messaging
