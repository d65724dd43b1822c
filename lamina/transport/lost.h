// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "lamina/base/str.h"

// What is said of a rank that is lost, wherever that is noticed. Python knows by these words whose Ctrl-C it was.
namespace lamina::transport {

inline constexpr std::string_view kInterrupted = "it was interrupted";

// `why` is a clause; `rank` a base::Rank or what stands for one.
template <class Rank>
std::string lost(const Rank& rank, std::string_view why) {
  return base::str("rank ", rank, " is lost: ", why);
}

}  // namespace lamina::transport
