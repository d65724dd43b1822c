// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/device/capabilities.h"
#include "lamina/value/value.h"

namespace lamina::transport {

// The purpose of a message, for the rank it goes to: a word or two that travel with it. Whoever handles such
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

constexpr base::Step kNoStep{-1};
constexpr base::Microbatch kWholeStep{-1};

// Besides its kind, what any of them has. The rest is known to the sender and the handler of that kind alone.
struct Message {
  Kind kind;
  // The call or the step that it is about. Of others: the rank that sends it, and a number of its own.
  base::CallId call{{}, kNoStep, kWholeStep, 0};
  std::string fields;  // in the format of its kind
  value::Value body;
};

bool carries_tensors(const Message& message);

// [Note: frame] A message travels as a head and buffers. The head is magic u32 | version u16 | zero u16 | kind, 12
// letters | length of the rest u32 | the rest (little endian). The rest holds the list of the buffers (the device's
// role and the size in bytes of each), so that a receiver makes room for them before it takes them. Then come the call,
// and the fields and the tree's encoding, each with its length. It says nothing of whom it comes from: that is the
// transport's to prove before it reads a head.
constexpr std::uint16_t kFrameVersion = 9;  // the same on all ranks of a job

struct BufferSpec {
  at::Device device = devices::kHost;
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
