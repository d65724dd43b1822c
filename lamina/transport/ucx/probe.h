// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "lamina/base/ids.h"
#include "lamina/contact/secret.h"

namespace lamina::transport::ucx {

// Access for tests behind the back of the transport that open_ucx returns: `dynamic_cast<Probe&>(transport)`.
class Probe {
 public:
  virtual ~Probe() = default;
  // UCX's own description of the endpoint to a rank: names the transports in use.
  virtual std::string lanes(base::Rank peer) = 0;
  // Sends any bytes as a piece, instead of a frame, or as what else has that id (wire.h).
  virtual void send_raw(base::Rank to, const std::string& header, const std::string& data, unsigned id = 1) = 0;
  // How many messages were dropped because they were not authentic or malformed.
  virtual std::int64_t dropped() = 0;
  // How many times something had come, and was only found since we looked after a while: nothing had woken us.
  virtual std::int64_t rescued() = 0;
  // Endpoints to other ranks: of those that this one has sent to.
  virtual int endpoints() = 0;
  // Connections with other ranks.
  virtual int sockets() = 0;
  // By which the pieces that go to a rank are signed.
  virtual contact::Secret key(base::Rank to) = 0;
};

}  // namespace lamina::transport::ucx
