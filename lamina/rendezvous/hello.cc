// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/hello.h"

#include <torch/version.h>

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/config/config.h"
#include "lamina/value/bytes.h"

namespace lamina::rendezvous {
namespace {

constexpr std::string Hello::* kFields[] = {
    &Hello::lamina,           &Hello::torch, &Hello::wire,   &Hello::configuration,
    &Hello::liveness_address, &Hello::place, &Hello::secret, &Hello::signature};

// The part of `text` around the first place where it differs from `other`.
std::string around_difference(const std::string& text, const std::string& other) {
  constexpr std::size_t kBefore = 40, kShown = 120;
  const auto at = static_cast<std::size_t>(std::mismatch(text.begin(), text.end(), other.begin(), other.end()).first -
                                           text.begin());
  const std::size_t begin = at > kBefore ? at - kBefore : 0;
  return base::str(begin > 0 ? "..." : "", text.substr(begin, kShown), begin + kShown < text.size() ? "..." : "");
}

std::string both_values(const std::string& ours, const std::string& theirs, std::size_t rank) {
  return base::str("\n  rank 0: ", around_difference(ours, theirs), "\n  rank ", rank, ": ",
                   around_difference(theirs, ours));
}

// The keys in which two texts that are configurations differ.
std::string differing_keys(const std::string& ours, const std::string& theirs, std::size_t rank) {
  try {
    const auto read = [](const std::string& json) { return config::parse_config({json, std::nullopt, true}).config; };
    return base::str("\n  rank 0 and rank ", rank, ": ", config::differences(read(ours), read(theirs)));
  } catch (const base::ConfigError&) {
    return both_values(ours, theirs, rank);
  }
}

}  // namespace

Hello Hello::of_this_version() {
  Hello hello;
  hello.lamina = LAMINA_VERSION;
  hello.torch = TORCH_VERSION;
  return hello;
}

contact::Mac Hello::proof(const contact::Secret& key, std::string_view join, base::Rank rank) const {
  Hello unsigned_hello = *this;
  unsigned_hello.signature.clear();
  return contact::authenticate(key, "hello", {join, std::to_string(rank.value), unsigned_hello.encode()});
}

void Hello::sign(const contact::Secret& key, std::string_view join, base::Rank rank) {
  const contact::Mac mac = proof(key, join, rank);
  signature.assign(mac.begin(), mac.end());
}

bool Hello::signed_by(const contact::Secret& key, std::string_view join, base::Rank rank) const {
  contact::Mac given{};
  if (signature.size() != given.size()) return false;
  std::copy(signature.begin(), signature.end(), given.begin());
  return contact::same(given, proof(key, join, rank));
}

std::string Hello::encode() const {
  value::Writer out;
  for (const auto field : kFields) out.put_block(this->*field);
  return out.take();
}

Hello Hello::decode(const std::string& bytes) {
  Hello hello;
  value::Reader in(bytes);
  try {
    for (const auto field : kFields) {
      hello.*field = in.get_block();
      if (field == &Hello::lamina && hello.lamina != LAMINA_VERSION) break;
    }
  } catch (const base::FormatError&) {
    throw base::FormatError("the store holds a malformed greeting", base::Code{"start-store-foreign"});
  }
  return hello;
}

void check_compatible(const std::vector<Hello>& hellos) {
  struct Aspect {
    std::string Hello::* field;
    const char* name;
  };
  constexpr Aspect kAspects[] = {{&Hello::lamina, "version of lamina"},
                                 {&Hello::torch, "version of torch"},
                                 {&Hello::wire, "version of the format of messages"},
                                 {&Hello::configuration, "configuration"}};
  for (std::size_t rank = 1; rank < hellos.size(); ++rank) {
    for (const auto& [field, name] : kAspects) {
      const std::string& ours = hellos[0].*field;
      const std::string& theirs = hellos[rank].*field;
      if (ours == theirs) continue;
      const bool keys = field == &Hello::configuration;
      throw base::ConfigError(
          base::str("ranks 0 and ", rank, " differ in their ", name, "; it must be the same on all.",
                    keys ? differing_keys(ours, theirs, rank) : both_values(ours, theirs, rank)),
          base::Code{"start-ranks-differ"});
    }
  }
}

}  // namespace lamina::rendezvous
