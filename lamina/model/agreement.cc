// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/agreement.h"

#include <algorithm>
#include <sstream>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"

namespace lamina::model {
namespace {

using value::Tuple;
using value::Value;

// The first line of `other` that is not as in `first`; "" where there is none.
std::string difference(const std::string& first, const std::string& other) {
  std::istringstream expected(first), found(other);
  std::string a, b;
  while (true) {
    const bool more = static_cast<bool>(std::getline(expected, a));
    const bool more_found = static_cast<bool>(std::getline(found, b));
    if (!more && !more_found) return "";
    if (a != b || more != more_found) {
      return base::str(more_found ? b : "nothing", " instead of ", more ? a : "nothing");
    }
  }
}

// The first rank that differs is named.
[[noreturn]] void throw_different(const std::vector<Value>& descriptions, std::span<const base::Rank> world) {
  const auto& first = descriptions.front().as<std::string>();
  std::string text;
  for (std::size_t i = descriptions.size(); i-- > 1;) {
    const auto found = difference(first, descriptions[i].as<std::string>());
    if (!found.empty()) text = base::str("rank ", world[i], " built another model than rank ", world[0], ": ", found);
  }
  throw base::UsageError(text, base::Code{"model-ranks-differ"});
}

}  // namespace

std::vector<Value> agree(const Statement& statement, std::span<const base::Rank> world, messaging::Mailbox& mailbox,
                         const base::Patience& patience) {
  const auto digest = static_cast<std::int64_t>(base::hash64(statement.description));
  const auto said = mailbox.all_gather(world, Tuple{{digest, statement.error, statement.word}}, patience);
  const auto part = [](const Value& of_rank, std::size_t i) -> const Value& { return of_rank.as<Tuple>().items.at(i); };
  const auto& error = part(said.front(), 1).as<std::string>();
  if (!error.empty()) throw base::ConfigError(error);
  const auto first = part(said.front(), 0).as<std::int64_t>();
  if (std::ranges::any_of(said, [&](const Value& one) { return part(one, 0).as<std::int64_t>() != first; })) {
    throw_different(mailbox.all_gather(world, statement.description, patience), world);
  }
  std::vector<Value> words;
  for (const auto& one : said) words.push_back(part(one, 2));
  return words;
}

}  // namespace lamina::model
