// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "lamina/base/error.h"
#include "lamina/base/wait.h"

namespace lamina::transport {

// [Note: puts] Bytes may go straight into memory that the receiver has chosen. It *posts* the memory for one sender,
// and the sender *puts* as many bytes there; both go on at once, and each has a Transfer to wait for. Which comes first
// is no matter: a put whose post has not come waits at its sender if it is large, else it is kept. Neither needs a
// thread of the program on the other side, so there is no order in which ranks could wait for each other.
//
// The two find each other by the name, which a pair of ranks uses once for each direction. Where they differ in size or
// meaning both end with base::DesyncError, and nothing is written.

struct Parcel {
  std::string name;
  std::string meaning;  // of the bytes, such as their type; of name and meaning 1 KiB travel
  at::Tensor memory;    // dense and contiguous, of the CPU; kept until the transfer is over
};

// One end of a put. It is gone before its transport.
class Transfer {
 public:
  // Gives it up where it has not ended. What was posted is not written any more, and its put is refused, unless bytes
  // were on their way: these may still come, or be read, so the memory is kept until they have.
  virtual ~Transfer() = default;

  // True where wait() would return, or throw, at once.
  virtual bool done() = 0;
  // Returns when the bytes lie in the posted memory, on either side. Throws base::PeerError when the other rank is
  // lost, base::DesyncError, base::CancelledError where the receiver has given it up, base::TimeoutError, and what the
  // patience's interrupt throws.
  virtual void wait(const base::Patience& patience) = 0;
};

// One end, as errors show it.
struct ParcelEnd {
  base::Rank rank;
  std::int64_t size_bytes;
  std::string meaning;

  bool fits(const ParcelEnd& other) const { return size_bytes == other.size_bytes && meaning == other.meaning; }
};

// Throws base::InternalError for memory that cannot be posted or put.
void require_dense(const Parcel& parcel);
ParcelEnd end_of(base::Rank rank, const Parcel& parcel);

// Errors of both ends of a put.
base::DesyncError ends_differ(const std::string& name, const ParcelEnd& sender, const ParcelEnd& receiver);
base::CancelledError given_up(const std::string& name, base::Rank by);

}  // namespace lamina::transport
