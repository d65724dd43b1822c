// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "lamina/base/fd.h"
#include "lamina/base/system_error.h"
#include "lamina/environment/address.h"

namespace lamina::rendezvous {

using base::Fd;
using base::system_error;
using environment::Address;

// How late an interrupt may be noticed while ranks join.
constexpr auto kJoinSlice = std::chrono::milliseconds(200);

}  // namespace lamina::rendezvous
