// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/hello.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "lamina/config/config.h"

namespace lamina::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Returns what three ranks are told when `change` is what the last one says of itself.
template <class Change>
std::string refusal(const Change& change) {
  std::vector<Hello> hellos(3, Hello::of_this_version());
  for (Hello& hello : hellos) hello.configuration = config::to_json({});
  change(hellos[2]);
  for (Hello& hello : hellos) hello = Hello::decode(hello.encode());
  try {
    check_compatible(hellos);
  } catch (const base::ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Hello, AlikeRanksWorkTogether) {
  EXPECT_EQ(refusal([](Hello&) {}), "");
}

TEST(Hello, OtherVersionsAreNamedWithBothValues) {
  EXPECT_THAT(refusal([](Hello& hello) { hello.lamina = "0.0.1"; }),
              AllOf(HasSubstr("ranks 0 and 2 differ in their version of lamina"),
                    HasSubstr("rank 0: " + Hello::of_this_version().lamina), HasSubstr("rank 2: 0.0.1")));
  EXPECT_THAT(refusal([](Hello& hello) { hello.torch = "1.2.3"; }),
              AllOf(HasSubstr("differ in their version of torch"), HasSubstr("rank 2: 1.2.3")));
  EXPECT_THAT(refusal([](Hello& hello) { hello.wire = "99"; }),
              AllOf(HasSubstr("differ in their version of the format of messages"), HasSubstr("rank 2: 99")));
}

TEST(Hello, EveryKeyThatDiffersIsNamedWithBothValues) {
  const auto text = refusal([](Hello& hello) {
    config::Config config;
    config.microbatches = 8;
    config.ddp = true;
    hello.configuration = config::to_json(config);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("ranks 0 and 2 differ in their configuration"), HasSubstr("microbatches: 1 and 8"),
                          HasSubstr("ddp: false and true")));
}

TEST(Hello, OfAnotherVersionOnlyItsBeginningIsRead) {
  Hello other = Hello::of_this_version();
  other.lamina = "0.0.1";
  const std::string whole = other.encode();
  const std::string beginning = whole.substr(0, 8 + other.lamina.size());
  EXPECT_EQ(Hello::decode(beginning + "what nobody here can know").lamina, "0.0.1");
}

TEST(Hello, EveryTruncationIsMalformed) {
  const std::string whole = Hello::of_this_version().encode();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(Hello::decode(whole.substr(0, size)), base::FormatError) << size;
  }
}

TEST(Hello, IsSignedAsAWholeForOneSecretJoinAndRank) {
  contact::Secret secret{1}, other_secret{2};
  Hello hello = Hello::of_this_version();
  hello.configuration = "c";
  hello.liveness_address = "10.0.0.1 4711";
  hello.place = "here";
  EXPECT_FALSE(hello.signed_by(secret, "join", base::Rank(1)));
  hello.sign(secret, "join", base::Rank(1));
  hello = Hello::decode(hello.encode());
  EXPECT_TRUE(hello.signed_by(secret, "join", base::Rank(1)));
  EXPECT_FALSE(hello.signed_by(other_secret, "join", base::Rank(1)));
  EXPECT_FALSE(hello.signed_by(secret, "another join", base::Rank(1)));
  EXPECT_FALSE(hello.signed_by(secret, "join", base::Rank(0)));
  for (const auto field : {&Hello::lamina, &Hello::torch, &Hello::wire, &Hello::configuration, &Hello::liveness_address,
                           &Hello::place, &Hello::secret, &Hello::signature}) {
    for (const char* change : {"x", ""}) {
      Hello changed = hello;
      changed.*field = change == std::string() ? std::string() : changed.*field + change;
      if (changed.*field == hello.*field) continue;
      EXPECT_FALSE(changed.signed_by(secret, "join", base::Rank(1)));
    }
  }
}

}  // namespace
}  // namespace lamina::rendezvous
