// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/autocast.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "lamina/base/error.h"

namespace lamina::runtime {
namespace {

namespace autocast = at::autocast;

std::string half_on_cpu() {
  const auto dtype = autocast::get_autocast_dtype(at::kCPU);
  autocast::set_autocast_enabled(at::kCPU, true);
  autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  const auto captured = capture_autocast();
  autocast::set_autocast_enabled(at::kCPU, false);
  autocast::set_autocast_dtype(at::kCPU, dtype);
  return captured;
}

TEST(Autocast, IsAsCapturedAndAfterwardsAsBefore) {
  const auto before = capture_autocast();
  const auto dtype = autocast::get_autocast_dtype(at::kCPU);
  const auto captured = half_on_cpu();
  const auto work = [&] {
    EXPECT_EQ(capture_autocast(), captured);
    run_with_autocast(before, [&] { EXPECT_FALSE(autocast::is_autocast_enabled(at::kCPU)); });
    throw std::runtime_error("of the work");
  };
  EXPECT_THROW(run_with_autocast(captured, work), std::runtime_error);
  EXPECT_EQ(capture_autocast(), before);
  EXPECT_EQ(autocast::get_autocast_dtype(at::kCPU), dtype);
}

TEST(Autocast, OfAnyOtherShapeIsMalformed) {
  const auto captured = half_on_cpu();
  const auto nothing = [] { ADD_FAILURE(); };
  EXPECT_THROW(run_with_autocast("", nothing), base::FormatError);
  EXPECT_THROW(run_with_autocast(captured + "x", nothing), base::FormatError);
  EXPECT_THROW(run_with_autocast("\x7e" + captured.substr(1), nothing), base::FormatError);
}

}  // namespace
}  // namespace lamina::runtime
