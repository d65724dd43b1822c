// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/hello.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/config.h"
#include "lamina/base/error.h"

namespace lamina::transport {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// What three ranks are told when `change` is what the last one says of itself.
template <class Change>
std::string refusal(const Change& change) {
  std::vector<Hello> hellos(3, Hello::of_this_version());
  for (Hello& hello : hellos) hello.configuration = base::to_json({});
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
    base::Config config;
    config.microbatches = 8;
    config.ddp = true;
    hello.configuration = base::to_json(config);
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

}  // namespace
}  // namespace lamina::transport
