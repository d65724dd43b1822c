// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lamina::foreign {

// The CRC-32 of zip archives (ISO 3309, polynomial 0xedb88320), of bytes that come in parts.
class Crc32 {
 public:
  void add(std::span<const std::byte> bytes);
  std::uint32_t value() const { return value_; }

 private:
  std::uint32_t value_ = 0;
};

}  // namespace lamina::foreign
