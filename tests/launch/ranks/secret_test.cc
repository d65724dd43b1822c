// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/secret.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <string>

namespace lamina::launch {
namespace {

std::string drain(const base::Fd& file) {
  std::string bytes(2 * Secret::kBytes, '\0');
  bytes.resize(std::max<ssize_t>(0, ::read(file.get(), bytes.data(), bytes.size())));
  return bytes;
}

TEST(Secret, EveryCopyHoldsThe32BytesFromItsOwnOffset0) {
  const Secret secret;
  const base::Fd one = secret.copy(), two = secret.copy();
  const std::string bytes = drain(one);
  EXPECT_EQ(bytes.size(), Secret::kBytes);
  EXPECT_EQ(drain(two), bytes);
}

TEST(Secret, EveryJobHasItsOwn) { EXPECT_NE(drain(Secret().copy()), drain(Secret().copy())); }

TEST(Secret, CopiesAreClosedOnExecAndCannotBeChanged) {
  const base::Fd copy = Secret().copy();
  EXPECT_EQ(::fcntl(copy.get(), F_GETFD), FD_CLOEXEC);
  EXPECT_LT(::write(copy.get(), "x", 1), 0);
}

}  // namespace
}  // namespace lamina::launch
