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
  message.target = base::ModuleId(5);
  message.caller = base::Rank(6);
  message.deliveries = {{7, base::Rank(8), {base::Rank(9), base::Step(10), base::Microbatch(11), 12}}, {}};
  message.released = {{message.call, true}, {{}, false}};
  message.expected = 0xfedcba9876543210;
  message.after = 7;
  message.done = false;
  message.channel = std::string("a\0channel", 9);
  message.state = std::string("\xff\0state", 7);
  message.body = value::List{{at::arange(10), "text", at::arange(3, at::kDouble)}};
  return message;
}

}  // namespace lamina::transport::testing
