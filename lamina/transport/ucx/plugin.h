// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lamina/device/lending.h"
#include "lamina/rendezvous/switchboard.h"
#include "lamina/transport/transport.h"

// The engine does not link UCX. A shared library of its own uses it (liblamina_ucx.so), and is opened when it is
// needed. By then the environment keeps UCX from installing signal handlers and memory hooks. This is all that the two
// sides know of each other.
namespace lamina::transport::ucx {

// Knowledge of a rank about the others when all have met.
struct PeerConnections {
  base::Rank rank;
  rendezvous::Joined joined;  // in each connection the peer tells its address
  std::chrono::seconds send_timeout{};
  std::optional<std::chrono::milliseconds> silence;  // see UcxOptions
};

// The extent of a job, as far as networks and devices matter.
struct Reach {
  int size = 1;
  bool shared = true;                     // all share memory: nothing is opened on a network
  bool loopback = false;                  // all meet at a loopback address: nothing is opened on any other network
  std::optional<devices::Lending> lends;  // of this rank's device, where UCX is to take values from it
};

// This rank's end, before it is connected.
class LocalEndpoint {
 public:
  virtual ~LocalEndpoint() = default;
  // Where messages to this rank go; `near` for a rank that shares memory with it, else only over the network.
  virtual std::string address(bool near) const = 0;
  virtual std::unique_ptr<Transport> connect(PeerConnections peers) = 0;  // once
};

using MakeEndpoint = std::unique_ptr<LocalEndpoint>(const Reach& reach);

// Opens the library, once per process. Throws base::Error that says what to install.
MakeEndpoint& load_plugin();

}  // namespace lamina::transport::ucx
