// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace lamina::base {

// The memory of another process of this machine, as far as the system lets us read it (process_vm_readv).
class PeerMemory {
 public:
  // The descriptor that others need to read this process: to be passed to the constructor there.
  static std::string descriptor();
  static constexpr std::size_t kDescriptorSize = 32;

  PeerMemory() = default;
  explicit PeerMemory(const std::string& descriptor);

  // True where reading gives that process's memory: false on another machine, in another container, or without
  // permission.
  bool readable() const;

  // Copies `size` bytes from `address` there. False when that fails, as it does once the process has ended.
  bool read(void* to, std::uint64_t address, std::size_t size) const;

 private:
  std::int32_t process_ = 0;
  std::uint64_t nonce_at_ = 0;
  std::array<std::uint8_t, 16> nonce_{};
};

}  // namespace lamina::base
