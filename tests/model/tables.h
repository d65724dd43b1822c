// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/full.h>

#include "lamina/model/parameter_table.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::model {

inline const base::Patience kPatience{std::chrono::seconds(30), nullptr};

// "a", four doubles in partition 0, and "b", a buffer of two by three floats in partition 1, both full of `value`, as
// the rank of partition `here` of three has them.
inline ParameterTable two_rows(double value, int here) {
  std::vector<Parameter> rows;
  rows.push_back(
      whole_in(base::Partition(0), "a", at::full({4}, value, at::kDouble).set_requires_grad(true), false, 1));
  rows.push_back(whole_in(base::Partition(1), "b", at::full({2, 3}, value), true, 1));
  return {std::move(rows), base::Partition(here), 3};
}

}  // namespace lamina::model
