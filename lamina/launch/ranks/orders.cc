// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/orders.h"

#include <fcntl.h>
#include <unistd.h>

namespace lamina::launch {

Orders::Orders(base::Fd pipe) : pipe_(std::move(pipe)) { ::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK); }

std::optional<int> Orders::next() {
  unsigned char signal = 0;
  const ssize_t count = ::read(pipe_.get(), &signal, 1);
  if (count == 0) abandoned_ = true;
  return count == 1 ? std::optional<int>(signal) : std::nullopt;
}

}  // namespace lamina::launch
