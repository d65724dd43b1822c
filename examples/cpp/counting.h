// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

// A text for language models to learn.
namespace example {

inline constexpr int kSequences = 16, kContext = 64;

// "1 2 3 4 ..." as bytes.
inline torch::Tensor text() {
  std::string counting;
  for (int i = 1; i < 10000; ++i) counting += std::to_string(i) + " ";
  const auto bytes = torch::from_blob(counting.data(), {static_cast<std::int64_t>(counting.size())}, torch::kUInt8);
  return bytes.to(torch::kLong);
}

// Windows of the text, one byte longer than the context.
inline torch::Tensor batch(const torch::Tensor& text) {
  std::vector<torch::Tensor> windows;
  for (int i = 0; i < kSequences; ++i) {
    const auto begin = torch::randint(text.size(0) - kContext - 1, {}).item<std::int64_t>();
    windows.push_back(text.narrow(0, begin, kContext + 1));
  }
  return torch::stack(windows);
}

}  // namespace example
