// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/arange.h>

#include "lamina/transport/message.h"

namespace lamina::transport::testing {

// A message with something in every field.
inline Message sample() {
  Message message;
  message.kind = "backward";
  message.call = {base::Rank(1), base::Step(-2), base::Microbatch(3), 4};
  message.fields = std::string("\xff\0fields", 8);
  message.body = value::List{{at::arange(10), "text", at::arange(3, at::kDouble)}};
  return message;
}

}  // namespace lamina::transport::testing
