// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/crc32.h"

#include <libdeflate.h>

namespace lamina::foreign {

void Crc32::add(std::span<const std::byte> bytes) {
  if (!bytes.empty()) value_ = libdeflate_crc32(value_, bytes.data(), bytes.size());
}

}  // namespace lamina::foreign
