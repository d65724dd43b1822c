// SPDX-License-Identifier: Apache-2.0
#include "lamina/membership/epoch_word.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "lamina/base/error.h"

namespace lamina::membership {
namespace {

using nlohmann::json;

template <class Members>
json to_json(const Members& members) {
  auto list = json::array();
  for (const auto member : members) list.push_back(member.value);
  return list;
}

template <class Members>
Members to_members(const json& list) {
  Members members;
  for (const auto& each : list) members.insert(members.end(), MemberId(each.get<std::int64_t>()));
  return members;
}

json to_json(const Ballot& ballot) { return {ballot.round, ballot.by.value}; }

Ballot to_ballot(const json& list) {
  return {list.at(0).get<std::int64_t>(), MemberId(list.at(1).get<std::int64_t>())};
}

}  // namespace

std::string EpochWord::to_text() const {
  auto follows = json::array();
  if (next) follows = {next->number, to_json(next->members), next->with_witness, next->is_over};
  return json{static_cast<int>(kind), epoch, to_json(ballot), to_json(accepted), follows, to_json(lost)}.dump();
}

EpochWord EpochWord::read(const std::string& text) {
  try {
    const auto told = json::parse(text);
    const auto kind = told.at(0).get<int>();
    if (kind < 0 || kind > static_cast<int>(Kind::kGivesUp)) throw base::FormatError("no such word about an epoch");
    EpochWord word{.kind = static_cast<Kind>(kind),
                   .epoch = told.at(1).get<std::int64_t>(),
                   .ballot = to_ballot(told.at(2)),
                   .accepted = to_ballot(told.at(3))};
    if (const auto& next = told.at(4); !next.empty()) {
      word.next = Epoch{next.at(0).get<std::int64_t>(), to_members<std::vector<MemberId>>(next.at(1)),
                        next.at(2).get<std::size_t>(), next.at(3).get<bool>()};
    }
    word.lost = to_members<std::set<MemberId>>(told.at(5));
    return word;
  } catch (const json::exception&) {
    throw base::FormatError("a word about an epoch cannot be read");
  }
}

EpochWord Acceptor::answer(const EpochWord& word) {
  using enum EpochWord::Kind;
  if (word.ballot < promised_) return {.kind = kRefuses, .epoch = word.epoch, .ballot = promised_};
  promised_ = word.ballot;
  if (word.kind == kAsks) {
    return {.kind = kPromises, .epoch = word.epoch, .ballot = word.ballot, .accepted = accepted_in_, .next = accepted_};
  }
  accepted_in_ = word.ballot;
  accepted_ = word.next;
  return {.kind = kAccepts, .epoch = word.epoch, .ballot = word.ballot};
}

}  // namespace lamina::membership
