// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/value/encoding.h"

namespace lamina::value {

// Returns what another rank gets of `tree`.
inline Value sent(const Value& tree) {
  Encoded encoded = encode(tree);
  for (auto& buffer : encoded.buffers) buffer = buffer.clone();
  return decode(encoded.meta, std::move(encoded.buffers));
}

inline at::Tensor tensor_at(const Value& list, std::size_t index) {
  return list.as<List>().items.at(index).as<at::Tensor>();
}

}  // namespace lamina::value
