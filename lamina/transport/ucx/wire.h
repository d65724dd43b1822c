// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lamina/contact/secret.h"
#include "lamina/transport/message.h"

// [Note: pieces] A frame travels as one active message that holds its head and its small buffers, the packet, and one
// more for each large buffer. Where the receiver can read the sender's memory, the addresses of the large buffers
// follow the head instead, and the receiver answers with a receipt (see [Note: offers]). A large buffer that goes from
// device to device is a piece all the same; the numbers of such buffers follow the addresses. Every piece begins with a
// PieceHeader. Pieces may arrive in any order; messages are delivered in the order of their sequence numbers, per
// sender.
//
// A header is signed with the key of its direction, which is the connection's own ([Note: handshake]), and holds its
// message's number and the digest of the head and what follows it. So before a piece's signature is checked, nothing of
// it is stored or answered. Nothing of a head is decoded, and no address read, before the digest is checked. A piece
// that comes twice counts once. Only the bytes of tensors are not covered.
//
// What is put ([Note: puts]) is one active message, whose header is followed by the parcel's name and meaning. The
// receiver answers when the bytes are in their place, or with what it has posted instead.
namespace lamina::transport::ucx {

constexpr int kPieceVersion =
    2;  // of these, and of what ranks tell with their addresses: the same on all ranks of a job

constexpr unsigned kPiece = 1;     // our ids of UCX active messages
constexpr unsigned kReceipt = 2;   // `sequence` and `answer`; no data
constexpr unsigned kPut = 3;       // the bytes
constexpr unsigned kEndOfPut = 4;  // as kReceipt, followed by the meaning of what was posted where the two differ

// kFailed: the memory could not be read, or what was posted was given up.
enum class PutOutcome : std::uint32_t { kNone, kTaken, kFailed, kDiffers };

struct PieceHeader {
  std::uint32_t magic = 0x32434C4C;  // "LLC2"
  std::uint32_t from = 0;
  std::uint64_t sequence = 0;   // counts the messages of this pair, or its puts
  std::uint64_t head_size = 0;  // packet: how much of it is the head; of a put and its end: how much is put, or posted
  std::uint32_t piece = 0;      // 0: the packet; k: buffer k-1 of the frame; of a put: the letters of its name
  std::uint32_t offers = 0;     // packet: how many addresses follow the head
  std::uint32_t lent = 0;       // packet: how many numbers of lent buffers follow those
  std::uint32_t zero = 0;
  PutOutcome answer = PutOutcome::kNone;  // of a receipt
  std::uint32_t id = kPiece;              // the active message that it heads
  // packet: of the head, the addresses and the numbers; of a put and its end: of what follows it
  contact::Digest digest{};
  contact::Mac proof{};

  void sign(contact::Signer& key) { proof = key.sign(covered()); }
  bool signed_by(contact::Signer& key) const { return contact::same(proof, key.sign(covered())); }

 private:
  std::string_view covered() const { return {reinterpret_cast<const char*>(this), offsetof(PieceHeader, proof)}; }
};
static_assert(sizeof(PieceHeader) == 112);

constexpr std::uint64_t kMaxHeadSize = std::uint64_t(1) << 28;  // 256 MiB: what is not a tensor travels in the head
constexpr std::int64_t kSmallBuffer = 8 << 10;    // copying this much costs less than a message of its own
constexpr std::size_t kSmallPut = 64 << 10;       // as much goes at once: asking first takes a way there and back
constexpr std::int64_t kSmallBuffers = 32 << 10;  // all small buffers of one packet

// Decides which buffers travel in the packet: asked for each buffer in order, it answers alike on both sides.
class PacketPlan {
 public:
  bool takes(std::int64_t size_bytes) {
    if (size_bytes > kSmallBuffer || taken_ + size_bytes > kSmallBuffers) return false;
    taken_ += size_bytes;
    return true;
  }
  std::int64_t taken() const { return taken_; }

 private:
  std::int64_t taken_ = 0;
};

}  // namespace lamina::transport::ucx
