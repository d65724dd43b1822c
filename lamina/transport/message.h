// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/value/value.h"

namespace lamina::transport {

// What a message asks of the rank it goes to, or tells it: a word or two that travel with it. Whoever handles such
// messages names their kind: see [Note: kinds].
class Kind {
 public:
  static constexpr std::size_t kMostLetters = 12;

  constexpr Kind() = default;  // of no message
  template <std::size_t kSize>
  consteval Kind(const char (&words)[kSize]) {
    static_assert(kSize - 1 <= kMostLetters);
    for (std::size_t i = 0; i + 1 < kSize; ++i) letters_[i] = words[i];
    if (!is_valid()) throw "a kind is a word of small letters, or several with spaces between them";
  }

  // False where the letters that have come are no words.
  constexpr bool is_valid() const {
    const auto end = words().size();
    for (std::size_t i = 0; i < kMostLetters; ++i) {
      const char letter = letters_[i];
      const bool in_words = (letter >= 'a' && letter <= 'z') || (letter == ' ' && i > 0);
      if (i < end ? !in_words : letter != 0) return false;
    }
    return end > 0;
  }
  constexpr std::string_view words() const {
    std::size_t size = 0;
    while (size < kMostLetters && letters_[size] != 0) ++size;
    return {letters_.data(), size};
  }
  friend constexpr auto operator<=>(const Kind&, const Kind&) = default;

 private:
  std::array<char, kMostLetters> letters_{};  // zeros behind the words
};

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

constexpr base::Step kNoStep{-1};
constexpr base::Microbatch kWholeStep{-1};

struct Message {
  Kind kind;
  base::CallId call{{}, kNoStep, kWholeStep, 0};  // the one that it is about, or the step
  base::ModuleId target;
  base::Rank caller;                 // who issued the call, or sends the object
  std::vector<Delivery> deliveries;  // what goes where: asked for in a request, contained in an answer
  std::vector<Release> released;     // what of earlier calls may be forgotten
  std::uint64_t expected = 0;        // fingerprint of the outputs as the caller expects them; 0: it waits for them
  std::int64_t after = -1;           // the number of the caller's call that this one must not overtake; -1: of none
  bool done = true;                  // of a result: nothing that the call has set off still runs
  std::string channel;               // of an object: the mailbox
  std::string state;                 // the caller's state, to be set around the call, or in the answer what its face
                                     // is to know; in the face's format
  value::Value body;
};

// [Note: frame] A message travels as a head and buffers. The head is
//   magic u32 | version u16 | zero u16 | kind, 12 letters | length of the rest u32 | the rest
// (little endian), where the rest holds the message's fields, each block with its own length, the tree's encoding and
// the list of its buffers (device and size in bytes of each), so that a receiver makes room for the buffers before it
// takes them. It says nothing of whom it comes from: that is the transport's to prove before it reads a head.
constexpr std::uint16_t kFrameVersion = 5;  // the same on all ranks of a job

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
