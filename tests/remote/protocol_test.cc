// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/protocol.h"

#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "lamina/runtime/ambient.h"

namespace lamina::remote {
namespace {

TEST(Requests, ArriveAsTheyWere) {
  const auto got = to_backward_request(to_value(BackwardRequest{7, {true, false}, {{at::Tensor(), at::Tensor()}}}));
  EXPECT_EQ(got.forward, 7);
  EXPECT_TRUE(got.options.keep_graph);
  EXPECT_FALSE(got.options.accumulate);
  EXPECT_EQ(got.gradients.items.size(), 2);
  for (const CallState& state : {CallState{"modes", {1ull << 63, 7}, std::string("\0face", 5)}, CallState{}}) {
    EXPECT_TRUE(split_state(join_state(state)) == state);
  }
}

TEST(Requests, OfAnyOtherShapeAreMalformed) {
  using value::List;
  using value::Tuple;
  using value::Value;
  const Value number = std::int64_t{1};
  for (const Value& wrong :
       {Value(), Value(List{}), Value(Tuple{{number, true}}), Value(Tuple{{number, number, true, List{}}}),
        Value(Tuple{{number, true, true, number}})}) {
    EXPECT_THROW(to_backward_request(wrong), base::FormatError);
  }
  const auto whole = join_state({"modes", {7}, "face"});
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(split_state(std::string_view(whole).substr(0, size)), base::FormatError);
  }
  EXPECT_THROW(split_state(whole + "x"), base::FormatError);
  EXPECT_THROW(runtime::run_with_modes("1", [] {}), base::FormatError);
}

}  // namespace
}  // namespace lamina::remote
