// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/exchange.h"

#include <bit>
#include <utility>

namespace lamina::messaging {
namespace {

using value::Tuple;
using value::Value;

Value to_value(const std::optional<Given::Caller>& caller) {
  if (!caller) return {};
  return Tuple{{caller->rank.value, caller->call.part, caller->call.name, caller->call.where}};
}

std::optional<Given::Caller> to_caller(const Value& value) {
  if (value.get_if<value::None>() != nullptr) return std::nullopt;
  const auto& items = value.as<Tuple>().items;
  return Given::Caller{base::Rank(items.at(0).as<std::int64_t>()),
                       {.name = items.at(2).as<std::string>(),
                        .where = items.at(3).as<std::string>(),
                        .part = items.at(1).as<std::string>()}};
}

}  // namespace

std::vector<Meeting> meetings(std::size_t member, std::size_t members) {
  const auto rounds = std::bit_floor(members);
  const auto pairs = members - rounds;  // of the first ones, of which the second goes for both
  const bool is_paired = member < 2 * pairs;
  if (is_paired && member % 2 == 0) {
    return {{.with = member + 1, .takes = false}, {.with = member + 1, .gives = false, .ends = true}};
  }
  const auto place = [&](std::size_t turn) { return turn < pairs ? 2 * turn + 1 : turn + pairs; };
  const auto turn = is_paired ? member / 2 : member - pairs;
  std::vector<Meeting> all;
  if (is_paired) all.push_back({.with = member - 1, .gives = false});
  for (std::size_t bit = 1; bit < rounds; bit *= 2) all.push_back({.with = place(turn ^ bit)});
  if (is_paired) all.push_back({.with = member - 1, .takes = false});
  return all;
}

Given merge(Given low, Given high, const Merge& merge) {
  Given both;
  both.error = low.error.empty() ? std::move(high.error) : std::move(low.error);
  const bool differs = low.first && high.first && low.first->call.part != high.first->call.part;
  both.other = low.other ? low.other : differs ? high.first : high.other;
  both.first = low.first ? std::move(low.first) : std::move(high.first);
  if (both.error.empty() && !both.other) both.value = merge(std::move(low.value), std::move(high.value));
  return both;
}

Value to_value(const Given& given) {
  return Tuple{{given.error, to_value(given.first), to_value(given.other), given.value}};
}

Given to_given(const Value& value) {
  const auto& items = value.as<Tuple>().items;
  return {items.at(0).as<std::string>(), to_caller(items.at(1)), to_caller(items.at(2)), items.at(3)};
}

}  // namespace lamina::messaging
