// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/wait_report.h"

#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"

namespace lamina::messaging {
namespace {

using value::List;
using value::Tuple;
using value::Value;

Value to_value(const WaitOperation& operation) {
  return Tuple{{static_cast<std::int64_t>(operation.kind), operation.key, operation.number}};
}

WaitOperation to_operation(const Value& value) {
  const auto& items = value.as<Tuple>().items;
  return {static_cast<WaitKind>(items.at(0).as<std::int64_t>()), items.at(1).as<std::string>(),
          items.at(2).as<std::int64_t>()};
}

Value to_value(const std::vector<base::Rank>& ranks) {
  List list;
  for (const auto rank : ranks) list.items.emplace_back(rank.value);
  return list;
}

std::vector<base::Rank> to_ranks(const Value& value) {
  std::vector<base::Rank> ranks;
  for (const auto& item : value.as<List>().items) ranks.emplace_back(item.as<std::int64_t>());
  return ranks;
}

}  // namespace

Value to_value(const WaitReport& report) {
  return Tuple{{report.rank.value, report.serial, to_value(report.operation), report.attempt,
                report.around ? to_value(*report.around) : Value(), report.words}};
}

Value to_value(const WaitPath& path) {
  List list;
  for (const auto& report : path) list.items.push_back(to_value(report));
  return list;
}

Value to_value(const WaitAnswer& answer) {
  return Tuple{{answer.serial, static_cast<std::int64_t>(answer.place), to_value(answer.awaited.absent),
                to_value(answer.awaited.last)}};
}

WaitReport to_wait_report(const Value& value) {
  const auto& items = value.as<Tuple>().items;
  WaitReport report{base::Rank(items.at(0).as<std::int64_t>()),
                    items.at(1).as<std::int64_t>(),
                    to_operation(items.at(2)),
                    items.at(3).as<std::int64_t>(),
                    std::nullopt,
                    items.at(5).as<std::string>()};
  if (items.at(4).get_if<value::None>() == nullptr) report.around = to_operation(items.at(4));
  return report;
}

WaitPath to_wait_path(const Value& value) {
  WaitPath path;
  for (const auto& item : value.as<List>().items) path.push_back(to_wait_report(item));
  return path;
}

WaitAnswer to_wait_answer(const Value& value) {
  const auto& items = value.as<Tuple>().items;
  return {items.at(0).as<std::int64_t>(),
          static_cast<WaitAnswer::Place>(items.at(1).as<std::int64_t>()),
          {to_ranks(items.at(2)), to_ranks(items.at(3))}};
}

std::string text_of(const WaitPath& circle) {
  std::string words;
  for (const auto& told : circle) words += base::str(words.empty() ? "" : "; ", told.words);
  return base::str("ranks wait for each other: ", words,
                   ". Make these calls on all of these ranks, in the same order: not on one alone, as under "
                   "`if rank() == 0`",
                   "; ", faces::said("as-many-calls"));
}

std::string beyond(const Awaited& awaited) {
  if (awaited.last.empty() || awaited.last == awaited.absent) return "";
  return base::str("; ", base::name_ranks(awaited.absent), awaited.absent.size() == 1 ? " waits" : " wait",
                   " for what comes from ", base::name_ranks(awaited.last));
}

}  // namespace lamina::messaging
