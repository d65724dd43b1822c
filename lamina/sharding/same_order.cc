// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/same_order.h"

#include <sstream>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::sharding {
namespace {

constexpr int kMostNames = 3;  // in a message

base::Rank neighbour(const std::vector<base::Rank>& members, int member, int step) {
  const auto size = static_cast<int>(members.size());
  return members.at(static_cast<std::size_t>((member + step + size) % size));
}

}  // namespace

SameOrder::SameOrder(messaging::Mailbox& mailbox, std::vector<base::Rank> members, int member,
                     std::vector<std::string> names)
    : mailbox_(mailbox),
      self_(neighbour(members, member, 0)),
      next_(neighbour(members, member, 1)),
      previous_(neighbour(members, member, -1)),
      names_(std::move(names)),
      channel_(messaging::group_channel("shards", members)) {}

std::int64_t SameOrder::begin(const std::string& what, std::span<const std::size_t> parameters) {
  auto word = what;
  for (const auto parameter : parameters) word += base::str(" ", parameter);
  mailbox_.send(next_, channel_, word);
  unchecked_.push_back(std::move(word));
  return ++begun_;
}

void SameOrder::check(std::int64_t number, const base::Patience& patience) {
  while (checked_ < number) {
    const auto other = mailbox_.receive(previous_, channel_, patience).as<std::string>();
    const auto own = std::move(unchecked_.front());
    unchecked_.pop_front();
    ++checked_;
    if (other == own) continue;
    throw base::DesyncError(
        base::str("rank ", self_, " wants the ", in_words(own), ", rank ", previous_, " the ", in_words(other),
                  ": ranks of a sharding group that share no memory call the same modules in the same order"),
        base::Code{"shard-order"});
  }
}

std::string SameOrder::in_words(const std::string& word) const {
  std::istringstream in(word);
  std::string text;
  in >> text;
  int count = 0;
  for (std::size_t parameter = 0; in >> parameter; ++count) {
    if (count < kMostNames) text += base::str(count == 0 ? " of " : ", ", names_.at(parameter));
  }
  return count <= kMostNames ? text : base::str(text, " and ", count - kMostNames, " more");
}

}  // namespace lamina::sharding
