// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace lamina::transport::ucx {

// [Note: offers] A large buffer for a rank of the same machine is not sent: its address is, and the receiver copies it
// straight out of the sender's memory (process_vm_readv), the way UCX itself would. We do it because UCX aborts the
// receiving process when the sender dies under the copy, where we get an error and go on.
//
// The memory of another process, as far as the system lets us read it.
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

}  // namespace lamina::transport::ucx
