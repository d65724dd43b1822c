// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/agreement.h"

#include <sstream>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/messaging/agreement.h"

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

Value agree(const Statement& statement, std::span<const base::Rank> world, messaging::Mailbox& mailbox,
            const base::Patience& patience) {
  const auto digest = static_cast<std::int64_t>(base::hash64(statement.description));
  const auto led = messaging::hear_first(mailbox, world, digest, Tuple{{statement.error, statement.word}}, patience);
  const auto& said = led.word.as<Tuple>().items;
  const auto& error = said.at(0).as<std::string>();
  if (!error.empty()) throw base::ConfigError(error);
  if (!led.are_alike) throw_different(mailbox.all_gather(world, statement.description, patience), world);
  return said.at(1);
}

}  // namespace lamina::model
