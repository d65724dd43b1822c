// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/base/fd.h"

namespace lamina::launch {

// A free TCP port of the loopback address, kept free for this job. The socket stays bound and never listens. So the
// kernel gives the port to nobody who asks for any port. A rank that asks for this one and sets SO_REUSEADDR, as
// servers do (torch's store among them), gets it.
class ReservedPort {
 public:
  // At ::1 for a `master` that is a numeric IPv6 address, and where the machine has no 127.0.0.1. Throws StartError.
  explicit ReservedPort(const std::string& master);
  int number() const { return number_; }
  // Where ranks can meet that were to meet at 127.0.0.1, and at `master` else.
  const std::string& master() const { return master_; }

 private:
  base::Fd socket_;
  int number_ = 0;
  std::string master_;
};

// True where somebody listens on that port of this machine already, so that rank 0 could not. An address that is a
// name, or not this machine's, stands for the loopback one.
bool is_taken(const std::string& address, int port);

}  // namespace lamina::launch
