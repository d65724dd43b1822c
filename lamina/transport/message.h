// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/value/value.h"

namespace lamina::transport {

// What a message asks of, or tells, the rank it goes to.
enum class Kind : std::uint8_t {
  kForward,    // run module `target` on `body`; answered by kResult or kError
  kBackward,   // run a backward with the gradients in `body`; answered by kResult or kError
  kDeliver,    // send outputs of `call`, as `deliveries` says
  kValues,     // outputs, or the Failure that came instead, under the names of `deliveries`
  kResult,     // the answer to `call`
  kError,      // the answer to `call`: it raised; `body` is a Failure
  kEndOfStep,  // step `call.step` ended; `body` holds its outputs, or the Failure that ended it
  kObject,     // an object for the mailbox named `channel`
  kNewStep,    // the leading rank begins step `call.step`, as `body` says; from another one: why it refuses that step
  kWait,       // in what the sender waits for this rank: messaging/mutual_waits.h
};
constexpr Kind kLastKind = Kind::kWait;

// [Note: deliveries] A value goes from the rank that made it to each rank that needs it, straight and under a name of
// its own, which whoever issued the call gives it: the maker is told to send output `output` to rank `to` as `name`,
// the reader waits for that name. A name is used once, so nobody has to be told when a value may be forgotten.
struct Delivery {
  std::int64_t output = 0;
  base::Rank to;
  base::CallId name;
  friend bool operator==(const Delivery&, const Delivery&) = default;
};

// That nobody will ask for the outputs of a call any more, or that its backward will not be run.
struct Release {
  base::CallId call;
  bool graph = false;
  friend bool operator==(const Release&, const Release&) = default;
};

struct Message {
  Kind kind = Kind::kObject;
  base::CallId call;
  base::ModuleId target;
  base::Rank caller;                 // who issued the call, or sends the object
  std::vector<Delivery> deliveries;  // what goes where: asked for in a request, contained in an answer
  std::vector<Release> released;     // what of earlier calls may be forgotten
  std::uint64_t expected = 0;        // fingerprint of the outputs as the caller expects them; 0: it waits for them
  std::int64_t after = -1;           // the number of the caller's call that this one must not overtake; -1: of none
  bool done = true;                  // kResult: nothing that the call has set off still runs
  std::string channel;               // kObject: the mailbox
  std::string state;                 // the caller's state, to be set around the call, or in the answer what its face
                                     // is to know; in the face's format
  value::Value body;
};

// [Note: frame] A message travels as a head and buffers. The head is
//   magic u32 | version u16 | kind u8 | zero u8 | length of the rest u32 | the rest
// (little endian), where the rest holds the message's fields, each block with its own length, the tree's encoding and
// the list of its buffers (device and size in bytes of each), so that a receiver makes room for the buffers before it
// takes them. It says nothing of whom it comes from: that is the transport's to prove before it reads a head.
constexpr std::uint16_t kFrameVersion = 4;  // the same on all ranks of a job

struct BufferSpec {
  at::Device device = at::kCPU;
  std::int64_t size_bytes = 0;
};

struct Frame {
  std::string head;
  std::vector<at::Tensor> buffers;
};

Frame pack(const Message& message);

// The buffers that belong to a head. Throws base::FormatError when it is malformed, or of another version.
std::vector<BufferSpec> buffer_specs(std::string_view head);

// The message of a head and its received buffers, which become the tensors' memory. Throws base::FormatError when they
// do not fit together.
Message unpack(std::string_view head, std::vector<at::Tensor> buffers);

}  // namespace lamina::transport
