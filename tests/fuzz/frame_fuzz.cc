// SPDX-License-Identifier: Apache-2.0
// The bytes of a frame's head as a fuzzer makes them: with clang a libFuzzer target, else a program that damages heads
// at random for a while: `frame_fuzz SECONDS [SEED]`. What is a message is read as one of remote calls, and as one of
// remote parameters. Anything but a message or a FormatError ends it.
#include <ATen/ops/zeros.h>

#include <chrono>
#include <cstring>
#include <iostream>
#include <random>

#include "lamina/base/error.h"
#include "tests/parameter_server/protocol_samples.h"
#include "tests/remote/protocol_samples.h"
#include "tests/transport/sample_message.h"

namespace {

using namespace lamina::transport;

constexpr std::size_t kPrefix = 24;
constexpr std::size_t kKind = 8;  // where it stands
constexpr std::int64_t kMostBytes = 1 << 20;

// A head of this version that is as long as it says, since others are refused before more of them is read.
std::string with_prefix(std::string head) {
  const std::string right = pack({}).head.substr(0, kPrefix);
  if (head.size() < kPrefix) head.resize(kPrefix);
  head.replace(0, kKind, right, 0, kKind);
  const auto rest = static_cast<std::uint32_t>(head.size() - kPrefix);
  std::memcpy(&head[kPrefix - sizeof rest], &rest, sizeof rest);
  return head;
}

// The buffers that the head asks for, unless that is more than a test should take.
std::vector<at::Tensor> buffers_of(std::string_view head) {
  std::vector<at::Tensor> buffers;
  std::int64_t bytes = 0;
  for (const auto& spec : buffer_specs(head)) {
    if (spec.size_bytes > kMostBytes || (bytes += spec.size_bytes) > kMostBytes) return {};
    buffers.push_back(at::zeros({spec.size_bytes}, at::kByte));
  }
  return buffers;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string head = with_prefix({reinterpret_cast<const char*>(data), size});
  for (const auto& read : {lamina::remote::testing::read, lamina::parameter_server::testing::read}) {
    try {
      read(unpack(head, buffers_of(head)));
    } catch (const lamina::base::FormatError&) {
    }
  }
  return 0;
}

#ifndef LAMINA_LIBFUZZER
int main(int count, char** words) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(count > 1 ? std::atol(words[1]) : 10);
  std::mt19937_64 random(count > 2 ? std::atoll(words[2]) : 1);
  std::vector<std::string> wholes = {pack(testing::sample()).head};
  for (const auto& message : lamina::remote::testing::messages()) wholes.push_back(pack(message).head);
  for (const auto& message : lamina::parameter_server::testing::messages()) wholes.push_back(pack(message).head);
  std::int64_t heads = 0;
  for (; std::chrono::steady_clock::now() < end; ++heads) {
    const std::string& whole = wholes[random() % wholes.size()];
    std::string head = whole;
    for (auto left = 1 + random() % 6; left > 0; --left) {
      const auto at = random() % head.size();
      const auto length = std::min<std::size_t>(1 + random() % 8, head.size() - at);
      constexpr int kExtremes[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
      switch (random() % 4) {
        case 0:
          std::memset(&head[at], kExtremes[random() % std::size(kExtremes)], length);
          break;
        case 1:
          head[at] = static_cast<char>(random());
          break;
        case 2:
          head.insert(at, head, random() % head.size(), random() % 32);
          break;
        default:
          head.erase(at, length);
      }
      if (head.size() < 2) head = whole;
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(head.data()), head.size());
  }
  std::cout << heads << " heads were messages or malformed" << std::endl;
}
#endif
