// SPDX-License-Identifier: Apache-2.0
#include "lamina/contact/secret.h"

#include <gtest/gtest.h>

#include <numeric>
#include <span>
#include <string>

namespace lamina::contact {
namespace {

std::string hex(std::span<const std::uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const auto byte : bytes) (text += kDigits[byte >> 4]) += kDigits[byte & 15];
  return text;
}

// The values are those of Python's hmac and hashlib.
TEST(SecretTest, SignaturesAndDigestsAreThoseOfOtherLibraries) {
  Secret key;
  std::iota(key.begin(), key.end(), std::uint8_t{0});
  const Signer signer(key);
  const std::string zeros(200, '\0');
  EXPECT_EQ(hex(signer.sign("what do ya want for nothing?")),
            "099805f4ac310786968565c098db515cc50862b420ae31e20238312344bed36a");
  EXPECT_EQ(hex(signer.sign(zeros)), "4a0d6b4a26615d5b9d66993734f71676838693efebf8bfe9d2d1526d836ad9b4");
  EXPECT_EQ(hex(digest("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace lamina::contact
