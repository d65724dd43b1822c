// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/transport/message.h"

// [Note: pieces] A frame travels as one active message that holds its head and its small buffers, the packet, and one
// more for each large buffer. Where the receiver can read the sender's memory, the packet ends with the addresses of
// the large buffers instead, and the receiver answers with a receipt (see [Note: offers]). Every piece begins with a
// PieceHeader. Pieces may arrive in any order; messages are delivered in the order of their sequence numbers, per
// sender.
namespace lamina::transport::ucx {

struct PieceHeader {
  std::uint32_t magic = 0x58434C4C;  // "LLCX"
  std::uint32_t from = 0;
  std::uint64_t sequence = 0;   // counts the messages of this pair
  std::uint64_t head_size = 0;  // packet: how much of it is the head
  std::uint32_t piece = 0;      // 0: the packet; k: buffer k-1 of the frame
  std::uint16_t offers = 0;     // packet: 1 when it ends with addresses
  std::uint16_t failed = 0;     // receipt: 1 when the memory could not be read
  Token token{};
};
static_assert(sizeof(PieceHeader) == 48);

constexpr unsigned kPiece = 1;                                  // our ids of UCX active messages
constexpr unsigned kReceipt = 2;                                // `sequence` and `failed`; no data
constexpr std::uint64_t kMaxHeadSize = std::uint64_t(1) << 28;  // 256 MiB: what is not a tensor travels in the head
constexpr std::int64_t kSmallBuffer = 8 << 10;    // copying this much costs less than a message of its own
constexpr std::int64_t kSmallBuffers = 32 << 10;  // all small buffers of one packet

// Decides which buffers travel in the packet: asked for each buffer in order, it answers alike on both sides.
class PacketPlan {
 public:
  bool takes(at::Device device, std::int64_t size_bytes) {
    if (!device.is_cpu() || size_bytes > kSmallBuffer || taken_ + size_bytes > kSmallBuffers) return false;
    taken_ += size_bytes;
    return true;
  }
  std::int64_t taken() const { return taken_; }

 private:
  std::int64_t taken_ = 0;
};

}  // namespace lamina::transport::ucx
