// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/secret.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace lamina::rendezvous {
namespace {

void sign_and_digest() {
  authenticate(Secret{}, "test", {"a field"});
  digest("bytes");
}

// A C++ program that ends without shutdown() signs its last message in such a handler.
TEST(SecretDeathTest, ExitHandlersThatWereThereBeforeTheFirstSignatureCanSign) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that has signed nothing yet
  const auto end = [](auto first_use) {
    std::atexit(sign_and_digest);
    first_use();
    std::exit(7);
  };
  EXPECT_EXIT(end([] { Signer{Secret{}}; }), ::testing::ExitedWithCode(7), "");
  EXPECT_EXIT(end([] { digest("bytes"); }), ::testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace lamina::rendezvous
