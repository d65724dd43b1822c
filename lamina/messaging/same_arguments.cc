// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/same_arguments.h"

#include <algorithm>
#include <utility>

#include "lamina/base/hash.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/messaging/agreement.h"

namespace lamina::messaging {
namespace {

// Lists the ranks by their value of `name`; "" where all have the same.
std::string differing(const std::string& name, std::span<const base::Rank> members,
                      const std::vector<std::string>& values) {
  std::vector<std::pair<std::string, std::vector<base::Rank>>> given;  // by value, in the order of the first ranks
  for (std::size_t member = 0; member < members.size(); ++member) {
    auto found = std::ranges::find(given, values[member], [](const auto& each) { return each.first; });
    if (found == given.end()) found = given.insert(given.end(), {values[member], {}});
    found->second.push_back(members[member]);
  }
  std::string text;
  for (std::size_t i = 0; given.size() > 1 && i < given.size(); ++i) {
    const auto begin = i == 0 ? base::str(name, " is ") : i + 1 == given.size() ? " and " : ", ";
    text += base::str(begin, given[i].first, " on ", base::name_ranks(given[i].second));
  }
  return text;
}

}  // namespace

std::string differing_arguments(Mailbox& mailbox, std::span<const base::Rank> members, const std::string& call,
                                const std::vector<Argument>& arguments, const base::Patience& patience) {
  if (members.size() == 1) return "";
  value::Tuple own{{call}};
  for (const auto& argument : arguments) own.items.emplace_back(argument.value);
  std::string text;
  for (const auto& item : own.items) text += base::str(item.as<std::string>().size(), ":", item.as<std::string>());
  if (are_alike(mailbox, members, static_cast<std::int64_t>(base::hash64(std::string_view(text))), patience)) return "";
  const auto all = mailbox.all_gather(members, std::move(own), patience);
  const auto at = [&](std::size_t place) {
    std::vector<std::string> values;
    for (const auto& each : all) values.push_back(each.as<value::Tuple>().items.at(place).as<std::string>());
    return values;
  };
  auto differences = differing("the call", members, at(0));
  if (!differences.empty()) return base::str("ranks make different calls: ", differences);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto text = differing(arguments[i].name, members, at(i + 1));
    if (!text.empty()) differences += base::str(differences.empty() ? "" : "; ", text);
  }
  if (differences.empty()) return "";
  return base::str("ranks have given different arguments: ", differences,
                   ". All of them make one call: give the same on each");
}

}  // namespace lamina::messaging
